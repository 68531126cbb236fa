"""Loading a model, its memory profile, and the report of `sluice check`."""
