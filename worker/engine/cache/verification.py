"""A forward of several tokens per row, of which each row then keeps a number of its own."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from worker.engine.cache.layers import SlotLayer, layers
from worker.engine.cache.slot_rows import share_rows


class Verification:
    """One forward of several tokens per row."""

    def __init__(self, cache: Sequence[Any]) -> None:
        self._layers: list[SlotLayer] = list(layers(cache))
        self._open = True

    def begin(self, width: int) -> None:
        """Let the next forward feed `width` tokens to each row."""
        for layer in self._layers:
            layer.begin(width)

    def commit(self, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        """Keep the first `counts[i]` of the tokens of row i, in all layers. Lazy. `clear`: see `SlotLayer`."""
        for layer in self._layers:
            layer.commit(counts, clear)
        share_rows(self._layers)
        self._open = False

    def discard(self, clear: Collection[int] = ()) -> None:
        """Keep no token of the forward. `clear`: see `SlotLayer`."""
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
