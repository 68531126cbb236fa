"""Turns the image parts of a request into pixels. Used by a vision model's worker; independent of MLX, Redis and
text processing."""
