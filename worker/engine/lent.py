"""Caches of mlx-lm, lent to mlx-vlm: the two have classes of the same names that do not pass for one another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from worker.engine.upstream import ArraysCache


@contextmanager
def lent(cache: Sequence[Any], theirs: Sequence[Any]) -> Iterator[None]:
    """`theirs`, mlx-vlm's and empty, have the arrays of `cache`, a row's alone; what is done to them there is done here
    in the end. Raises NotImplementedError where they are of other kinds."""
    for ours, other in zip(cache, theirs, strict=True):
        kind, their_kind = type(ours).__name__, type(other).__name__
        if kind != their_kind:
            raise NotImplementedError(f"mlx-lm keeps a layer as {kind}, mlx-vlm as {their_kind}")
        _handed(ours, other)
    yield
    for ours, other in zip(cache, theirs, strict=True):
        _handed(other, ours)


def _handed(giver: Any, taker: Any) -> None:
    if isinstance(giver, ArraysCache) or isinstance(taker, ArraysCache):
        taker.cache = list(giver.cache)
    else:
        taker.keys, taker.values, taker.offset = giver.keys, giver.values, giver.offset
