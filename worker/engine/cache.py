"""Cache layers, and which of them can share a batch."""

from collections.abc import Iterable, Iterator
from typing import Any

from worker.engine.upstream import CacheList


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
