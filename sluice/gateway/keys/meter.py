"""The use that one request makes of its key: a connection, a request, tokens."""

from collections import Counter

from sluice.gateway.errors import ApiError
from sluice.gateway.keys.file import Key
from sluice.gateway.keys.limits import Balance, Exceeded, Limits, refusal

_RETRY_S = 1.0  # until one of the key's connections may have ended


class Connections:
    """Counts the requests of each key that this front is answering."""

    def __init__(self, limit: int) -> None:
        self._limit, self._open = limit, Counter[str]()

    def enter(self, key_id: str) -> None:
        """Count a request. Raises `ApiError` 429 beyond the limit."""
        if self._open[key_id] >= self._limit:
            message = f"This key has {self._limit:,} requests open here, which is the limit; end one first."
            raise ApiError(429, message, "requests", code="too_many_connections", retry_after_s=_RETRY_S)
        self._open[key_id] += 1

    def leave(self, key_id: str) -> None:
        """Count a request as ended."""
        self._open[key_id] -= 1
        if not self._open[key_id]:
            del self._open[key_id]

    @property
    def total(self) -> int:
        """Requests of all keys that are open."""
        return self._open.total()


class Meter:
    """Counts one HTTP request. It counts as a connection from its creation until `leave`."""

    def __init__(self, key: Key, limits: Limits, connections: Connections) -> None:
        """Raises `ApiError` 429 if the key has too many connections."""
        connections.enter(key.id)
        self._key = key
        self._limits, self._connections = limits, connections
        self._balance: Balance | None = None

    async def take(self, job_id: str, tokens: int) -> None:
        """Count one request and reserve tokens for a job. Raises `ApiError` 429, and `SluiceError`."""
        if not self._key.is_limited:
            return
        taken = await self._limits.take(self._key, job_id, tokens)
        if isinstance(taken, Exceeded):
            self._balance = taken.balance
            raise refusal(taken)
        self._balance = taken

    async def balance(self) -> Balance:
        """Return what the key has left. Raises `SluiceError`."""
        if not self._key.is_limited:
            return Balance(None, None, 0, 0)
        return self._balance or await self._limits.read(self._key)

    def leave(self) -> None:
        """Count the connection as ended."""
        self._connections.leave(self._key.id)
