"""What is kept of a row's cache: its keys and values by token, and all other layers whole.

run, state = taken(cache, 0, 0, 512), whole(cache, 0)  # of the row at place 0, alone or among others
cache = restored(make_prompt_cache(network), [run], iter(state.layers), 512, room=1024)
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import layers
from worker.engine.slots import SlotArraysCache
from worker.engine.slots_kv import SlotKVCache
from worker.engine.upstream import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache


@dataclass(frozen=True, slots=True)
class Run:
    """Keys and values of some tokens, layer by layer, each (1, heads, tokens, width). It owns its memory."""

    buffers: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def split(self, at: int) -> "tuple[Run, Run]":
        return _owned(buffer[:, :, :at] for buffer in self.buffers), _owned(b[:, :, at:] for b in self.buffers)


def _owned(buffers: Iterable[mx.array]) -> Run:
    run = Run(tuple(map(mx.contiguous, buffers)))
    mx.eval(run.buffers)
    return run


@dataclass(frozen=True, slots=True)
class State:
    """The layers that are kept whole, as upstream's caches of one row. It owns its memory."""

    layers: tuple[Any, ...]

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def shortens(self) -> bool:
        return all(layer.is_trimmable() for layer in self.layers)

    def before(self, tokens: int) -> Iterator[Any]:
        """The layers as they were so many tokens ago. They share memory with the state until they are written."""
        for layer in copy.deepcopy(self.layers):
            if tokens:
                layer.trim(tokens)
            yield layer


def by_token(layer: Any) -> bool:
    """Whether any part of its tokens can be had. A subclass may keep less than all of them."""
    return type(layer) in (KVCache, SlotKVCache)


def needs_states(network: nn.Module) -> bool:
    """Whether there are layers of which no part can be had."""
    return not all(map(by_token, layers(make_prompt_cache(network))))


def token_bytes(cache: Sequence[Any]) -> int:
    """Of a run, for each token."""
    buffers = [buffer for layer in layers(cache) if by_token(layer) for buffer in layer.state[:2]]
    return sum(b.shape[1] * b.shape[3] * b.dtype.size for b in buffers if b is not None)


def taken(cache: Sequence[Any], place: int, start: int, end: int) -> Run:
    leaves = [layer for layer in layers(cache) if by_token(layer)]
    return _owned(_part(buffer, place, start, end) for leaf in leaves for buffer in (leaf.keys, leaf.values))


def _part(buffer: mx.array | None, place: int, start: int, end: int) -> mx.array:
    if buffer is None:  # a layer that the model never calls
        return mx.zeros((1, 1, end - start, 0))
    return buffer[place : place + 1, :, start:end]


def whole(cache: Sequence[Any], place: int) -> State:
    """Lazy: `nbytes` is known before it is computed, and it may be thrown away."""
    return State(tuple(_alone(layer, place) for layer in layers(cache) if not by_token(layer)))


def _alone(layer: Any, place: int) -> Any:
    if isinstance(layer, SlotKVCache | SlotArraysCache):
        return layer.extract(place)
    kept = copy.deepcopy(layer)
    if isinstance(kept, RotatingKVCache) and kept.keys is not None:
        # A chunk stretches the buffers, and what has left the window is not needed.
        ordered = [kept._temporal_order(buffer)[..., -kept.max_size :, :] for buffer in (kept.keys, kept.values)]
        kept.keys, kept.values = map(mx.contiguous, ordered)
        kept._idx = kept.keys.shape[2]
    elif isinstance(kept, ArraysCache):
        kept.cache = [None if state is None else mx.contiguous(state) for state in kept.cache]
    return kept


def restored(cache: Sequence[Any], runs: Sequence[Run], wholes: Iterator[Any], length: int, *, room: int) -> list[Any]:
    """`cache`, empty, with the first `length` tokens of the runs in it, and buffers for `room` tokens."""
    buffers = zip(*(run.buffers for run in runs), strict=True)
    joined = (_joined(parts, length, room) for parts in buffers)
    return [_filled(layer, joined, wholes, length) for layer in cache]


def _filled(layer: Any, joined: Iterator[mx.array], wholes: Iterator[Any], length: int) -> Any:
    if isinstance(layer, CacheList):
        return CacheList(*(_filled(each, joined, wholes, length) for each in layer.caches))
    if not by_token(layer):
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


def sound(kept: Run | State | None) -> bool:
    """Whether there are numbers in it all over."""
    arrays = kept.buffers if isinstance(kept, Run) else _arrays(kept.layers) if kept else ()
    return all(bool(mx.isfinite(array).all()) for array in arrays)


def _arrays(whole: Iterable[Any]) -> Iterator[mx.array]:
    for layer in whole:
        states = layer.cache if isinstance(layer, ArraysCache) else (layer.keys, layer.values)
        yield from (state for state in states if state is not None)
