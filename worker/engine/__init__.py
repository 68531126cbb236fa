"""The inference engine: model, caches, batching, prefill and sampling. The only package that imports MLX."""
