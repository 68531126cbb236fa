"""Several rows in one forward of a prompt chunk.

    pack = Pack([cache, other_cache], [5, 9], [16, 14])  # mlx-lm caches of one sequence, next positions, new tokens
    network(tokens, cache=pack.layers)                   # (rows, 16); the second row ends with two tokens of padding
    pack.compute()
    pack.unpack(0), pack.unpack(1)                       # now each cache holds what it would hold if computed alone

Until `unpack`, the rows' caches are only read, so a failed forward costs no row its cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.kinds import kind_of
from worker.engine.cache.layers import LayerKind, layers
from worker.engine.isolation import isolate
from worker.engine.upstream.mlx_lm import CacheList, make_prompt_cache

# Tokens of the trial row, and tokens with its padding: so many that every fast state decays.
_UNPADDED, _PADDED = 5, 24

_REFUSALS = ValueError, TypeError, NotImplementedError, AttributeError, IndexError  # of a model that cannot be packed


@dataclass(frozen=True, slots=True)
class _Packing:
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
        kinds = {type(row) for row in rows}
        if kinds == {CacheList}:
            return CacheList(*map(self._packed, zip(*(row.caches for row in rows), strict=True)))
        kind = kind_of(rows[0]) if len(kinds) == 1 else LayerKind()
        return kind.packed(rows, self._tokens, self._offset)

    def compute(self) -> None:
        """Compute the forward that was given these layers, as far as the caches depend on it. Blocks."""
        mx.eval([array for layer in layers(self.layers) for array in layer.computed])

    def unpack(self, index: int) -> None:
        """Append to the cache of one row what it has computed. Lazy."""
        for layer in layers(self.layers):
            layer.unpack(index)


def packing_of(network: nn.Module) -> _Packing:
    """Return which rows of this model can be packed: none if a trial fails. Blocks: a model with recurrent states
    computes a few tokens."""
    packing = _Packing(False)
    with isolate("a trial of forwards that several prompts share"):
        packing = _packing_of(network)
    return packing


def _packing_of(network: nn.Module) -> _Packing:
    recurrent = any(kind_of(layer).recurrent for layer in layers(make_prompt_cache(network)))
    ragged = _can_pack(network, 1, 2) and not _selects_columns(network)
    possible = ragged or _can_pack(network, 2, 2)
    return _Packing(possible, ragged, recurrent, possible and (not recurrent or _ignores_padding(network)))


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
    rounding = 0.02  # of the largest value; in bfloat16, forwards of different shapes differ by about half of it
    return all(
        state is not None and bool(mx.abs(state - expected).max() <= rounding * mx.abs(expected).max())
        for layer, reference in zip(layers(padded), layers(alone), strict=True)
        if (kind := kind_of(layer)).recurrent
        for state, expected in zip(kind.arrays(layer), kind.arrays(reference), strict=True)
        if expected is not None
    )
