"""Running jobs that do nothing until the test lets them end."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from schemas.keys import Lane
from tests.queue.helpers import settings
from worker.monitoring.metrics import Metrics
from worker.queue import worker as queue_worker
from worker.queue.cancel_requests import CancelRequests
from worker.queue.cron import Cron
from worker.queue.job.channel import Publisher
from worker.queue.job.claims import Claim, Claims
from worker.queue.job.functions import JobFunctions
from worker.queue.job.job import Interruption, Job
from worker.queue.running import RunningJobs
from worker.queue.server.clock import ServerClock
from worker.queue.server.connection import connect
from worker.queue.server.redis_server import RedisServer
from worker.queue.worker import QueueWorker, ServedModel


def claim_of(job_id: str, lane: Lane = "interactive", *, lease_expirations: int = 0) -> Claim:
    return Claim(
        job_id=job_id,
        lane=lane,
        attempt=1,
        crashes=0,
        cancelled=False,
        queued_at=time.time(),
        events=0,
        body=b"",
        body_bytes=0,
        lease_expirations=lease_expirations,
    )


class Held:
    """Stands in for a `JobRunner`: jobs are held until `release`, or until they are interrupted: then `ended` has the
    reason by id."""

    def __init__(self, *, stubborn: bool = False) -> None:
        """`stubborn`: an interruption does not end a job."""
        self.ended: dict[str, Interruption | None] = {}
        self._released, self._stubborn = asyncio.Event(), stubborn

    async def run(self, job: Job) -> None:
        job.begin()
        try:
            await self._released.wait()
        except asyncio.CancelledError:
            if self._stubborn:
                await self._released.wait()
        self.ended[job.claim.job_id] = job.interruption

    async def release(self, jobs: RunningJobs) -> None:
        """Let all jobs end, and wait until they have."""
        self._released.set()
        await jobs.all_ended()


class HeldJobs:
    """Running jobs that are held, of no worker."""

    def __init__(self, redis: Redis) -> None:
        publisher = Publisher(redis, ServerClock(), settings("redis://unused"))
        self._held, self.wakes = Held(), 0
        self.jobs = RunningJobs(publisher, Metrics("m"), run=self._held.run, wake=self._wake)
        self.ended = self._held.ended

    async def start(self, *claims: Claim) -> None:
        """Start the jobs, and wait until each is at a point where it can be interrupted."""
        for claim in claims:
            self.jobs.start(claim)
        await asyncio.sleep(0)

    async def release(self) -> None:
        """Let all jobs end, and wait until they have."""
        await self._held.release(self.jobs)

    def _wake(self) -> None:
        self.wakes += 1


async def cancel_waiting(redis: Redis, job_id: str) -> bool:
    """Cancel a job that waits, as a worker does."""
    return await CancelRequests(redis, settings("redis://unused"), HeldJobs(redis).jobs).cancel_waiting(job_id)


class Sweeps(Cron):
    """Counts the sweeps of a worker, which looks at its crons in each."""

    def __init__(self) -> None:
        self.count = 0

    async def begin_if_due(self, redis: Redis, worker: str, now: datetime) -> None:
        self.count += 1


@dataclass(frozen=True)
class HoldingWorker:
    """A worker that holds its jobs and has no services, and its parts."""

    worker: QueueWorker
    claims: Claims
    held: Held
    sweeps: Sweeps

    @property
    def ended(self) -> dict[str, Interruption | None]:
        return self.held.ended

    def running(self) -> list[str]:
        return self.worker.jobs.ids()

    async def release(self) -> None:
        """Let all jobs end, and wait until they have."""
        await self.held.release(self.worker.jobs)

    async def start(self, *claims: Claim) -> None:
        """Start the jobs, and wait until each is at a point where it can be interrupted."""
        for claim in claims:
            self.worker.jobs.start(claim)
        await asyncio.sleep(0)


@asynccontextmanager
async def holding(
    url: str, steps_s: Sequence[float] = (), *, stubborn: bool = False, **given: Any
) -> AsyncIterator[HoldingWorker]:
    """A worker that holds its jobs until the end of the block."""
    known = settings(url, **{"max_rows": 3, "reserved_rows": 1, **given})
    async with connect(known) as redis:
        held, claims, sweeps = Held(stubborn=stubborn), Claims(redis, known), Sweeps()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(queue_worker, "JobRunner", lambda *parts, **options: held)
            patched.setattr(queue_worker, "Claims", lambda *parts: claims)
            worker = queue_worker.QueueWorker(
                JobFunctions([], {}),
                server=RedisServer(redis, known),
                settings=known,
                metrics=Metrics("m"),
                model=ServedModel(step_times=lambda: steps_s),
                crons=[sweeps],
            )
        holder = HoldingWorker(worker, claims, held, sweeps)
        yield holder
        await holder.release()
