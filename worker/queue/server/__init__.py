"""The Redis server: checks at start, permissions, clock, outages."""
