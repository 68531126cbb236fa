"""The worker's process and its child processes: resource limits, exit, log format."""
