"""From a queued body to JSON values: large bodies never hold up the event loop or another thread."""
