"""Dead letters: jobs that crashed workers, kept until they are retried or dropped."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.events import parse_as
from sluice.errors import UnknownJob
from sluice.transport.retries import Retries

_YEAR_9999_S = 253_000_000_000  # the last year of `datetime`


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A job that crashed workers `crashes` times, and the request that it held."""

    id: str
    model: str
    lane: keys.Lane
    crashes: int
    parked_at: float  # Unix seconds
    error: dict[str, Any]
    body: str  # arq's serialized job, as it was queued

    @property
    def function(self) -> keys.JobFunction:
        """The kind of the job: `count` for a token count, `chat` for all others."""
        match json.loads(self.body):
            case {"f": "count"}:
                return "count"
        return "chat"

    @property
    def retry_id(self) -> str:
        """The id of the job that retries it: always the same one, and another for each letter of a job."""
        return hashlib.sha256(repr((self.id, self.parked_at)).encode()).hexdigest()[:32]

    @property
    def request(self) -> dict[str, Any]:
        """The request of the job. Raises ValueError if the body is missing or broken."""
        match json.loads(self.body):
            case {"a": [{**request}]}:
                return {str(name): value for name, value in request.items()}
        raise ValueError("the body holds no request")


class DeadLetters:
    """Reads and removes dead letters."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries

    async def read_all(self) -> list[DeadLetter]:
        """Return all dead letters, oldest first."""
        stored: dict[bytes, bytes] = await self._retries.run(lambda: self._redis.hgetall(keys.DEAD))
        return sorted((_letter(id, text) for id, text in stored.items()), key=lambda letter: letter.parked_at)

    async def read(self, job_id: str) -> DeadLetter:
        """Return one dead letter. Raises `UnknownJob`."""
        stored: bytes | None = await self._retries.run(lambda: self._redis.hget(keys.DEAD, job_id))
        if stored is None:
            raise UnknownJob(f"there is no dead letter {job_id!r}")
        return _letter(job_id.encode(), stored)

    async def delete(self, letter: DeadLetter) -> None:
        """Delete a letter. Raises `UnknownJob` if another client has deleted it first."""
        num_tries = 0

        async def drop() -> int:
            nonlocal num_tries
            num_tries += 1
            dropped: int = await self._redis.hdel(keys.DEAD, letter.id)  # type: ignore[misc]
            return dropped

        # If the letter is absent at a later try, an earlier one deleted it and the reply was lost.
        if not await self._retries.run(drop) and num_tries == 1:
            raise UnknownJob(f"another client has just removed the dead letter {letter.id!r}")


_UNREADABLE = {"type": "internal", "message": "This entry cannot be read: it was not written by a worker."}


def _letter(id: bytes, stored: bytes) -> DeadLetter:
    """Parse a letter. An unreadable one becomes a letter without a body, so that it can be listed and dropped."""
    readable_id = id.decode("utf-8", "backslashreplace")
    match _parse_json(stored):
        case {
            "id": str(), "model": str(), "lane": "interactive" | "batch", "crashes": int(), "body": str(),
            "parked_at": int() | float() as parked_at, "error": {},
        } as entry if 0 <= parked_at < _YEAR_9999_S:  # fmt: skip
            return parse_as(DeadLetter, {**entry, "id": readable_id})
    return DeadLetter(readable_id, "?", "interactive", 0, 0.0, _UNREADABLE, "")


def _parse_json(stored: bytes) -> Any:
    try:
        return json.loads(stored)
    except (ValueError, RecursionError):
        return None
