"""Speculation in numbers: drafts that are offered, and which of them are worth a forward."""
