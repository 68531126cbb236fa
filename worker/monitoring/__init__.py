"""Metrics, health probes and heartbeats."""
