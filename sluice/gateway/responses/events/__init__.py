"""Turns the events of a job into those of a response."""
