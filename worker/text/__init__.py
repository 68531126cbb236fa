"""Words: messages in, text out. Knows neither MLX nor Redis."""
