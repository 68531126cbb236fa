"""Images: from the parts of a request to pixels. Used by a vision model's worker; independent of MLX, Redis and text
processing."""
