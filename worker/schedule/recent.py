"""What was used last, within so many bytes."""

from collections import OrderedDict
from typing import Generic, Protocol, TypeVar


class HasBytes(Protocol):
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=HasBytes)


class Recent(Generic[T]):
    """By space and digest: what is kept in one space is found in no other. For one thread."""

    def __init__(self, most: int) -> None:
        """`most`: bytes."""
        self._most, self._room = most, most
        self.nbytes = self.evicted = 0
        self._kept = OrderedDict[tuple[str, bytes], T]()

    def find(self, space: str, digest: bytes) -> T | None:
        if (key := (space, digest)) in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, space: str, digest: bytes, value: T) -> None:
        if (key := (space, digest)) not in self._kept and value.nbytes <= self._room:
            self._kept[key] = value
            self.nbytes += value.nbytes
            self._shrink()

    def make_room(self, most: int) -> None:
        """It takes no more than so many bytes, until told otherwise."""
        self._room = max(0, min(self._most, most))
        self._shrink()

    def _shrink(self) -> None:
        while self.nbytes > self._room:
            _, value = self._kept.popitem(last=False)
            self.nbytes -= value.nbytes
            self.evicted += 1
