"""MLX's streams, which belong to threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import pytest

from worker.engine.upstream.streams import clear_streams


def on_one_thread(*calls: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1, "one") as thread:
        for call in calls:
            thread.submit(call).result()


def compute() -> None:
    mx.eval(mx.ones(3) + 1)


def test_a_thread_that_has_cleared_its_streams_cannot_compute_again() -> None:
    with pytest.raises(RuntimeError, match="There is no Stream"):
        on_one_thread(compute, clear_streams, compute)


def test_a_thread_clears_its_streams_once() -> None:
    with pytest.raises(RuntimeError, match="the thread one_0 has cleared its streams before"):
        on_one_thread(clear_streams, clear_streams)
    on_one_thread(compute, clear_streams)
