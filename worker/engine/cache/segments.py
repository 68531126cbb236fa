"""Copies of one row's cache that outlive the row: KV segments by token, and snapshots of all other layers.

segment = copy_segment(cache, 0, 0, 512)  # tokens 0 to 511 of row 0, alone or in a batch
state = snapshot_state(cache, 0)
cache = restore_cache(make_prompt_cache(network), [segment], iter(state.layers), 512, capacity=1024)
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache.kinds import kind_of
from worker.engine.cache.layers import layers, mapped
from worker.engine.upstream.mlx_lm import make_prompt_cache


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
        first = _materialized(buffer[:, :, :at] for buffer in self.buffers)
        return first, _materialized(buffer[:, :, at:] for buffer in self.buffers)


def _materialized(buffers: Iterable[mx.array]) -> KVSegment:
    segment = KVSegment(tuple(map(mx.contiguous, buffers)))
    mx.eval(segment.buffers)
    return segment


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
    """Return True if the layer holds every token's keys and values, so that any range can be copied."""
    return kind_of(layer).sliceable


def needs_states(network: nn.Module) -> bool:
    """Return True if some layers of this network cannot be sliced by token, so that a prefix also needs a state
    snapshot."""
    return not all(map(is_sliceable, layers(make_prompt_cache(network))))


def token_bytes(cache: Sequence[Any]) -> int:
    """Return the bytes that one token takes in a KV segment. The cache has at least one token."""
    return sum(b.shape[1] * b.shape[3] * b.dtype.size for b in kv_buffers(cache))


def kv_buffers(cache: Sequence[Any]) -> list[mx.array]:
    """Return the keys and values of the layers that can be sliced by token, as far as they hold any."""
    return [buffer for buffer in _buffers(cache) if buffer is not None]


def _buffers(cache: Sequence[Any]) -> Iterator[mx.array | None]:
    for layer in layers(cache):
        if (kind := kind_of(layer)).sliceable:
            yield from kind.arrays(layer)


def copy_segment(cache: Sequence[Any], index: int, start: int, end: int) -> KVSegment:
    """Copy tokens `start` to `end` (exclusive) of row `index`. Blocks until the copy is computed."""
    return _materialized(_sliced(buffer, index, start, end) for buffer in _buffers(cache))


def _sliced(buffer: mx.array | None, index: int, start: int, end: int) -> mx.array:
    if buffer is None:  # a layer that the model never calls has no buffers
        return mx.zeros((1, 1, end - start, 0))
    return buffer[index : index + 1, :, start:end]


def snapshot_state(cache: Sequence[Any], index: int) -> StateSnapshot:
    """Return a snapshot of the layers of row `index` that cannot be sliced by token. Lazy: `nbytes` is known before
    anything is computed, so it can be dropped at no cost."""
    unsliced = ((kind, layer) for layer in layers(cache) if not (kind := kind_of(layer)).sliceable)
    return StateSnapshot(tuple(kind.snapshot(layer, index) for kind, layer in unsliced))


def restore_cache(
    cache: Sequence[Any], segments: Sequence[KVSegment], states: Iterator[Any], length: int, *, capacity: int
) -> list[Any]:
    """Fill the empty `cache` with the first `length` tokens of the segments, in buffers for `capacity` tokens, and with
    the layers of a snapshot (`states`). Lazy. The snapshot layers themselves become part of the result."""
    buffers = zip(*(segment.buffers for segment in segments), strict=True)
    joined = (_joined(parts, length, capacity) for parts in buffers)

    def filled(layer: Any) -> Any:
        kind = kind_of(layer)
        if not kind.sliceable:
            return next(states)
        kind.fill(layer, [next(joined) for _ in kind.arrays(layer)], length)
        return layer

    return mapped(filled, cache)


def _joined(parts: Sequence[mx.array], length: int, capacity: int) -> mx.array:
    *first, last = parts
    rest = length - sum(part.shape[2] for part in first)
    spare = mx.zeros((1, last.shape[1], capacity - length, last.shape[3]), last.dtype)
    return mx.concatenate([*first, last[:, :, :rest], spare], axis=2)


def is_finite(cached: KVSegment | StateSnapshot | None) -> bool:
    """Return True if all values are finite, and for None. Blocks."""
    if cached is None:
        return True
    arrays = cached.buffers if isinstance(cached, KVSegment) else _arrays(cached.layers)
    return all(bool(mx.isfinite(array).all()) for array in arrays)


def _arrays(state_layers: Iterable[Any]) -> Iterator[mx.array]:
    for layer in state_layers:
        yield from (array for array in kind_of(layer).arrays(layer) if array is not None)
