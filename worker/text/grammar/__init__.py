"""Guided decoding: turns a schema or a set of tools into a grammar, and keeps its state for each row."""
