"""The prefix cache: in memory, and on disk."""
