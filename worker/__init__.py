"""The daemon. `worker/jobs.py` is the place to start reading."""

__version__ = "0.1.0"
