"""A work-around for threads that use MLX."""

import threading

import mlx.core as mx

_thread = threading.local()


def clear_streams() -> None:
    """Clear MLX's streams of this thread, as the last thing that the thread does with MLX: one that has used MLX, or
    imported mlx-lm, and ends without it aborts the process at exit (mlx 0.32.4).

    Raises RuntimeError in a thread that has cleared them before. MLX would raise it too, but only on a GPU, where it
    looks for the default stream that it remembers for the thread."""
    if getattr(_thread, "cleared", False):
        raise RuntimeError(
            f"the thread {threading.current_thread().name} has cleared its streams before; use a new one"
        )
    mx.synchronize()
    mx.clear_streams()
    _thread.cleared = True
