"""The rows of a slot cache: how many tokens each holds, and the position of its next one."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx


class SlotRows:
    """Rows as they were when one last joined or left. Each has been fed `steps` tokens since, a number that every layer
    counts for itself. Layers with equal rows share one object, so a forward computes each of its arrays only once."""

    def __init__(self, lengths: Sequence[int], positions: Sequence[int], ends: Sequence[int]) -> None:
        """`lengths`: tokens in each row's slot. `positions`: of each row's next token. `ends`: the most tokens that
        each row will have."""
        self.lengths = tuple(lengths)
        self.positions = tuple(positions)
        self.ends = tuple(ends)
        self.longest, self.last_end = max(self.lengths, default=0), max(self.ends, default=0)
        self.equal_lengths = len(set(self.lengths)) <= 1
        self._steps: int | None = None  # after which the arrays below are right
        self._next = self._offset = mx.array(0)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """A value that equal rows have in common."""
        return self.lengths, self.positions, self.ends

    @cached_property
    def slots(self) -> mx.array:
        """Indices of the rows (rows,)."""
        return mx.array([*range(len(self))], dtype=mx.int32)

    @cached_property
    def _arrays(self) -> tuple[mx.array, mx.array]:
        return mx.array([*self.lengths], dtype=mx.int32), mx.array([*self.positions], dtype=mx.int32)

    def next_indices(self, steps: int) -> mx.array:
        """Return the index of each row's next token (rows,), after so many steps. Lazy."""
        self._advance(steps)
        return self._next

    def next_positions(self, steps: int) -> mx.array:
        """Return the position of each row's next token (rows,), after so many steps. Lazy."""
        self._advance(steps)
        return self._offset

    def _advance(self, steps: int) -> None:
        if steps == self._steps:
            return
        # From evaluated arrays: adding to the last sum would grow an endless graph in models that never read it.
        lengths, positions = self._arrays
        self._next = lengths + steps
        self._offset = self._next if self.lengths == self.positions else positions + steps
        self._steps = steps


def share_rows(layers: Iterable[Any]) -> None:
    """Let layers in slots share their rows with those that have equal ones."""
    known = dict[tuple[tuple[int, ...], ...], SlotRows]()
    for layer in layers:
        if layer.slot_rows is not None:
            layer.slot_rows = known.setdefault(layer.slot_rows.key, layer.slot_rows)
