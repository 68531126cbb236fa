"""Reads requests for responses, as chat completions of the contract."""
