"""A step: the prompts that advance in it, and the time it may take. No MLX, no clock, no I/O."""
