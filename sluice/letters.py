"""The dead letters: jobs that took workers down with them, kept until somebody looks."""

import json
from dataclasses import dataclass
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
    return sorted((DeadLetter(**json.loads(letter)) for letter in stored), key=lambda letter: letter.parked_at)


async def read(redis: Redis, job_id: str) -> DeadLetter:
    """Raises `UnknownJob`."""
    stored: bytes | None = await redis.hget(wire.DEAD, job_id)  # type: ignore[misc]
    if stored is None:
        raise UnknownJob(f"there is no dead letter {job_id!r}")
    return DeadLetter(**json.loads(stored))


async def drop(redis: Redis, job_id: str) -> None:
    await redis.hdel(wire.DEAD, job_id)  # type: ignore[misc]
