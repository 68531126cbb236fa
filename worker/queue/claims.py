"""Who owns a job: claimed under a lease, kept, handed back."""

from collections.abc import Sequence
from dataclasses import dataclass

from arq.constants import in_progress_key_prefix
from redis.asyncio import Redis

from schemas import keys
from schemas.keys import Lane
from worker.queue.scripts import JOB_LIFE_MS, script


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that is ours until its lease runs out. `attempt` fences every write."""

    job_id: str
    lane: Lane
    attempt: int
    crashes: int
    cancelled: bool
    queued_at: float  # Unix seconds, by the clock of whoever queued it
    events: int  # already in the log, from earlier attempts
    body: bytes  # empty when it has expired, or is larger than we take
    body_bytes: int


def lease_key(job_id: str) -> str:
    """arq's own in-progress key, so that arq's `Job.status()` tells the truth about our jobs."""
    return in_progress_key_prefix + job_id


_FIELDS = 8  # values a job in claim.lua's answer


class Claims:
    def __init__(self, redis: Redis, model: str, worker: str, *, lease_s: float, most_bytes: int) -> None:
        self._model, self._worker, self._most_bytes = model, worker, most_bytes
        self._lease_ms = int(lease_s * 1000)
        self._claim = script(redis, "claim")
        self._renew = script(redis, "renew")
        self._release = script(redis, "release")

    async def take(self, lane: Lane, want: int, *, only: str = "") -> list[Claim]:
        """Up to `want` jobs, oldest first; `only` that one if it is waiting. Raises RedisError, OSError."""
        flat = await self._claim(
            keys=[keys.queue(self._model, lane)],
            args=[want, self._lease_ms, self._worker, lane, JOB_LIFE_MS, self._most_bytes, only],
        )
        return [_claim(lane, flat[i : i + _FIELDS]) for i in range(0, len(flat), _FIELDS)]

    async def renew(self, held: Sequence[Claim]) -> list[Claim]:
        """Returns those that somebody else owns by now."""
        names = [k for c in held for k in (keys.job(c.job_id), lease_key(c.job_id), keys.log(c.job_id))]
        attempts = [c.attempt for c in held]
        lost = await self._renew(keys=names, args=[self._lease_ms, JOB_LIFE_MS, self._worker, *attempts])
        return [held[i - 1] for i in lost]

    async def release(self, claim: Claim) -> None:
        """Hand it back; whoever is idle hears of it at once."""
        await self._release(
            keys=[keys.job(claim.job_id), lease_key(claim.job_id)],
            args=[claim.attempt, keys.wake(self._model)],
        )


def _claim(lane: Lane, row: list[bytes]) -> Claim:
    job_id, attempt, crashes, cancelled, queued_ms, events, body, body_bytes = row
    return Claim(
        job_id=job_id.decode("utf-8", "surrogateescape"),
        lane=lane,
        attempt=int(attempt),
        crashes=int(crashes),
        cancelled=bool(int(cancelled)),
        queued_at=float(queued_ms) / 1000,
        events=int(events),
        body=body,
        body_bytes=int(body_bytes),
    )
