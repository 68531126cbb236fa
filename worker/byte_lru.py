"""Least-recently-used cache with a limit in bytes."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class _HasBytes(Protocol):
    """A value of known size."""

    @property
    def nbytes(self) -> int:
        """Bytes that the value occupies."""


T = TypeVar("T", bound=_HasBytes)


EvictedValue = tuple[str, bytes, T]  # namespace, digest, value


class ByteLRU(Generic[T]):
    """LRU cache by namespace and digest. Not thread-safe."""

    def __init__(
        self, max_bytes: int, on_evict: Callable[[Sequence[EvictedValue[T]]], object] = lambda evicted: None
    ) -> None:
        """`max_bytes`: the upper limit of `set_limit`, and the limit at first. `on_evict`: receives what is evicted at
        once, the least recently used first."""
        self._max_bytes, self._limit = max_bytes, max_bytes
        self._on_evict = on_evict
        self.nbytes = self.evicted = 0
        self._entries = OrderedDict[tuple[str, bytes], T]()

    def get(self, namespace: str, digest: bytes) -> T | None:
        """Return the value and mark it as the most recently used; None if it is not cached."""
        if (key := (namespace, digest)) in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def has(self, namespace: str, digest: bytes) -> bool:
        """Return True if a value is cached."""
        return (namespace, digest) in self._entries

    def put(self, namespace: str, digest: bytes, value: T) -> None:
        """Insert a value, unless its key is cached or it is larger than the limit. May evict others."""
        if (key := (namespace, digest)) not in self._entries and value.nbytes <= self._limit:
            self._entries[key] = value
            self.nbytes += value.nbytes
            self._shrink()

    def set_limit(self, max_bytes: int) -> None:
        """Limit the size to `max_bytes`, but at most to the size given at construction, and evict what exceeds it."""
        self._limit = max(0, min(self._max_bytes, max_bytes))
        self._shrink()

    def _shrink(self) -> None:
        evicted = list[EvictedValue[T]]()
        while self.nbytes > self._limit:
            (namespace, digest), value = self._entries.popitem(last=False)
            self.nbytes -= value.nbytes
            evicted.append((namespace, digest, value))
        if evicted:
            self.evicted += len(evicted)
            self._on_evict(evicted)
