"""Keys and values: of the rows of a batch, and of prompts that share a forward.

Each row of a batch has its own slot, so that one is written or dropped without touching the others. Its tokens start at
the first column of the slot; a mask hides the columns after its last token. mlx-lm's batch caches (0.32.2) right-align
all rows instead (`left_padding`), and therefore copy everything when a row joins, leaves, or outgrows the others."""

from collections.abc import Collection, Sequence
from typing import Any, Literal

import mlx.core as mx

from worker.engine.cache.layers import LayerKind, PackedLayer, SlotLayer, SlotRows
from worker.engine.memory import UNLIMITED_TOKENS, padded_shape
from worker.engine.upstream.mlx_lm import KVCache


class SlotKVCache:
    """Batched KV cache with the interface that models use of mlx-lm's BatchKVCache, for one new token per row and
    step, or for several of which each row keeps some: see `begin`."""

    def __init__(self) -> None:
        self.keys: Any = None  # (rows, heads, columns, head_dim), with spare rows and columns
        self.values: Any = None
        self.nbytes = 0  # allocated, spare room included
        self._capacity = 0, 0  # rows and columns of the buffers
        self._width = 0  # tokens per row of the forward that verifies drafts; 0: the next forward feeds one token
        self._set_rows([], [], [])

    def _set_rows(self, lengths: Sequence[int], positions: Sequence[int], ends: Sequence[int]) -> None:
        """Replace the rows: see `SlotRows`."""
        self.rows = len(lengths)
        self.slot_rows = SlotRows(lengths, positions, ends)
        self._steps = 0  # tokens that each row was fed since

    # Called by a model

    @property
    def offset(self) -> mx.array:
        """Position of each row's next token, (rows,). It exceeds the row's length if tokens of the prompt were
        dropped."""
        return self.slot_rows.next_positions(self._steps)

    def make_mask(self, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
        """Return a boolean mask (rows, 1, N, columns) for `N` new tokens of each row, or None if every row attends to
        every column."""
        if N == 1 and self.slot_rows.equal_lengths and window_size is None:
            return None
        columns, last = mx.arange(self._columns(N)), self._new_tokens(N)[..., None]
        mask = columns <= last
        if window_size is not None:
            mask = mask & (columns > last - window_size)
        return mask[:, None]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one token to every row, or as many as `begin` has announced: keys and values are (rows, heads, tokens,
        head_dim). Returns views of all rows, as in `keys_and_values`. Blocks only when buffers grow."""
        tokens = keys.shape[2]
        assert tokens == (self._width or 1), "another number of tokens than announced"
        self._ensure_capacity(self.rows, self._columns(tokens), self.slot_rows.last_end, keys, values)
        self._write(keys, values)
        if not self._width:
            self._steps += 1
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return views (rows, heads, columns, head_dim) of the slots in use, as wide as the longest row."""
        columns = self._columns(self._width)
        return self.keys[: self.rows, :, :columns], self.values[: self.rows, :, :columns]

    @property
    def state(self) -> list[mx.array]:
        """The buffers, for evaluation: none before the first row."""
        return [] if self.keys is None else [self.keys, self.values]

    def size(self) -> int:
        """Return the number of columns in use: the length of the longest row."""
        return self._columns()

    def empty(self) -> bool:
        """Return True if the batch has no rows."""
        return self.rows == 0

    def is_trimmable(self) -> bool:
        """Return False: rows are never shortened in place."""
        return False

    # Several tokens, of which each row keeps some

    def begin(self, width: int) -> None:
        """Let the next forward feed `width` tokens to each row. They count only after `commit`."""
        self._width = width

    def commit(self, counts: Sequence[int], clear: Collection[int] = ()) -> None:
        """Keep the first `counts[i]` of the tokens that were fed to row i. The others stay behind a mask, and later
        tokens overwrite them; for the rows of `clear`, they are overwritten with zeros now."""
        self._end_forward(counts, clear)
        lengths, positions = self._current()
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        self._set_rows(lengths, [at + count for at, count in zip(positions, counts, strict=True)], self.slot_rows.ends)

    def roll_back(self, clear: Collection[int] = ()) -> None:
        """Keep none of the tokens that were fed after `begin`. `clear`: as for `commit`."""
        self._end_forward([0] * self.rows, clear)

    def _end_forward(self, counts: Sequence[int], clear: Collection[int]) -> None:
        """Let the next forward feed one token to each row. In the rows of `clear`, overwrite the tokens after the first
        `counts[i]` with zeros."""
        width, self._width = self._width, 0
        lengths, _ = self._current()
        for row in clear:
            columns = self._column(lengths[row] + counts[row] + mx.arange(width - counts[row]))
            for buffer in self.state:
                if buffer.size and counts[row] < width:  # scattering nothing divides by zero (MLX 0.32.4)
                    buffer[row, :, columns] = 0

    def drop_last(self, tokens: int) -> None:
        """Drop the last `tokens` tokens of each row, which were fed one by one: later ones overwrite them."""
        lengths, positions = self._current()
        self._set_rows([n - tokens for n in lengths], [n - tokens for n in positions], self.slot_rows.ends)

    # Rows join and leave

    def extend(self, rows: Sequence[Any], positions: Sequence[int | None], ends: Sequence[int]) -> None:
        """Append rows, mlx-lm caches of one sequence each. `positions`: position of each row's next token, or None if
        it is the cache's offset. `ends`: the most tokens that each will have. If it fails, the rows stay as they
        were."""
        ordered = [self._in_order(row) for row in rows]
        added = [keys.shape[2] for keys, _, _ in ordered]
        starts = [offset if at is None else at for (_, _, offset), at in zip(ordered, positions, strict=True)]
        self._make_room(added, ends, *ordered[0][:2])
        for slot, (keys, values, _) in enumerate(ordered, self.rows):
            self._fill(slot, keys, values)
        lengths, current = self._current()
        self._set_rows([*lengths, *added], [*current, *starts], [*self.slot_rows.ends, *ends])

    def _make_room(self, added: Sequence[int], ends: Sequence[int], keys: mx.array, values: mx.array) -> None:
        """Allocate buffers that hold further rows of these lengths unless the present ones do."""
        rows, columns = self.rows + len(added), max(self._columns(), *added)
        self._ensure_capacity(rows, columns, max(self.slot_rows.last_end, *ends), keys, values)

    def _fill(self, slot: int, keys: mx.array, values: mx.array) -> None:
        """Write a row's tokens to the beginning of its slot, and zeros after them."""
        for buffer, tokens in (self.keys, keys), (self.values, values):
            buffer[slot : slot + 1, :, : keys.shape[2]] = tokens
            # A mask alone is not enough: the slot's last row may have left a NaN, and zero times NaN is NaN.
            buffer[slot : slot + 1, :, keys.shape[2] :] = 0

    def growth(self, tokens: int) -> int:
        """Return the bytes of the buffers that replace these when a row of `tokens` tokens joins; 0 if it fits."""
        return self._growth(self.rows + 1, max(self._columns(), tokens), UNLIMITED_TOKENS)

    def step_growth(self) -> int:
        """Return the bytes of the buffers that replace these when each row is fed a token; 0 if they fit."""
        return self._growth(self.rows, self._columns(1), self.slot_rows.last_end)

    def _growth(self, rows: int, columns: int, end: int) -> int:
        if self.keys is None or not self._too_small(rows, columns):
            return 0
        (padded, padded_columns), (held, held_columns) = self._padded_shape(rows, columns, end), self._capacity
        return self.nbytes * padded * padded_columns // (held * held_columns)

    def moved(self, order: Sequence[int]) -> list[mx.array]:
        """Return copies of the rows that `filter` will write into another slot. Lazy, so that one evaluation serves all
        layers."""
        sources = [index for i, index in enumerate(order) if index != i]
        return [buffer[mx.array(sources)] for buffer in self.state] if sources else []

    def filter(self, order: Sequence[int], moved: Sequence[mx.array] | None = None) -> None:
        """Keep row `order[i]` as row i, and drop the others. Only rows that change their slot are copied. Blocks.
        `moved`: the result of the method of that name for this order, if it is known already."""
        moved = self.moved(order) if moved is None else moved
        mx.eval(moved)  # a buffer with a pending reader would be copied, not written in place
        for buffer, rows in zip(self.state, moved, strict=False):
            for row, slot in enumerate(i for i, index in enumerate(order) if index != i):
                buffer[slot : slot + 1] = rows[row : row + 1]
        lengths, positions = self._current()
        self._set_rows(*([each[index] for index in order] for each in (lengths, positions, self.slot_rows.ends)))
        self._shrink()

    def extract(self, index: int) -> Any:
        """Return one row as an mlx-lm cache. Lazy: it references the whole batch until it is evaluated."""
        cache = KVCache()
        cache.offset = self.slot_rows.lengths[index] + self._steps
        cache.keys, cache.values = (mx.contiguous(b[index : index + 1, :, : cache.offset]) for b in self.state)
        return cache

    def position(self, index: int) -> int:
        """Return the position of the row's next token."""
        return self.slot_rows.positions[index] + self._steps

    def _current(self) -> tuple[list[int], list[int]]:
        rows, steps = self.slot_rows, self._steps
        return [n + steps for n in rows.lengths], [n + steps for n in rows.positions]

    def _in_order(self, row: Any) -> tuple[mx.array, mx.array, int]:
        """Return the row's keys and values, oldest token first, and the position of its next token."""
        return *row.keys_and_values(), row.offset

    def _write(self, keys: mx.array, values: mx.array) -> None:
        """Write tokens after each row's last."""
        rows, tokens = self.slot_rows, keys.shape[2]
        column = self._column(rows.longest + self._steps)
        # The same columns for all rows are several times cheaper on a CPU. A ring may wrap around.
        if rows.equal_lengths and column + tokens <= self._columns(tokens):
            target: Any = (slice(self.rows), slice(None), slice(column, column + tokens))
        elif tokens == 1:
            target = (rows.slots, slice(None), self._column(rows.next_indices(self._steps)))
            keys, values = keys.squeeze(2), values.squeeze(2)
        else:
            target = (rows.slots[:, None], slice(None), self._column(self._new_tokens(tokens)))
            keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        self.keys[target] = keys
        if values.size:  # scattering nothing divides by zero (MLX 0.32.4), and MiniMax-M3's values have a head_dim of 0
            self.values[target] = values

    # Slots and columns

    def _new_tokens(self, tokens: int) -> mx.array:
        """Return the indices of each row's next tokens, (rows, tokens)."""
        return self.slot_rows.next_indices(self._steps)[:, None] + mx.arange(tokens)

    def _columns(self, steps: int = 0) -> int:
        """Return the number of columns in use now, or after `steps` further steps."""
        return self.slot_rows.longest + self._steps + steps

    def _column(self, token: Any) -> Any:
        """Return the column of the token with this index, a number or an array."""
        return token

    def _padded_shape(self, rows: int, columns: int, end: int) -> tuple[int, int]:
        return padded_shape(rows, columns, end)

    def _ensure_capacity(self, rows: int, columns: int, end: int, keys: mx.array, values: mx.array) -> None:
        """Allocate padded buffers for `rows` rows and `columns` columns unless the present ones hold as many. `end`:
        the most tokens that a row will have."""
        if self.keys is None or self._too_small(rows, columns):
            self._rebuild(self._padded_shape(rows, columns, end), keys, values)

    def _too_small(self, rows: int, columns: int) -> bool:
        held_rows, held_columns = self._capacity
        return rows > held_rows or columns > held_columns

    def _rebuild(self, size: tuple[int, int], keys: mx.array, values: mx.array) -> None:
        """Reallocate the buffers at this size (rows, columns), and copy what is in use."""
        # The capacity comes last, because `_too_small` checks it: after a failure the next call starts over.
        self.values = self._rebuilt(self.values, size, values)
        self.keys = self._rebuilt(self.keys, size, keys)
        self._capacity = size
        self.nbytes = self.keys.nbytes + self.values.nbytes

    def _rebuilt(self, old: mx.array | None, size: tuple[int, int], template: mx.array) -> mx.array:
        new = mx.zeros((size[0], template.shape[1], size[1], template.shape[3]), dtype=template.dtype)
        if old is not None:
            columns = self._columns()
            new[: self.rows, :, :columns] = old[: self.rows, :, :columns]
        mx.eval(new)  # now, so that at most one buffer exists twice
        return new

    def _shrink(self) -> None:
        """Free memory if less than a quarter of it would do, spare room included: the next long row would need it
        again, and while other rows wait for memory, `tighten` is called."""
        if self.rows == 0:
            self.keys = self.values = None
            self.nbytes = 0
            self._capacity = 0, 0
        else:
            self._shrink_to(share=4)

    def tighten(self) -> None:
        """Free memory that the rows do not need. The usual padding stays. Blocks."""
        if self.rows:
            self._shrink_to(share=1)

    def _shrink_to(self, share: int) -> None:
        """Reallocate the buffers for the present rows if they have more than `share` times as many cells as needed."""
        rows, columns = self._padded_shape(self.rows, self._columns(), self.slot_rows.last_end)
        held_rows, held_columns = self._capacity
        if share * rows * columns < held_rows * held_columns:
            self._rebuild((rows, columns), self.keys, self.values)


class PackedKVCache:
    """Keys and values of several rows, with the interface that models use of mlx-lm's KVCache. Rows are aligned at
    their ends, as in mlx-lm's batches: the columns before a shorter row's first token are zeros, and masked."""

    def __init__(self, rows: Sequence[Any], tokens: Sequence[int], offset: int | mx.array) -> None:
        """`tokens`: number of tokens that each row computes. `offset`: position of the next token, as a number if it is
        the same for all rows."""
        self.offset = offset
        # Of the new tokens only, (rows, heads, tokens, head_dim). Some models replace them to order evaluations.
        self.keys: Any = None
        self.values: Any = None
        self._rows, self._tokens = rows, tokens
        self._held = [self._num_held(row) for row in rows]
        self._longest = max(self._held)

    def _num_held(self, row: Any) -> int:
        """Return the number of tokens of a row that its first new one attends to."""
        return int(row.offset)

    def _past(self, row: Any, buffer: mx.array) -> mx.array:
        """Return the part of a row's keys or values that its new tokens attend to, the oldest first."""
        return buffer[..., : row.offset, :]

    @property
    def computed(self) -> list[mx.array]:
        """The arrays that a forward has added; none if the model does not use this layer."""
        return [] if self.keys is None else [self.keys, self.values]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | Literal["causal"] | None:
        """Return the mask of `N` new tokens, as mlx-lm's KVCache does, for rows of different length a boolean one
        (rows, 1, N, columns)."""
        ragged = len(set(self._held)) > 1
        if not ragged and window_size is None and (N == 1 or not return_array):
            return "causal" if N > 1 else None
        columns, tokens = mx.arange(self._longest + N), mx.arange(self._longest, self._longest + N)[:, None]
        mask = columns <= tokens
        if window_size is not None:
            mask = mask & (columns > tokens - window_size)
        if ragged:
            first = mx.array([self._longest - held for held in self._held])
            mask = mask & (columns >= first[:, None, None, None])
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add the new tokens of all rows, (rows, heads, tokens, head_dim), and return those of `keys_and_values`."""
        self.keys, self.values = keys, values
        self.offset = self.offset + keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return copies (rows, heads, columns, head_dim) of what all rows hold and of the new tokens. Lazy."""
        return self._stacked("keys", self.keys), self._stacked("values", self.values)

    def _stacked(self, name: str, new: mx.array) -> mx.array:
        if not self._longest or not new.size:
            return new
        rows, heads, tokens, head_dim = new.shape
        stacked = mx.zeros((rows, heads, self._longest + tokens, head_dim), new.dtype)
        for index, (row, held) in enumerate(zip(self._rows, self._held, strict=True)):
            if held:
                stacked[index, :, self._longest - held : self._longest] = self._past(row, getattr(row, name))[0]
        stacked[:, :, self._longest :] = new
        return stacked

    def unpack(self, index: int) -> None:
        """Append the new tokens of one row to its own cache. Lazy."""
        if self.keys is not None:
            new = (mx.contiguous(each[index : index + 1, :, : self._tokens[index]]) for each in self.computed)
            self._rows[index].update_and_fetch(*new)


class KV(LayerKind):
    """Keys and values of every token."""

    classes = KVCache, SlotKVCache
    sliceable = True

    def slots(self, layer: Any, max_draft: int) -> SlotLayer:
        """Return an empty layer for many rows."""
        return SlotKVCache()

    def packed(self, rows: Sequence[Any], tokens: Sequence[int], offset: int | mx.array) -> PackedLayer:
        """Return a layer with which rows share a forward."""
        return PackedKVCache(rows, tokens, offset)

    def fill(self, layer: Any, arrays: Sequence[mx.array], length: int) -> None:
        """Let an empty layer hold these keys and values, unless the model never calls it."""
        keys, values = arrays
        if keys.size:
            layer.keys, layer.values = keys, values
            layer.offset = length

    def name(self, layer: Any) -> str:
        """Return "compressed" if it holds one latent vector for all heads, and positions separately (MLA)."""
        heads = 0 if layer.keys is None else layer.keys.shape[1]
        return "compressed" if heads == 1 and layer.keys.shape[-1] != layer.values.shape[-1] else "kv"
