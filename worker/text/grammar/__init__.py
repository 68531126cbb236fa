"""Guided decoding: from a schema or a set of tools to a grammar, and its state for each row."""
