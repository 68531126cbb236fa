"""Cache layers: which can share a batch, and the two habits of upstream's that a daemon cannot live with."""

from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx

from worker.engine.upstream import ArraysCache, CacheList


def layers(cache: Iterable[Any]) -> Iterator[Any]:
    """The layers, those inside of nested lists too."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from layers(layer.caches)
        else:
            yield layer


def cannot_batch(cache: Iterable[Any]) -> list[str]:
    """The kinds of layer that cannot be merged into a shared batch. What a layer can do decides, not its class."""
    return sorted({type(layer).__name__ for layer in layers(cache) if not hasattr(layer, "merge")})


def end_prefill(cache: Iterable[Any]) -> None:
    """Drop the padding that `merge` sets to zero: it would be updated lazily at every step and never read,
    a graph without end in a batch that never empties (mlx-lm 0.32.2)."""
    for layer in layers(cache):
        if isinstance(layer, ArraysCache):
            layer.finalize()


def settle_metadata(cache: Iterable[Any]) -> None:
    """Evaluate the counters that models without rope never read, for the same reason."""
    named = ("offset", "left_padding")
    pending = [vars(layer).get(name) for layer in layers(cache) for name in named]
    mx.async_eval([array for array in pending if isinstance(array, mx.array)])
