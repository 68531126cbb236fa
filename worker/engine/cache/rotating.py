"""Keys and values of a sliding window: in a batch, each row's slot is a ring."""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx

from worker.engine.cache.kv import PackedKVCache, SlotKVCache
from worker.engine.cache.layers import LayerKind, PackedLayer, SlotLayer
from worker.engine.upstream.mlx_lm import RotatingKVCache


class SlotRotatingKVCache(SlotKVCache):
    """`SlotKVCache` for a sliding window: a slot is a ring, and each row has its own position in it. Like mlx-lm's own
    batches it does not support `keep`, which retains first tokens.

    A forward of N tokens from token p on overwrites what the ring held of tokens p - ring to p - ring + N - 1. The
    oldest token that a query may attend to, now or after all but one of these tokens were dropped, is p - window + 1.
    So a ring of window + N - 1 columns loses nothing that is still needed."""

    def __init__(self, max_size: int, spare: int = 0) -> None:
        """`max_size`: tokens of the window. `spare`: the most tokens of a forward beyond the first; the ring has as
        many columns more than the window."""
        self.max_size = max_size
        self._ring = max_size + spare
        super().__init__()

    def begin(self, width: int) -> None:
        """Let the next forward feed `width` tokens to each row. Raises ValueError if the ring has too few columns."""
        if width > 1 + self._ring - self.max_size:
            raise ValueError(f"A ring of {self._ring} columns for a window of {self.max_size} takes no {width} tokens.")
        super().begin(width)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """Return a boolean mask (rows, 1, N, columns) for `N` new tokens of each row, or None if every row attends to
        every column."""
        window = min(window_size or self.max_size, self.max_size)
        if N == 1 and self.slot_rows.equal_lengths and self._columns(1) <= window:
            return None
        tokens, columns = self._new_tokens(N), mx.arange(self._columns(N))
        last = tokens[:, -1:]
        held = (last - (last - columns) % self._ring)[:, None]  # (rows, 1, columns): the token in each column
        tokens = tokens[..., None]
        return ((held >= 0) & (held <= tokens) & (held > tokens - window))[:, None]

    def extract(self, index: int) -> Any:
        """Return one row as mlx-lm's rotating cache, oldest token first. Lazy: it references the whole batch until it
        is evaluated."""
        tokens = self.slot_rows.lengths[index] + self._steps
        cache = RotatingKVCache(self.max_size)
        cache._idx = min(tokens, self.max_size)
        columns = mx.arange(tokens - cache._idx, tokens) % self._ring
        # The position may differ from the length only in a full ring: until then mlx-lm reads `offset` as the length.
        cache.offset = self.position(index) if tokens >= self.max_size else tokens
        cache.keys, cache.values = (mx.contiguous(b[index : index + 1][:, :, columns]) for b in self.state)
        return cache

    def _in_order(self, row: Any) -> tuple[mx.array, mx.array, int]:
        keys, values = (row._temporal_order(b)[..., -self.max_size :, :] for b in (row.keys, row.values))
        return keys, values, row.offset

    def growth(self, tokens: int) -> int:
        """Return the same as for a plain cache, for at most `max_size` tokens."""
        return super().growth(min(tokens, self.max_size))

    def _columns(self, steps: int = 0) -> int:
        return min(super()._columns(steps), self._ring)

    def _column(self, token: Any) -> Any:
        return token % self._ring

    def _padded_shape(self, rows: int, columns: int, end: int) -> tuple[int, int]:
        rows, columns = super()._padded_shape(rows, columns, end)
        return rows, min(columns, self._ring)


class _PackedRotatingKVCache(PackedKVCache):
    """`PackedKVCache` for a sliding window."""

    def __init__(self, rows: Sequence[Any], tokens: Sequence[int], offset: int | mx.array) -> None:
        """For the parameters see `PackedKVCache`."""
        self.max_size = rows[0].max_size
        super().__init__(rows, tokens, offset)

    def _num_held(self, row: Any) -> int:
        held: int = min(row.offset, self.max_size - 1)
        return held

    def _past(self, row: Any, buffer: mx.array) -> mx.array:
        ordered: mx.array = row._temporal_order(buffer)
        return ordered[..., ordered.shape[2] - self._num_held(row) :, :]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | Literal["causal"] | None:
        """Return the same as for a plain cache, with a window of at most `max_size`."""
        window = min(window_size or self.max_size, self.max_size)
        return super().make_mask(N, window if self._longest + N > window else None, return_array)


class Rotating(LayerKind):
    """Keys and values of a sliding window. A window that retains first tokens (`keep`) has neither slots nor packs."""

    classes = RotatingKVCache, SlotRotatingKVCache

    def slots(self, layer: Any, max_draft: int) -> SlotLayer:
        """Return an empty layer for many rows."""
        return SlotRotatingKVCache(layer.max_size, max_draft) if layer.keep == 0 else super().slots(layer, max_draft)

    def packed(self, rows: Sequence[Any], tokens: Sequence[int], offset: int | mx.array) -> PackedLayer:
        """Return a layer with which rows share a forward."""
        if any(row.keep for row in rows):
            return super().packed(rows, tokens, offset)
        return _PackedRotatingKVCache(rows, tokens, offset)

    def snapshot(self, layer: Any, index: int) -> Any:
        """Return a copy of one row's window. A prompt chunk stretches the buffers beyond it."""
        if isinstance(layer, SlotRotatingKVCache):
            return layer.extract(index)
        copied = copy.deepcopy(layer)
        if copied.keys is not None:
            buffers = copied.keys, copied.values
            ordered = [copied._temporal_order(buffer)[..., -copied.max_size :, :] for buffer in buffers]
            copied.keys, copied.values = map(mx.contiguous, ordered)
            copied._idx = copied.keys.shape[2]
        return copied

    def hand_over(self, layer: Any, other: Any) -> None:
        """Let `other` hold the keys and values, and the column of the newest."""
        super().hand_over(layer, other)
        other._idx = layer._idx

    def window(self, layer: Any) -> int | None:
        """Return the tokens of the window."""
        return int(layer.max_size)

    def name(self, layer: Any) -> str:
        """Return the name of the kind, for people."""
        return "rotating"
