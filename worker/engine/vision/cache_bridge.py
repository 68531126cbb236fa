"""Pass mlx-lm's caches to mlx-vlm: both have classes of the same names that are not interchangeable."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from worker.engine.upstream.mlx_lm import ArraysCache


@contextmanager
def borrowed_by(cache: Sequence[Any], theirs: Sequence[Any]) -> Iterator[None]:
    """Give the arrays of `cache`, one row's, to `theirs`, mlx-vlm's empty caches, and take the updated arrays back when
    the context closes. If the body raises, nothing is taken back. Raises NotImplementedError if the kinds of layers
    differ."""
    for ours, other in zip(cache, theirs, strict=True):
        kind, their_kind = type(ours).__name__, type(other).__name__
        if kind != their_kind:
            raise NotImplementedError(f"mlx-lm caches a layer as {kind}, mlx-vlm as {their_kind}")
        _handed(ours, other)
    yield
    for ours, other in zip(cache, theirs, strict=True):
        _handed(other, ours)


def _handed(giver: Any, taker: Any) -> None:
    if isinstance(giver, ArraysCache) or isinstance(taker, ArraysCache):
        taker.cache = list(giver.cache)
    else:
        taker.keys, taker.values, taker.offset = giver.keys, giver.values, giver.offset
