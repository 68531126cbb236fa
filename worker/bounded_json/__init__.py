"""Parses queued bodies as JSON without blocking the event loop or another thread for long."""
