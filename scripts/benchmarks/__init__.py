"""Measurements. Each compares two things in one run, since machines are noisy, and prints a table."""
