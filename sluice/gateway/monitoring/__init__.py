"""Probes, metrics and the access log of a gateway."""
