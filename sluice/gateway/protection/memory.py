"""The bytes of bodies and stored answers that a gateway holds at once."""

from collections import Counter

from sluice.gateway.errors import ApiError
from sluice.http_errors import ErrorForm

_RETRY_S = 1.0  # until a body may have been queued, or an answer sent
_SHARE = 4  # a key may hold a quarter of all, so that one cannot fill the gateway


class Memory:
    """Counts the bytes that the requests of a gateway hold, in all and by key."""

    def __init__(self, limit: int, longest: int) -> None:
        """`limit`: of all requests. `longest`: the longest body, which every key may hold."""
        self._limit = limit
        self._key_limit = max(limit // _SHARE, longest)
        self._by_key = Counter[str | None]()

    def hold(self, key_id: str | None) -> "HeldBytes":
        """Return what a request holds: nothing yet."""
        return HeldBytes(self, key_id)

    @property
    def total(self) -> int:
        """Bytes that are held now."""
        return self._by_key.total()

    def check(self, key_id: str | None, length: int) -> None:
        """Check that `length` more bytes may be held. Raises `ApiError`: 429 for the key's limit, 503 for the
        gateway's."""
        if key_id is not None and self._by_key[key_id] + length > self._key_limit:
            message = f"This key's bodies and answers exceed {self._key_limit:,} bytes at once; send fewer of them."
            raise ApiError(ErrorForm.TOO_MANY_BYTES, message, retry_after_s=_RETRY_S)
        if self.total + length > self._limit:
            message = "The gateway holds as many bytes of bodies and answers as it may; try again later."
            raise ApiError(ErrorForm.OVERLOADED, message, retry_after_s=_RETRY_S)

    def add(self, key_id: str | None, length: int) -> None:
        """Count bytes; negative ones are no longer held."""
        self._by_key[key_id] += length
        if not self._by_key[key_id]:
            del self._by_key[key_id]


class HeldBytes:
    """The bytes that one request holds, until `release`."""

    def __init__(self, memory: Memory, key_id: str | None) -> None:
        self._memory, self._key_id = memory, key_id
        self._length = 0

    def check(self, length: int) -> None:
        """Check that `length` more bytes may be held. Raises `ApiError`, as `Memory.check`."""
        self._memory.check(self._key_id, length)

    def add(self, length: int) -> None:
        """Hold more bytes. Raises as `check`."""
        self.check(length)
        self._memory.add(self._key_id, length)
        self._length += length

    def release(self) -> None:
        """Hold nothing any more."""
        self._memory.add(self._key_id, -self._length)
        self._length = 0
