"""Several rows in one forward of a prompt chunk.

    pack = Pack([cache, other_cache], [5, 9], [16, 14])  # mlx-lm caches of one sequence, next positions, new tokens
    network(tokens, cache=pack.layers)                   # (rows, 16); the second row ends with two tokens of padding
    pack.compute()
    pack.unpack(0), pack.unpack(1)                       # now each cache holds what it would hold if computed alone

Until `unpack`, the rows' caches are only read, so a failed forward costs no row its cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.layers import layers
from worker.engine.isolation import isolate
from worker.engine.upstream.mlx_lm import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache

# Tokens of the trial row, and tokens with its padding: so many that every fast state decays.
_UNPADDED, _PADDED = 5, 24
_ROUNDING = 0.02  # of the largest value; in bfloat16, forwards of different shapes differ by about half of it

_REFUSALS = ValueError, TypeError, NotImplementedError, AttributeError, IndexError  # of a model that cannot be packed


@dataclass(frozen=True, slots=True)
class Packing:
    """Which rows of a model can share a forward."""

    possible: bool
    ragged: bool = False  # rows of different length
    recurrent: bool = False  # an absent state may differ from zeros, so rows with and without one are not packed
    padded: bool = False  # rows that compute different numbers of tokens

    def key(self, done: int) -> int | None:
        """Return a value that is equal for rows that can share a forward. `done`: tokens that the row holds. None if
        there are no such rows."""
        if not self.possible:
            return None
        if not self.ragged:
            return done
        return min(done, 1) if self.recurrent else 0


class Pack:
    """Rows of one model that share a forward. The rows' caches stay owned by the caller."""

    def __init__(self, rows: Sequence[Sequence[Any]], positions: Sequence[int], tokens: Sequence[int]) -> None:
        """`rows`: mlx-lm caches of one sequence each. `positions`: position of each row's next token, which differs
        from its length after images of some models. `tokens`: number of tokens that each row computes; in the forward,
        padding follows those of a row that computes fewer than another. Raises NotImplementedError for a layer that
        cannot be packed, and ValueError if only some of the rows have a recurrent state: an absent one may differ from
        zeros."""
        self._offset = positions[0] if len(set(positions)) == 1 else mx.array([*positions], dtype=mx.int32)
        self._tokens = tokens
        self.layers = [self._packed(layer) for layer in zip(*rows, strict=True)]

    def _packed(self, rows: Sequence[Any]) -> Any:
        """Return one layer of all rows. Compares exact classes, since a subclass may keep other state."""
        kinds = {type(row) for row in rows}
        if kinds == {CacheList}:
            return CacheList(*map(self._packed, zip(*(row.caches for row in rows), strict=True)))
        if kinds == {ArraysCache}:
            return PackedArraysCache(rows, self._tokens)
        if kinds == {KVCache}:
            return PackedKVCache(rows, self._tokens, self._offset)
        if kinds == {RotatingKVCache} and all(row.keep == 0 for row in rows):
            return PackedRotatingKVCache(rows, self._tokens, self._offset)
        raise NotImplementedError(f"{', '.join(sorted(kind.__name__ for kind in kinds))}: rows cannot be packed")

    def compute(self) -> None:
        """Compute the forward that was given these layers, as far as the caches depend on it. Blocks."""
        mx.eval([array for layer in layers(self.layers) for array in layer.computed])

    def unpack(self, index: int) -> None:
        """Append to the cache of one row what it has computed. Lazy."""
        for layer in layers(self.layers):
            layer.unpack(index)


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


class PackedRotatingKVCache(PackedKVCache):
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


class PackedArraysCache(ArraysCache):
    """Recurrent states of several rows."""

    def __init__(self, rows: Sequence[Any], tokens: Sequence[int]) -> None:
        """`tokens`: number of tokens that each row computes. Raises ValueError if only some of the rows have a
        state."""
        super().__init__(len(rows[0].cache))
        if len(set(tokens)) > 1:
            self.lengths = mx.array([*tokens])  # by which some models ignore the padding
        self._rows = rows
        states = zip(*(row.cache for row in rows), strict=True)
        self.cache: list[mx.array | None] = [_concatenated(each) for each in states]

    @property
    def computed(self) -> list[mx.array]:
        """The states."""
        return [state for state in self.cache if state is not None]

    def unpack(self, index: int) -> None:
        """Replace the states of one row by those computed. Lazy."""
        for number, state in enumerate(self.cache):
            self._rows[index][number] = None if state is None else mx.contiguous(state[index : index + 1])


def _concatenated(states: Sequence[mx.array | None]) -> mx.array | None:
    present = [state for state in states if state is not None]
    if present and len(present) < len(states):
        raise ValueError("Rows with and without a recurrent state cannot be packed.")
    return mx.concatenate(present) if present else None


def packing_of(network: nn.Module) -> Packing:
    """Return which rows of this model can be packed: none if a trial fails. Blocks: a model with recurrent states
    computes a few tokens."""
    packing = Packing(False)
    with isolate("a trial of forwards that several prompts share"):
        packing = _packing_of(network)
    return packing


def _packing_of(network: nn.Module) -> Packing:
    recurrent = any(isinstance(layer, ArraysCache) for layer in layers(make_prompt_cache(network)))
    ragged = _can_pack(network, 1, 2) and not _selects_columns(network)
    possible = ragged or _can_pack(network, 2, 2)
    return Packing(possible, ragged, recurrent, possible and (not recurrent or _ignores_padding(network)))


def _can_pack(network: nn.Module, *lengths: int) -> bool:
    """Return True if the model accepts a pack of rows of these lengths. Lazy: computes nothing."""
    # One token more than rows: a model that confuses the two fails.
    rows, tokens = len(lengths), len(lengths) + 1
    caches = [make_prompt_cache(network) for _ in lengths]
    try:
        for cache, length in zip(caches, lengths, strict=True):
            network(mx.zeros((1, length), mx.int32), cache=cache)
        network(mx.zeros((rows, tokens), mx.int32), cache=Pack(caches, lengths, [tokens] * rows).layers)
    except _REFUSALS:
        return False
    return True


def _selects_columns(network: nn.Module) -> bool:
    """Return True if a layer has a second cache of keys, by which it selects columns of the first. Some models
    (MiniMax-M3) select them in blocks, which differ with the columns before a row's first token."""
    nested = (layer for layer in make_prompt_cache(network) if isinstance(layer, CacheList))
    return any(sum(hasattr(each, "keys") for each in layer.caches) > 1 for layer in nested)


def _ignores_padding(network: nn.Module) -> bool:
    """Return True if the states of a row that was padded equal those of the row alone, up to rounding. Some models let
    the padding enter the state, others let the state decay meanwhile. Blocks."""
    alone, padded, filler = (make_prompt_cache(network) for _ in range(3))
    tokens = mx.arange(_PADDED)[None]
    try:
        network(tokens[:, :_UNPADDED], cache=alone)
        pack = Pack([padded, filler], [0, 0], [_UNPADDED, _PADDED])
        network(mx.concatenate([tokens, tokens]), cache=pack.layers)
    except _REFUSALS:
        return False
    pack.compute()
    pack.unpack(0)
    return all(
        (mx.abs(state - expected).max() <= _ROUNDING * mx.abs(expected).max()).item()
        for layer, reference in zip(layers(padded), layers(alone), strict=True)
        if isinstance(layer, ArraysCache)
        for state, expected in zip(layer.cache, reference.cache, strict=True)
        if expected is not None
    )
