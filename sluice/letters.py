"""The dead letters: jobs that took workers down with them, kept until somebody looks."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from redis.asyncio import Redis

from sluice import wire
from sluice.errors import UnknownJob


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


async def read_all(redis: Redis) -> list[DeadLetter]:
    """Oldest first."""
    stored: list[bytes] = await redis.hvals(wire.DEAD)  # type: ignore[misc]
    return sorted(map(_letter, stored), key=lambda letter: letter.parked_at)


async def read(redis: Redis, job_id: str) -> DeadLetter:
    """Raises `UnknownJob`."""
    stored: bytes | None = await redis.hget(wire.DEAD, job_id)  # type: ignore[misc]
    if stored is None:
        raise UnknownJob(f"there is no dead letter {job_id!r}")
    return _letter(stored)


async def take(redis: Redis, letter: DeadLetter) -> None:
    """Drop it, and be the one who did. Raises `UnknownJob` when somebody else was."""
    if not await redis.hdel(wire.DEAD, letter.id):  # type: ignore[misc]
        raise UnknownJob(f"somebody else has just taken the dead letter {letter.id!r}")


async def put_back(redis: Redis, letter: DeadLetter) -> None:
    await redis.hset(wire.DEAD, letter.id, json.dumps(asdict(letter)))  # type: ignore[misc]


def _letter(stored: bytes) -> DeadLetter:
    return wire.parse_as(DeadLetter, json.loads(stored))
