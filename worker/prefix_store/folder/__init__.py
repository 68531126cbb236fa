"""The folder of the store: its quota, its lock, and how files appear in it."""
