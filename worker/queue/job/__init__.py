"""A job in Redis: claim, lease, log of events, result, ending."""
