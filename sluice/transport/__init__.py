"""The connection to Redis: URLs, retries, scripts."""
