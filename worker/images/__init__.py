"""Turns the image parts of a request into what a vision model takes; independent of MLX, Redis and text processing."""
