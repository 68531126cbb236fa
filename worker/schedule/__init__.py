"""What to run next, as pure functions over numbers. Standard library only."""
