"""Least-recently-used cache with a limit in bytes."""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=HasBytes)


class ByteLRU(Generic[T]):
    """LRU cache by namespace (`space`) and digest. Not thread-safe."""

    def __init__(self, most: int) -> None:
        """`most`: most bytes that it ever holds."""
        self._max_bytes, self._limit = most, most
        self.nbytes = self.evicted = 0
        self._entries = OrderedDict[tuple[str, bytes], T]()

    def get(self, space: str, digest: bytes) -> T | None:
        """Return the value and mark it as the most recently used; None if it is not cached."""
        if (key := (space, digest)) in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, space: str, digest: bytes, value: T) -> None:
        """Insert a value, unless its key is cached or it is larger than the limit. May evict others."""
        if (key := (space, digest)) not in self._entries and value.nbytes <= self._limit:
            self._entries[key] = value
            self.nbytes += value.nbytes
            self._shrink()

    def set_limit(self, most: int) -> None:
        """Set the current limit in bytes, at most the one at construction, and evict down to it."""
        self._limit = max(0, min(self._max_bytes, most))
        self._shrink()

    def _shrink(self) -> None:
        while self.nbytes > self._limit:
            _, value = self._entries.popitem(last=False)
            self.nbytes -= value.nbytes
            self.evicted += 1
