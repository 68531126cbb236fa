"""Who owns a job: claimed under a lease, kept, handed back."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from arq.constants import in_progress_key_prefix, job_key_prefix, retry_key_prefix
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from schemas import keys
from schemas.keys import Lane
from worker.queue.scripts import JOB_LIFE_MS, script
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that is ours until its lease runs out. `attempt` fences every write."""

    job_id: str
    lane: Lane
    attempt: int
    crashes: int
    cancelled: bool
    queued_at: float  # Unix seconds from 0 on, by the clock of whoever queued it
    events: int  # already in the log, from earlier attempts
    body: bytes  # empty when it or the job has expired, or it is large: see `Claims.body`
    body_bytes: int
    tenant: str = ""  # where the submit said so
    lease_expirations: int = 0  # times that its lease ran out: a worker died while it ran, through its fault or not
    expired: bool = False  # its deadline has passed
    specprefill: bytes = b""  # which tokens of its prompt an earlier attempt computed, where that were not all
    images_digest: bytes = b""  # what tells the images that an earlier attempt saw from others

    def age_s(self, now: float) -> float:
        """Since it was queued; 0 where that was by a clock that goes ahead."""
        return max(0.0, now - self.queued_at)


def lease_key(job_id: str) -> str:
    """arq's own in-progress key, so that arq's `Job.status()` tells the truth about our jobs."""
    return in_progress_key_prefix + job_id


def cleanup_keys(job_id: str) -> list[str]:
    """What a job that has ended leaves nobody a use for: arq's keys, and the wish to cancel it."""
    return [keys.cancel(job_id), job_key_prefix + job_id, lease_key(job_id), retry_key_prefix + job_id]


_LATEST_MS = 1e15  # in the year 33658: a time that any clock can still be compared with
# Bodies up to this size come with the claim. Larger ones would hold up the other jobs of the same answer, and the
# server while it puts the answer together.
_INLINE_BYTES = 65_536


class Claims:
    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._model, self._worker = settings.model_name, settings.worker_name
        self._lease_ms, self._most_bytes = int(settings.lease_s * 1000), settings.max_request_bytes
        self._inline_bytes, self._redis = min(_INLINE_BYTES, self._most_bytes), redis
        self._answer_lost, self._one_at_a_time = set[Lane](), asyncio.Lock()
        self._to_mend = set[Lane]()
        self._queues = [keys.queue(self._model, lane) for lane in keys.LANES]
        self._claim = script(redis, "claim")
        self._release = script(redis, "release")
        self._cancel = script(redis, "cancel")
        self._waiting = script(redis, "waiting")
        self._log_ttl_ms, self._result_ttl_ms = settings.log_ttl_s * 1000, settings.result_ttl_s * 1000

    async def take(
        self,
        lane: Lane,
        want: int,
        *,
        running: Collection[Claim] = (),
        suspects: int = 0,
        takeover: bool = True,
    ) -> list[Claim]:
        """Up to `want` jobs, those past their deadline beside.

        `running`: what this worker runs now, for the sake of fairness between tenants. `suspects`: how many of
        them are on probation. Without `takeover` the jobs of a worker whose lease ran out are left alone.
        Raises RedisError, OSError.
        """
        tenants = Counter(claim.tenant for claim in running)
        async with self._one_at_a_time:
            lost = lane in self._answer_lost
            known = [claim.job_id for claim in running] if lost else []
            self._answer_lost.add(lane)  # until we hear this one
            more, foreign, rows = await self._claim(
                keys=[keys.queue(self._model, lane)],
                args=[
                    want, self._lease_ms, self._worker, lane, JOB_LIFE_MS, self._inline_bytes, int(takeover),
                    suspects, int(lost), len(known), *known, *(part for pair in tenants.items() for part in pair),
                ],
            )  # fmt: skip
            self._answer_lost.discard(lane)
        (self._to_mend.add if more else self._to_mend.discard)(lane)
        for found in foreign:
            logger.warning("deleted a foreign value: %s", found.decode("utf-8", "backslashreplace"))
        return [_claim(lane, row) for row in rows]

    def needs_reconcile(self, lane: Lane) -> bool:
        """The lane's index lacks jobs of its queue: claim again at once, whether rows are free or not."""
        return lane in self._to_mend

    async def body(self, claim: Claim) -> bytes:
        """Return the job's body; empty if it is gone, or larger than we take. Raises RedisError, OSError."""
        if claim.body or not 0 < claim.body_bytes <= self._most_bytes:
            return claim.body
        try:
            found = await self._redis.get(job_key_prefix + claim.job_id)
        except ResponseError:  # a foreign value stands there by now
            return b""
        return bytes(found or b"")

    async def find_waiting(self, job_ids: Collection[str]) -> list[str]:
        """Return the ids that are in one of our lanes; their jobs may run, on this worker or another."""
        found = await self._waiting(keys=self._queues, args=list(job_ids)) if job_ids else []
        return [job_id.decode("utf-8", "surrogateescape") for job_id in found]

    async def cancel_waiting(self, job_id: str) -> bool:
        """End a job that waits in one of our lanes. False where it does not."""
        (outcome,) = await self._cancel(
            keys=self._queues,
            args=[job_id, JOB_LIFE_MS, self._log_ttl_ms, self._result_ttl_ms, "", ""],
        )
        return bool(outcome == b"cancelled")

    async def release(self, claim: Claim) -> None:
        """Hand it back; whoever is idle hears of it at once."""
        await self._release(
            keys=[keys.job(claim.job_id), lease_key(claim.job_id), keys.queue(self._model, claim.lane)],
            args=[claim.attempt, keys.wake(self._model)],
        )


def _claim(lane: Lane, row: list[bytes]) -> Claim:
    said = dict(zip(row[::2], row[1::2], strict=True))
    return Claim(
        job_id=said[b"id"].decode("utf-8", "surrogateescape"),
        lane=lane,
        attempt=int(said[b"attempt"]),
        crashes=int(said[b"crashes"]),
        cancelled=bool(int(said[b"cancelled"])),
        queued_at=min(max(0.0, float(said[b"queued_ms"])), _LATEST_MS) / 1000,  # a score may be infinite
        events=int(said[b"events"]),
        body=said[b"body"],
        body_bytes=int(said[b"body_bytes"]),
        tenant=said[b"tenant"].decode("utf-8", "replace"),
        lease_expirations=int(said[b"lapses"]),
        expired=bool(int(said[b"expired"])),
        specprefill=said[b"thinned"],
        images_digest=said[b"shown"],
    )
