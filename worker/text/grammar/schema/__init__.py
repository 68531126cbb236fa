"""Rewrites clients' JSON schemas so that llguidance enforces every keyword that is left in them."""
