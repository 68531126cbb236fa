"""Captures of jobs for reports of faults: recorded from the server's keys, and submitted again to compare answers."""
