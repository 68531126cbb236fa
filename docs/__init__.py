"""Generators of pages and documents."""
