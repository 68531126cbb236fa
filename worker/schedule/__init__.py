"""Scheduling decisions as pure functions over numbers. Standard library only."""
