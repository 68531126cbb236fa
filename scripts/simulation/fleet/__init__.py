"""Simulates several workers of one model: which of them takes which job, and what its prefix cache then finds."""
