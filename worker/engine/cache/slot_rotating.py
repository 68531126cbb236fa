"""Keys and values of a sliding window: each row's slot is a ring."""

from typing import Any

import mlx.core as mx

from worker.engine.cache.slot_kv import SlotKVCache
from worker.engine.upstream.mlx_lm import BatchRotatingKVCache, RotatingKVCache


class SlotRotatingKVCache(SlotKVCache):
    """`SlotKVCache` for a sliding window: a slot is a ring of `max_size` columns, and each row has its own position in
    it. Like mlx-lm's own batches it does not support `keep`, which retains first tokens."""

    def __init__(self, max_size: int) -> None:
        """`max_size`: tokens of the window."""
        self.max_size = max_size
        super().__init__()

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """Return a boolean mask (rows, 1, 1, columns), or None if every row attends to its whole ring. `N` is always
        1."""
        window = min(window_size or self.max_size, self.max_size)
        if self._equal_lengths and window == self.max_size:
            return None
        age = (self._next[:, None] - mx.arange(self._columns(1))) % self.max_size  # 0 is the token of this step
        return (age <= mx.minimum(self._next, window - 1)[:, None])[:, None, None]

    def extract(self, index: int) -> Any:
        """Return one row as mlx-lm's rotating cache, oldest token first. Lazy: it references the whole batch until it
        is evaluated."""
        tokens = self._lengths[index] + self._steps
        cache = RotatingKVCache(self.max_size)
        cache._idx = min(tokens, self.max_size)
        # The position may differ from the length only in a full ring: until then mlx-lm reads `offset` as the length.
        cache.offset = self.position(index) if tokens >= self.max_size else tokens
        cache.keys, cache.values = (
            mx.contiguous(mx.roll(b[index : index + 1, :, : cache._idx], -tokens % cache._idx, 2)) for b in self.state
        )
        return cache

    def _in_order(self, row: Any) -> tuple[mx.array, mx.array, int]:
        offset = row.offset
        if isinstance(row, BatchRotatingKVCache):
            offset, row = int(offset.item()), row.extract(0)
        keys, values = (row._temporal_order(b)[..., -self.max_size :, :] for b in (row.keys, row.values))
        return keys, values, offset

    def growth(self, tokens: int) -> int:
        """Return the same as for a plain cache, for at most `max_size` tokens."""
        return super().growth(min(tokens, self.max_size))

    def _columns(self, steps: int = 0) -> int:
        return min(super()._columns(steps), self.max_size)

    def _column(self, token: Any) -> Any:
        return token % self.max_size

    def _padded_shape(self, rows: int, columns: int, end: int) -> tuple[int, int]:
        rows, columns = super()._padded_shape(rows, columns, end)
        return rows, min(columns, self.max_size)
