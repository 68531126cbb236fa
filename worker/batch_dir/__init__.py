"""Runs the batch files of a folder: inbox, schedule and feeder processes."""
