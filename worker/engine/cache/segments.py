"""Copies of one row's cache that outlive the row: KV segments by token, and snapshots of all other layers.

segment = copy_segment(cache, 0, 0, 512)  # tokens 0 to 511 of row 0, alone or in a batch
state = snapshot_state(cache, 0)
cache = restore_cache(make_prompt_cache(network), [segment], iter(state.layers), 512, room=1024)
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.layers import layers
from worker.engine.cache.slot_kv import SlotKVCache
from worker.engine.cache.slots import SlotArraysCache
from worker.engine.upstream.mlx_lm import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache


@dataclass(frozen=True, slots=True)
class KVSegment:
    """Keys and values of consecutive tokens, layer by layer, each (1, heads, tokens, head_dim). Owns its memory."""

    buffers: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def split(self, at: int) -> "tuple[KVSegment, KVSegment]":
        """Return copies of the first `at` tokens and of the rest. Blocks until both are computed."""
        return _owned(buffer[:, :, :at] for buffer in self.buffers), _owned(b[:, :, at:] for b in self.buffers)


def _owned(buffers: Iterable[mx.array]) -> KVSegment:
    run = KVSegment(tuple(map(mx.contiguous, buffers)))
    mx.eval(run.buffers)
    return run


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The layers that cannot be sliced by token, as mlx-lm caches of one row. Owns its memory."""

    layers: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def trimmable(self) -> bool:
        """True if every layer can drop its last tokens (mlx-lm calls it trimmable)."""
        return all(layer.is_trimmable() for layer in self.layers)

    def before(self, tokens: int) -> Iterator[Any]:
        """Yield the layers as they were `tokens` tokens ago. They share memory with the snapshot until they are
        written. Requires `trimmable` unless `tokens` is 0."""
        for layer in copy.deepcopy(self.layers):
            if tokens:
                layer.trim(tokens)
            yield layer


def is_sliceable(layer: Any) -> bool:
    """Return True if the layer holds every token's keys and values, so that any range can be copied. Compares exact
    classes, since a subclass may keep fewer tokens."""
    return type(layer) in (KVCache, SlotKVCache)


def needs_states(network: nn.Module) -> bool:
    """Return True if some layers of this network cannot be sliced by token, so that a prefix also needs a state
    snapshot."""
    return not all(map(is_sliceable, layers(make_prompt_cache(network))))


def token_bytes(cache: Sequence[Any]) -> int:
    """Return the bytes that one token takes in a KV segment. The cache has at least one token."""
    buffers = [buffer for layer in layers(cache) if is_sliceable(layer) for buffer in layer.state[:2]]
    return sum(b.shape[1] * b.shape[3] * b.dtype.size for b in buffers if b is not None)


def copy_segment(cache: Sequence[Any], place: int, start: int, end: int) -> KVSegment:
    """Copy tokens `start` to `end` (exclusive) of row `place`. Blocks until the copy is computed."""
    leaves = [layer for layer in layers(cache) if is_sliceable(layer)]
    return _owned(_part(buffer, place, start, end) for leaf in leaves for buffer in (leaf.keys, leaf.values))


def _part(buffer: mx.array | None, place: int, start: int, end: int) -> mx.array:
    if buffer is None:  # a layer that the model never calls has no buffers
        return mx.zeros((1, 1, end - start, 0))
    return buffer[place : place + 1, :, start:end]


def snapshot_state(cache: Sequence[Any], place: int) -> StateSnapshot:
    """Return a snapshot of the layers of row `place` that cannot be sliced by token. Lazy: `nbytes` is known before
    anything is computed, so it can be dropped at no cost."""
    return StateSnapshot(tuple(_alone(layer, place) for layer in layers(cache) if not is_sliceable(layer)))


def _alone(layer: Any, place: int) -> Any:
    if isinstance(layer, SlotKVCache | SlotArraysCache):
        return layer.extract(place)
    kept = copy.deepcopy(layer)
    if isinstance(kept, RotatingKVCache) and kept.keys is not None:
        # A prompt chunk stretches the buffers beyond the window; only the window is needed.
        ordered = [kept._temporal_order(buffer)[..., -kept.max_size :, :] for buffer in (kept.keys, kept.values)]
        kept.keys, kept.values = map(mx.contiguous, ordered)
        kept._idx = kept.keys.shape[2]
    elif isinstance(kept, ArraysCache):
        kept.cache = [None if state is None else mx.contiguous(state) for state in kept.cache]
    return kept


def restore_cache(
    cache: Sequence[Any], runs: Sequence[KVSegment], wholes: Iterator[Any], length: int, *, room: int
) -> list[Any]:
    """Fill the empty `cache` with the first `length` tokens of the segments, in buffers for `room` tokens, and with the
    layers of a snapshot (`wholes`). Lazy. The snapshot layers themselves become part of the result."""
    buffers = zip(*(run.buffers for run in runs), strict=True)
    joined = (_joined(parts, length, room) for parts in buffers)
    return [_filled(layer, joined, wholes, length) for layer in cache]


def _filled(layer: Any, joined: Iterator[mx.array], wholes: Iterator[Any], length: int) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*(_filled(each, joined, wholes, length) for each in layer.caches))
    if not is_sliceable(layer):
        return next(wholes)
    keys, values = next(joined), next(joined)
    if keys.size:
        layer.keys, layer.values, layer.offset = keys, values, length
    return layer


def _joined(parts: Sequence[mx.array], length: int, room: int) -> mx.array:
    *first, last = parts
    rest = length - sum(part.shape[2] for part in first)
    spare = mx.zeros((1, last.shape[1], room - length, last.shape[3]), last.dtype)
    return mx.concatenate([*first, last[:, :, :rest], spare], axis=2)


def is_finite(kept: KVSegment | StateSnapshot | None) -> bool:
    """Return True if all values are finite, and for None. Blocks."""
    arrays = kept.buffers if isinstance(kept, KVSegment) else _arrays(kept.layers) if kept else ()
    return all(bool(mx.isfinite(array).all()) for array in arrays)


def _arrays(whole: Iterable[Any]) -> Iterator[mx.array]:
    for layer in whole:
        states = layer.cache if isinstance(layer, ArraysCache) else (layer.keys, layer.values)
        yield from (state for state in states if state is not None)
