"""Drafts of an MTP head for the rows of a batch, and the head's keys and values of these rows."""

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx

from worker.engine.cache.kv import SlotKVCache
from worker.engine.speculation.mtp.head import Head, entry_shape
from worker.engine.speculation.mtp.prompt import PromptEntries
from worker.outcomes import MAX_DRAFT


class _HeadCache(SlotKVCache):
    """Keys and values of a head, for rows of which some have no entries yet."""

    def join(self, rows: Sequence[Any | None], ends: Sequence[int], shape: tuple[mx.array, mx.array]) -> None:
        """Append rows: an mlx-lm cache, or None for a row without entries. `shape`: keys and values of any length.
        Blocks."""
        held = [row.keys_and_values() if row else None for row in rows]
        added = [each[0].shape[2] if each else 0 for each in held]
        self._make_room(added, ends, *shape)
        for slot, each in enumerate(held, self.rows):
            self._write_row(slot, each)
        lengths, current = self._current()
        self._set_rows([*lengths, *added], [*current, *added], [*self.slot_rows.ends, *ends])
        mx.eval(self.state)

    def _write_row(self, slot: int, held: tuple[mx.array, mx.array] | None) -> None:
        if held:
            self._fill(slot, *held)
            return
        for buffer in self.state:
            buffer[slot : slot + 1] = 0

    def continue_at(self, positions: list[int]) -> None:
        """Set the position of each row's next token."""
        lengths, _ = self._current()
        self._set_rows(lengths, positions, self.slot_rows.ends)


class HeadDrafts:
    """The drafts of one batch, whose rows join and leave as those of the batch do. For the engine's thread."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._cache = _HeadCache()
        self._starts: list[int] = []  # position of each row's first entry

    @property
    def nbytes(self) -> int:
        """Allocated bytes of the head's keys and values."""
        return self._cache.nbytes

    def add(self, rows: Sequence[PromptEntries | None], ends: Sequence[int]) -> None:
        """Append rows, with their entries if there are any. `ends`: the most tokens that each will have. Blocks."""
        ends = [end + MAX_DRAFT for end in ends]
        self._cache.join([row.cache if row else None for row in rows], ends, entry_shape(self._head))
        self._starts += [row.start if row else 0 for row in rows]

    def select(self, order: Sequence[int]) -> None:
        """Keep row `order[i]` as row i, and drop the others. Blocks."""
        self._cache.filter(order)
        self._starts = [self._starts[index] for index in order]

    def draft(
        self, hidden: mx.array, after: Sequence[Sequence[int]], positions: Sequence[int], depth: int
    ) -> list[list[int]]:
        """Return `depth` tokens for each row. Blocks.

        `hidden`: (rows, width, hidden_size), the trunk's states of the row's last tokens, without those that it did not
        keep. `after`: the token after each of these; of a row without any, the drafts mean nothing. `positions`: of the
        first of these tokens."""
        counts = [len(tokens) for tokens in after]
        self._cache.continue_at([at - start for at, start in zip(positions, self._starts, strict=True)])
        states = self._fed(hidden, after, counts)
        drafts = [self._head.likeliest(states)]
        for _ in range(depth - 1):  # from its own states, which are dropped afterwards
            mask = self._cache.make_mask(1)
            states = self._head.states(drafts[-1], states, mask, self._cache)
            drafts.append(self._head.likeliest(states))
        self._cache.drop_last(depth - 1)
        return cast("list[list[int]]", mx.concatenate(drafts, axis=1).tolist())

    def _fed(self, hidden: mx.array, after: Sequence[Sequence[int]], counts: Sequence[int]) -> mx.array:
        """Add the entries, and return the head's state of each row's last one, (rows, 1, hidden_size)."""
        width = max(counts)
        padded = mx.array([[*tokens, *[0] * (width - len(tokens))] for tokens in after], dtype=mx.int32)
        self._cache.begin(width)
        try:
            states = self._head.states(padded, hidden[:, :width], self._cache.make_mask(width), self._cache)
        except BaseException:
            self._cache.roll_back()
            raise
        self._cache.commit(counts)
        last = mx.maximum(mx.array([*counts]) - 1, 0)[:, None, None]
        return mx.take_along_axis(states, last, axis=1)
