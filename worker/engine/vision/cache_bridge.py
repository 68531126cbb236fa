"""Pass mlx-lm's caches to mlx-vlm: both have classes of the same names that are not interchangeable."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from worker.engine.cache.kinds import kind_of


@contextmanager
def lent_to(cache: Sequence[Any], other: Sequence[Any]) -> Iterator[None]:
    """Give the arrays of `cache`, one row's, to `other`, mlx-vlm's empty caches, and take the updated arrays back when
    the context closes. If the body raises, nothing is taken back. Raises NotImplementedError if the kinds of layers
    differ."""
    for layer, other_layer in zip(cache, other, strict=True):
        kind, other_kind = type(layer).__name__, type(other_layer).__name__
        if kind != other_kind:
            raise NotImplementedError(f"mlx-lm caches a layer as {kind}, mlx-vlm as {other_kind}")
        kind_of(layer).hand_over(layer, other_layer)
    yield
    for layer, other_layer in zip(cache, other, strict=True):
        kind_of(layer).hand_over(other_layer, layer)
