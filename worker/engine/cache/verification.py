"""A forward of several tokens per row, of which each row then keeps a number of its own."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from worker.engine.cache.kv import SlotKVCache
from worker.engine.cache.layers import layers
from worker.engine.cache.slot_rows import share_rows


class CommittingLayer(Protocol):
    """A slot cache that can keep a part of a forward's tokens."""

    def begin(self, width: int) -> None:
        """Let the next forward feed `width` tokens to each row. They count only after `commit`."""

    def commit(self, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        """Keep the first `counts[i]` >= 1 of the tokens of row i. `clear`: rows of which no value of the other tokens
        may stay in a buffer, since one is not finite."""

    def roll_back(self, clear: Collection[int] = ()) -> None:
        """Keep no token of the forward. `clear`: as for `commit`."""


class Verification:
    """One forward of several tokens per row."""

    def __init__(self, cache: Sequence[Any]) -> None:
        self._layers: list[CommittingLayer] = list(layers(cache))
        self._open = True

    def begin(self, width: int) -> None:
        """Let the next forward feed `width` tokens to each row."""
        for layer in self._layers:
            layer.begin(width)

    def commit(self, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        """Keep the first `counts[i]` of the tokens of row i, in all layers. Lazy. `clear`: see `CommittingLayer`."""
        for layer in self._layers:
            layer.commit(counts, clear)
        share_rows(layer for layer in self._layers if isinstance(layer, SlotKVCache))
        self._open = False

    def discard(self, clear: Collection[int] = ()) -> None:
        """Keep no token of the forward. `clear`: see `CommittingLayer`."""
        for layer in self._layers:
            layer.roll_back(clear)
        self._open = False

    def end(self) -> None:
        """Keep no token of the forward unless `commit` has succeeded."""
        if self._open:
            self.discard()


@contextmanager
def verification(cache: Sequence[Any], width: int) -> Iterator[Verification]:
    """Let the forward in the body feed `width` tokens to each row of the batch, and the body then commit. Without a
    commit, lengths and states stay as they were."""
    verifying = Verification(cache)
    try:
        verifying.begin(width)
        yield verifying
    finally:
        verifying.end()
