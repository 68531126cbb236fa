"""Recurrent states of many rows."""

from collections.abc import Iterable, Sequence

import mlx.core as mx

from worker.engine.upstream.mlx_lm import ArraysCache


class SlotArraysCache(ArraysCache):
    """Recurrent state of a batch. A model replaces it entirely at every step, so joining may copy all of it."""

    def __init__(self, size: int) -> None:
        self.cache: list[mx.array | None]
        super().__init__(size)
        self.rows = 0

    def extend(self, rows: Sequence[ArraysCache], positions: Sequence[int | None], ends: Sequence[int]) -> None:
        """Append rows, mlx-lm caches of one sequence each. `positions` and `ends` are not used. Blocks; if it fails,
        the rows stay as they were."""
        joined = [_concatenate(states) for states in zip(self.cache, *(row.cache for row in rows), strict=True)]
        mx.eval(joined)
        self.cache, self.rows = joined, self.rows + len(rows)

    def growth(self, tokens: int) -> int:
        """Return the bytes copied when a row joins: the whole state."""
        return sum(state.nbytes for state in self.cache if state is not None)

    def tighten(self) -> None:
        """Do nothing: a state has no spare room."""

    def moved(self, order: Sequence[int]) -> list[mx.array]:
        """Return no arrays: a state is replaced, not written into."""
        return []

    def filter(self, order: Sequence[int], moved: Sequence[mx.array] | None = None) -> None:
        """Keep row `order[i]` as row i, and drop the others. Lazy. `moved` is not used."""
        indices = mx.array(list(order), dtype=mx.int32)
        self.cache = [None if state is None or not len(order) else state[indices] for state in self.cache]
        self.rows = len(order)

    def extract(self, index: int) -> ArraysCache:
        """Return a copy of one row as an mlx-lm cache. Lazy: it references the whole batch until it is evaluated."""
        row = ArraysCache(len(self.cache))
        row.cache = [None if state is None else mx.contiguous(state[index : index + 1]) for state in self.cache]
        return row


def _concatenate(states: Iterable[mx.array | None]) -> mx.array | None:
    present = [state for state in states if state is not None]
    return mx.concatenate(present) if present else None
