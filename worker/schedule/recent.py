"""What was used last, within so many bytes."""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=HasBytes)


class ByteLRU(Generic[T]):
    """By space and digest: what is kept in one space is found in no other. For one thread."""

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self._max_bytes, self._limit = most, most
        self.nbytes = self.evicted = 0
        self._entries = OrderedDict[tuple[str, bytes], T]()

    def get(self, space: str, digest: bytes) -> T | None:
        if (key := (space, digest)) in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, space: str, digest: bytes, value: T) -> None:
        if (key := (space, digest)) not in self._entries and value.nbytes <= self._limit:
            self._entries[key] = value
            self.nbytes += value.nbytes
            self._shrink()

    def set_limit(self, most: int) -> None:
        """It takes no more than so many bytes, until told otherwise."""
        self._limit = max(0, min(self._max_bytes, most))
        self._shrink()

    def _shrink(self) -> None:
        while self.nbytes > self._limit:
            _, value = self._entries.popitem(last=False)
            self.nbytes -= value.nbytes
            self.evicted += 1
