"""Durable prefixes: files of cached prefixes in a folder that workers share. Knows bytes, files and tokens; no MLX."""
