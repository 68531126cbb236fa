"""The dead letters: jobs that took workers down with them, kept until somebody looks."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from redis.asyncio import Redis

from sluice import wire
from sluice.errors import UnknownJob
from sluice.retries import Retries


@dataclass(frozen=True, slots=True)
class DeadLetter:
    id: str
    model: str
    lane: wire.Lane
    crashes: int
    parked_at: float  # Unix seconds
    error: dict[str, Any]
    body: str  # arq's, as it was queued

    @property
    def request(self) -> dict[str, Any]:
        request: dict[str, Any] = json.loads(self.body)["a"][0]
        return request


class Letters:
    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries

    async def read_all(self) -> list[DeadLetter]:
        """Oldest first."""
        stored: list[bytes] = await self._retries.run(lambda: self._redis.hvals(wire.DEAD))
        return sorted(map(_letter, stored), key=lambda letter: letter.parked_at)

    async def read(self, job_id: str) -> DeadLetter:
        """Raises `UnknownJob`."""
        stored: bytes | None = await self._retries.run(lambda: self._redis.hget(wire.DEAD, job_id))
        if stored is None:
            raise UnknownJob(f"there is no dead letter {job_id!r}")
        return _letter(stored)

    async def take(self, letter: DeadLetter) -> None:
        """Drop it, and be the one who did. Raises `UnknownJob` when somebody else was."""
        tries = 0

        async def drop() -> int:
            nonlocal tries
            tries += 1
            dropped: int = await self._redis.hdel(wire.DEAD, letter.id)  # type: ignore[misc]
            return dropped

        # A letter that is gone at a second try was taken by the first, whose answer was lost.
        if not await self._retries.run(drop) and tries == 1:
            raise UnknownJob(f"somebody else has just taken the dead letter {letter.id!r}")

    async def put_back(self, letter: DeadLetter) -> None:
        stored = json.dumps(asdict(letter))
        await self._retries.run(lambda: self._redis.hset(wire.DEAD, letter.id, stored))


def _letter(stored: bytes) -> DeadLetter:
    return wire.parse_as(DeadLetter, json.loads(stored))
