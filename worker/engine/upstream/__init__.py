"""Everything that is borrowed from mlx-lm, mlx-vlm, mlx-embeddings and transformers."""
