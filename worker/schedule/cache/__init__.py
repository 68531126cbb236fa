"""Decisions of the caches that outlive a request."""
