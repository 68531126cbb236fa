"""The use that one request makes of its key: connections, requests, tokens."""

import uuid
from collections import Counter
from collections.abc import Sequence

from sluice.gateway.errors import ApiError
from sluice.gateway.keys.file import Key
from sluice.gateway.keys.limits import Balance, Exceeded, Limits, refusal
from sluice.http_errors import ErrorForm

_RETRY_S = 1.0  # until one of the key's connections may have ended


class Connections:
    """Counts the answers that this gateway gives to each key: one for a request, and one for each further choice."""

    def __init__(self, limit: int) -> None:
        self._limit, self._open = limit, Counter[str]()

    def enter(self, key_id: str, count: int = 1) -> None:
        """Count answers. Raises `ApiError` 429 beyond the limit."""
        if self._open[key_id] + count > self._limit:
            message = f"This key may have {self._limit:,} requests and choices open here; end some first."
            raise ApiError(ErrorForm.TOO_MANY_CONNECTIONS, message, retry_after_s=_RETRY_S)
        self._open[key_id] += count

    def leave(self, key_id: str, count: int = 1) -> None:
        """Count answers as ended."""
        self._open[key_id] -= count
        if not self._open[key_id]:
            del self._open[key_id]

    @property
    def total(self) -> int:
        """Answers of all keys that are open."""
        return self._open.total()


class Meter:
    """Counts one HTTP request. It counts as a connection from its creation until `leave`."""

    def __init__(self, key: Key, limits: Limits, connections: Connections) -> None:
        """Raises `ApiError` 429 if the key has too many connections."""
        connections.enter(key.id)
        self._key = key
        self._limits, self._connections = limits, connections
        self._answers = 1
        self._mark = uuid.uuid4().hex  # of this request's reservations
        self._balance: Balance | None = None

    def count_choices(self, choices: int) -> None:
        """Count each choice of the answer as a connection. Raises `ApiError` 429."""
        self._connections.enter(self._key.id, choices - self._answers)
        self._answers = choices

    async def reserve(self, job_ids: Sequence[str], tokens: int) -> None:
        """Count a request and reserve tokens for each job. Raises `ApiError`: 429, or 400 for more jobs than the limit
        can ever hold; and `SluiceError`."""
        limit = self._key.requests_per_minute
        if limit is not None and len(job_ids) > limit:
            message = f"n: this key may make {limit:,} requests per minute, and each choice is one; ask for fewer."
            raise ApiError(ErrorForm.INVALID_VALUE, message, param="n")
        if self._key.is_limited:
            self._grant(await self._limits.reserve(self._key, job_ids, tokens, self._mark))

    async def count(self) -> None:
        """Count a request that queues no job. Raises `ApiError` 429, and `SluiceError`."""
        if self._key.requests_per_minute is not None:
            self._grant(await self._limits.count(self._key))

    async def release(self, job_ids: Sequence[str]) -> None:
        """Return the tokens that this request has reserved for jobs that were not queued."""
        if self._key.is_limited:
            await self._limits.release(job_ids, self._mark)

    def _grant(self, taken: Balance | Exceeded) -> None:
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
        """Count the connections as ended."""
        self._connections.leave(self._key.id, self._answers)
