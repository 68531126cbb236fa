"""Text in both directions: messages to prompt tokens, sampled tokens to output. Imports neither MLX nor Redis."""
