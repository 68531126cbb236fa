"""What an operator sees: metrics, probes, heartbeats."""
