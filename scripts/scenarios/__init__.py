"""Fault scenarios: run at a modest size by the tests, at full size by scripts/chaos."""
