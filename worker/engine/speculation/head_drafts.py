"""Drafts of an MTP head for the rows of a batch, and the head's keys and values of prompts and rows.

Entry t of a head follows from the trunk's hidden state of token t and from token t + 1. A row may lack entries, of
tokens that were loaded from a cache or decoded without drafts: its drafts are then less often right, and its tokens are
the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from worker.engine.cache.slot_kv import SlotKVCache
from worker.engine.speculation.mtp import MTPHead, RecordingTrunk
from worker.engine.upstream.mlx_lm import KVCache
from worker.schedule.speculation.offer import MAX_DRAFT


@dataclass(frozen=True, slots=True)
class Head:
    """An MTP head and the trunk that it shares."""

    network: MTPHead
    trunk: RecordingTrunk

    def states(self, tokens: mx.array, hidden: mx.array, mask: Any, cache: Any) -> mx.array:
        """Return the head's hidden states (rows, tokens, hidden_size). `tokens`: those after the tokens of `hidden`.
        Lazy; writes to `cache`."""
        return self.network(self.network.embed(tokens, self.trunk), hidden, mask, [cache])

    def likeliest(self, states: mx.array) -> mx.array:
        """Return the most probable tokens (rows, tokens) by the head's hidden states. Lazy."""
        return mx.argmax(self.network.logits(states, self.trunk), axis=-1)


@dataclass(frozen=True, slots=True)
class PromptEntries:
    """The head's entries of a prompt, which its row takes along when it joins a batch."""

    cache: Any  # an mlx-lm cache
    start: int  # position of the first entry's token


class PromptHead:
    """Computes the head's entries of one prompt, chunk by chunk. It ends at the first token that is not computed, if
    some are dropped."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._cache = KVCache()
        self._start: int | None = None

    def feed(self, hidden: mx.array, after: Sequence[int], position: int) -> None:
        """Add an entry for each hidden state (1, tokens, hidden_size). `after`: the token after each. `position`: of
        the first one's token. Blocks."""
        if self._start is None:
            self._start = position
        if position != self._start + self._cache.offset:
            return
        mask = self._cache.make_mask(len(after), return_array=False, window_size=None)
        self._head.states(mx.array([list(after)]), hidden, mask, self._cache)
        mx.eval(self._cache.state)

    def finish(self) -> PromptEntries | None:
        """Return the entries; None if there are none. The object must not be used afterwards."""
        return None if self._start is None else PromptEntries(self._cache, self._start)


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


def entry_shape(head: Head) -> tuple[mx.array, mx.array]:
    """Return keys and values of one entry, which are not computed."""
    cache, token = KVCache(), mx.zeros((1, 1), mx.int32)
    head.states(token, head.network.embed(token, head.trunk), None, cache)
    keys, values = cache.keys_and_values()
    return keys, values
