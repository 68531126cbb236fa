"""Fault scenarios: the tests run them at a small size, scripts/chaos at full size."""
