"""Turns a job's channel and list into one stream of events."""
