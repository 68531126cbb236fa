"""From a job's channel and its log to the events that a caller iterates over."""
