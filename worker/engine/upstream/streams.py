"""A work-around for threads that use MLX."""

import mlx.core as mx


def clear_streams() -> None:
    """Clear MLX's streams of this thread: one that has used MLX, or imported mlx-lm, and ends without it aborts the
    process at exit (mlx 0.32.4)."""
    mx.synchronize()
    mx.clear_streams()
