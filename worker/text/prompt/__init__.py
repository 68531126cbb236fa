"""Turns messages into prompt tokens: templates, escaping, size limits, boundaries."""
