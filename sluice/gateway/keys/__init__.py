"""API keys: the file that holds them, the limits of each key, and the headers that report the limits."""
