"""Keys and values of many rows, each in its own slot, so that one row is written or dropped without touching the
others.

A row's tokens start at the first column of its slot; a mask hides the columns after its last token. mlx-lm's batch
caches (0.32.2) right-align all rows instead, and therefore copy everything when a row joins, leaves, or outgrows the
others."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from worker.engine.upstream.mlx_lm import BatchKVCache, BatchRotatingKVCache, KVCache, RotatingKVCache
from worker.schedule.memory import UNENDING, padded_shape


class SlotKVCache:
    """Batched KV cache with the interface that models use of mlx-lm's BatchKVCache, for one new token per row and
    step."""

    def __init__(self) -> None:
        self.keys: Any = None  # (rows, heads, columns, head_dim), with spare rows and columns
        self.values: Any = None
        self._seat([], [], [])

    def _seat(self, lengths: list[int], positions: list[int], ends: list[int]) -> None:
        """Replace the row table: for each row its tokens in the slot, the position of its next token, and the most
        tokens that it will have."""
        self.rows, self._lengths, self._positions, self._ends = len(lengths), lengths, positions, ends
        self._longest, self._even = max(lengths, default=0), len(set(lengths)) <= 1
        self._slots = mx.arange(self.rows)
        self._seated = mx.array(lengths, dtype=mx.int32), mx.array(positions, dtype=mx.int32)
        self._steps = 0
        self._advance(0)

    def _advance(self, steps: int) -> None:
        self._steps += steps
        # From evaluated arrays: adding to the last sum would grow an endless graph in models that never read it.
        lengths, positions = self._seated
        self._next = lengths + self._steps
        self._offset = self._next if self._lengths == self._positions else positions + self._steps

    # Called by a model

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, (rows,). It exceeds the row's length if tokens of the prompt were
        dropped."""
        return self._offset

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """Return a boolean mask (rows, 1, 1, columns), or None if every row attends to every column. `N` is always
        1."""
        if self._even and window_size is None:
            return None
        columns, last = mx.arange(self._columns(1)), self._next[:, None]
        mask = columns <= last
        if window_size is not None:
            mask = mask & (columns > last - window_size)
        return mask[:, None, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one token to every row: keys and values are (rows, heads, 1, head_dim). Returns views of all rows, as
        in `keys_and_values`. Blocks only when buffers grow."""
        self._make_room(self.rows, self._columns(1), self._needed(1), keys, values)
        self._write(keys, values)
        self._advance(1)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return views (rows, heads, columns, head_dim) of the slots in use, as wide as the longest row."""
        columns = self._columns()
        return self.keys[: self.rows, :, :columns], self.values[: self.rows, :, :columns]

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation: none before the first row."""
        return [] if self.keys is None else [self.keys, self.values]

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare room included."""
        return sum(buffer.nbytes for buffer in self.state)

    def size(self) -> int:
        """Return the number of columns in use: the length of the longest row."""
        return self._columns()

    def empty(self) -> bool:
        """Return True if the batch has no rows."""
        return self.rows == 0

    def is_trimmable(self) -> bool:
        """Return False: rows are never shortened in place."""
        return False

    # Rows join and leave

    def extend(self, other: Any, position: int | None = None, end: int = UNENDING) -> None:
        """Append one row from an mlx-lm cache of one sequence. `position`: position of its next token, if it differs
        from the cache's offset. `end`: the most tokens that it will have. If it fails, the rows stay as they were."""
        keys, values, offset = self._in_order(other)
        length, (lengths, positions) = keys.shape[2], self._now()
        size = self._room(self.rows + 1, max(self._columns(), length), max([*self._ends, end]))
        self._make_room(self.rows + 1, max(self._columns(), length), size, keys, values)
        slot = slice(self.rows, self.rows + 1)
        for buffer, tokens in (self.keys, keys), (self.values, values):
            buffer[slot, :, :length] = tokens
            # A mask alone is not enough: the slot's last row may have left a NaN, and zero times NaN is NaN.
            buffer[slot, :, length:] = 0
        self._seat([*lengths, length], [*positions, offset if position is None else position], [*self._ends, end])

    def growth(self, tokens: int) -> int:
        """Return the bytes of the buffers that replace these when a row of `tokens` tokens joins; 0 if it fits."""
        rows, columns = self.rows + 1, max(self._columns(), tokens)
        if self.keys is None or not self._lacks(rows, columns):
            return 0
        size = self._room(rows, columns, UNENDING)
        return self.nbytes * size[0] * size[1] // int(self.keys.shape[0] * self.keys.shape[2])

    def moved(self, places: Sequence[int]) -> list[mx.array]:
        """Return copies of the rows that `filter` will write into another slot. Lazy, so that one evaluation serves all
        layers."""
        sources = [place for i, place in enumerate(places) if place != i]
        return [buffer[mx.array(sources)] for buffer in self.state] if sources else []

    def filter(self, places: Sequence[int], moved: Sequence[mx.array] | None = None) -> None:
        """Keep row `places[i]` as row i, and drop the others. Only rows that change their slot are copied. Blocks.
        `moved`: what the method of that name returned for these places."""
        moved = self.moved(places) if moved is None else moved
        mx.eval(moved)  # a buffer with a pending reader would be copied, not written in place
        for buffer, rows in zip(self.state, moved, strict=False):
            for row, to in enumerate(i for i, place in enumerate(places) if place != i):
                buffer[to : to + 1] = rows[row : row + 1]
        lengths, positions = self._now()
        self._seat(*([each[place] for place in places] for each in (lengths, positions, self._ends)))
        self._shrink()

    def extract(self, place: int) -> Any:
        """Return one row as an mlx-lm cache. Lazy: it references the whole batch until it is evaluated."""
        cache = KVCache()
        cache.offset = self._lengths[place] + self._steps
        cache.keys, cache.values = (mx.contiguous(b[place : place + 1, :, : cache.offset]) for b in self.state)
        return cache

    def position(self, place: int) -> int:
        """Return the position of the row's next token."""
        return self._positions[place] + self._steps

    def _now(self) -> tuple[list[int], list[int]]:
        return [n + self._steps for n in self._lengths], [n + self._steps for n in self._positions]

    def _in_order(self, row: Any) -> tuple[mx.array, mx.array, int]:
        """Return the row's keys and values, oldest token first, and the position of its next token."""
        offset = row.offset
        if isinstance(row, BatchKVCache):
            offset, row = int(offset.item()), row.extract(0)
        return *row.keys_and_values(), offset

    def _write(self, keys: mx.array, values: mx.array) -> None:
        """Write one token after each row's last."""
        if self._even:  # one column for all rows is several times cheaper on a CPU
            column = self._column(self._longest + self._steps)
            where: Any = (slice(self.rows), slice(None), slice(column, column + 1))
        else:
            where = (self._slots, slice(None), self._column(self._next))
            keys, values = keys.squeeze(2), values.squeeze(2)
        self.keys[where] = keys
        if values.size:  # scattering nothing divides by zero (MLX 0.32.4), and MiniMax-M3's values have a head_dim of 0
            self.values[where] = values

    # Slots and columns

    def _columns(self, more: int = 0) -> int:
        """Return the number of columns in use now, or after `more` further steps."""
        return self._longest + self._steps + more

    def _column(self, token: Any) -> Any:
        """Return the column of the token with this index, a number or an array."""
        return token

    def _room(self, rows: int, columns: int, end: int) -> tuple[int, int]:
        return padded_shape(rows, columns, end)

    def _needed(self, more: int = 0) -> tuple[int, int]:
        """Rows and columns of buffers for these rows, now or after so many steps more."""
        return self._room(self.rows, self._columns(more), max(self._ends, default=0))

    def _make_room(self, rows: int, columns: int, size: tuple[int, int], keys: mx.array, values: mx.array) -> None:
        """Buffers of that size, unless there are some with room for so many rows and columns."""
        if self.keys is None or self._lacks(rows, columns):
            self._rebuild(size, keys, values)

    def _lacks(self, rows: int, columns: int) -> bool:
        return bool(rows > self.keys.shape[0] or columns > self.keys.shape[2])

    def _rebuild(self, size: tuple[int, int], keys: mx.array, values: mx.array) -> None:
        """Reallocate the buffers at this size (rows, columns), and copy what is in use."""
        # The keys come last, because `_lacks` checks their size: after a failure the next call starts over.
        self.values = self._rebuilt(self.values, size, values)
        self.keys = self._rebuilt(self.keys, size, keys)

    def _rebuilt(self, old: mx.array | None, size: tuple[int, int], like: mx.array) -> mx.array:
        new = mx.zeros((size[0], like.shape[1], size[1], like.shape[3]), dtype=like.dtype)
        if old is not None:
            columns = self._columns()
            new[: self.rows, :, :columns] = old[: self.rows, :, :columns]
        mx.eval(new)  # now, so that at most one buffer exists twice
        return new

    def _shrink(self) -> None:
        """Free memory if less than half of it would do, spare room included."""
        if self.rows == 0:
            self.keys = self.values = None
        else:
            self._shrink_to(share=2)

    def tighten(self) -> None:
        """Gives back what is beyond the room to spare."""
        if self.rows:
            self._shrink_to(share=1)

    def _shrink_to(self, share: int) -> None:
        """Buffers as these rows need them, if those that there are have more than `share` times as many cells."""
        rows, columns = self._needed()
        if share * rows * columns < self.keys.shape[0] * self.keys.shape[2]:
            self._rebuild((rows, columns), self.keys, self.values)


class SlotRotatingKVCache(SlotKVCache):
    """The same for a sliding window: a slot is a ring of `max_size` columns, and each row has its own position in it.
    It does not retain first tokens (mlx-lm's `keep`), nor do mlx-lm's own batches."""

    def __init__(self, max_size: int) -> None:
        self.max_size = max_size
        super().__init__()

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """Return a boolean mask (rows, 1, 1, columns), or None if every row attends to its whole ring. `N` is always
        1."""
        window = min(window_size or self.max_size, self.max_size)
        if self._even and window == self.max_size:
            return None
        age = (self._next[:, None] - mx.arange(self._columns(1))) % self.max_size  # 0 is the token of this step
        return (age <= mx.minimum(self._next, window - 1)[:, None])[:, None, None]

    def extract(self, place: int) -> Any:
        """Return one row as mlx-lm's rotating cache, oldest token first. Lazy: it references the whole batch until it
        is evaluated."""
        tokens = self._lengths[place] + self._steps
        cache = RotatingKVCache(self.max_size)
        cache._idx = min(tokens, self.max_size)
        # The position may differ from the length only in a full ring: until then mlx-lm reads `offset` as the length.
        cache.offset = self.position(place) if tokens >= self.max_size else tokens
        cache.keys, cache.values = (
            mx.contiguous(mx.roll(b[place : place + 1, :, : cache._idx], -tokens % cache._idx, 2)) for b in self.state
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

    def _columns(self, more: int = 0) -> int:
        return min(super()._columns(more), self.max_size)

    def _column(self, token: Any) -> Any:
        return token % self.max_size

    def _room(self, rows: int, columns: int, end: int) -> tuple[int, int]:
        rows, columns = super()._room(rows, columns, end)
        return rows, min(columns, self.max_size)
