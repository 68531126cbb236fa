"""Running jobs that do nothing until the test lets them end."""

import asyncio
import time

from redis.asyncio import Redis

from schemas.keys import Lane
from tests.queue.helpers import settings
from worker.monitoring.metrics import Metrics
from worker.queue.job.channel import Publisher
from worker.queue.job.claims import Claim
from worker.queue.job.job import Interruption
from worker.queue.running import RunningJobs
from worker.queue.server.clock import ServerClock


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


class HeldJobs:
    """`jobs` are held until `release`, or until they are interrupted: then `ended` has the reason by id."""

    def __init__(self, redis: Redis, *, stubborn: bool = False) -> None:
        """`stubborn`: an interruption does not end a job."""
        publisher = Publisher(redis, ServerClock(), settings("redis://unused"))
        self.jobs = RunningJobs(publisher, Metrics("m"), run=self._run, wake=self._wake)
        self.ended: dict[str, Interruption | None] = {}
        self.wakes = 0
        self._released, self._stubborn = asyncio.Event(), stubborn

    async def start(self, *claims: Claim) -> None:
        """Start the jobs, and wait until each is at a point where it can be interrupted."""
        for claim in claims:
            self.jobs.start(claim)
        await asyncio.sleep(0)

    async def release(self) -> None:
        """Let all jobs end, and wait until they have."""
        self._released.set()
        await self.jobs.all_ended()

    async def _run(self, job_id: str, score: int) -> None:
        job = self.jobs[job_id]
        job.begin()
        try:
            await self._released.wait()
        except asyncio.CancelledError:
            if self._stubborn:
                await self._released.wait()
        self.ended[job_id] = job.interruption

    def _wake(self) -> None:
        self.wakes += 1
