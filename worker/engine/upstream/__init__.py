"""Everything that is borrowed from mlx-lm, mlx-vlm and transformers."""
