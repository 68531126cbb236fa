"""Images: from the parts of a request to pixels. Knows neither MLX nor Redis, nor words; of a vision model's worker."""
