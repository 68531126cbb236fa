"""The only package that imports MLX."""
