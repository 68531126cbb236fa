"""Iterate over the layers of a cache, and list those that cannot share a batch."""

from collections.abc import Iterable, Iterator
from typing import Any

from worker.engine.upstream.mlx_lm import CacheList


def layers(cache: Iterable[Any]) -> Iterator[Any]:
    """Yield the layers of a cache in order; those inside nested lists (`CacheList`) take the place of the list."""
    for layer in cache:
        if isinstance(layer, CacheList):
            yield from layers(layer.caches)
        else:
            yield layer


def cannot_batch(cache: Iterable[Any]) -> list[str]:
    """Return the class names of the layers that cannot be merged into a shared batch, sorted. Decided by what a layer
    can do, not by its class."""
    return sorted({type(layer).__name__ for layer in layers(cache) if not hasattr(layer, "merge")})
