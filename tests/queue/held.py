"""Running jobs that do nothing until the test lets them end."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from redis.asyncio import Redis

from sluice.contract.keys import Lane
from tests.queue.helpers import settings
from worker.errors import OwnershipLost
from worker.monitoring.metrics import Metrics
from worker.queue.cron import Cron
from worker.queue.job.claims import Claim
from worker.queue.job.job import Job, JobInterruption, JobResult
from worker.queue.job.publisher import Publisher
from worker.queue.job.runner import JobFunctions
from worker.queue.redis_server import RedisServer, ServerClock, redis_from_settings
from worker.queue.running import CancelRequests, RunningJobs
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


class HeldJobs(JobFunctions):
    """Jobs that do nothing until `release`, or until they are interrupted: `ended` has the reason by id. Released ones
    end as if another attempt had taken them, so that they write nothing.

    A worker calls them as its functions, whatever a body says; `of_no_worker` runs them without one."""

    jobs: RunningJobs

    def __init__(self, *, stubborn: bool = False) -> None:
        """`stubborn`: an interruption does not end a job."""
        super().__init__([], {})
        self.ended: dict[str, JobInterruption | None] = {}
        self.wakes = 0
        self._released, self._stubborn = asyncio.Event(), stubborn

    @classmethod
    def of_no_worker(cls, redis: Redis) -> "HeldJobs":
        held, publisher = cls(), Publisher(redis, ServerClock(), settings("redis://unused"))
        held.jobs = RunningJobs(publisher, Metrics("m"), run=held._run, wake=held._wake)
        return held

    async def start(self, *claims: Claim) -> None:
        """Start the jobs, and wait until each is at a point where it can be interrupted."""
        for claim in claims:
            self.jobs.start(claim)
        await asyncio.sleep(0)

    async def release(self) -> None:
        """Let all jobs end, and wait until they have."""
        self._released.set()
        await self.jobs.all_ended()

    async def open(self, claim: Claim, body: bytes, max_bytes: int) -> Callable[[Job], Awaitable[JobResult]]:
        return self._hold

    async def _hold(self, job: Job) -> JobResult:
        try:
            await self._released.wait()
        except asyncio.CancelledError:
            if not self._stubborn:
                raise
            await self._released.wait()
        finally:
            self.ended[job.claim.job_id] = job.interruption
        raise OwnershipLost

    async def _run(self, job: Job) -> None:
        job.begin()
        with suppress(asyncio.CancelledError, OwnershipLost):
            await self._hold(job)

    def _wake(self) -> None:
        self.wakes += 1


async def cancel_waiting(redis: Redis, job_id: str) -> bool:
    """Cancel a job that waits, as a worker does."""
    return await CancelRequests(redis, settings("redis://unused"), HeldJobs.of_no_worker(redis).jobs).cancel_waiting(
        job_id
    )


class Sweeps(Cron):
    """Counts the sweeps of a worker, which looks at its crons in each."""

    def __init__(self) -> None:
        self.count = 0

    async def begin_if_due(self, redis: Redis, worker: str, now: datetime) -> None:
        self.count += 1


@dataclass(frozen=True)
class HoldingWorker:
    """A worker whose jobs are held. It claims when the test polls, and of its services only the publisher runs."""

    worker: QueueWorker
    held: HeldJobs
    sweeps: Sweeps


@asynccontextmanager
async def holding(
    url: str, steps_s: Sequence[float] = (), *, stubborn: bool = False, **given: Any
) -> AsyncIterator[HoldingWorker]:
    """A worker that holds its jobs until the end of the block."""
    known = settings(url, **{"max_rows": 3, "reserved_rows": 1, **given})
    async with redis_from_settings(known) as redis:
        held, sweeps = HeldJobs(stubborn=stubborn), Sweeps()
        worker = QueueWorker(
            held,
            server=RedisServer(redis, known),
            settings=known,
            metrics=Metrics("m"),
            model=ServedModel(step_times=lambda: steps_s),
            crons=[sweeps],
        )
        held.jobs = worker.jobs
        publish, *_ = worker._services
        publishing = asyncio.create_task(publish())
        yield HoldingWorker(worker, held, sweeps)
        await held.release()
        publishing.cancel()
