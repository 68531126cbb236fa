"""The pickup of jobs: claims them when a row is free and the worker is woken or a poll is due."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from redis.exceptions import RedisError

from schemas import keys
from schemas.keys import Lane
from worker.errors import OwnershipLost
from worker.queue.cancel_backlog import CancelBacklog
from worker.queue.cancel_keys import CancelKeys
from worker.queue.job.claims import Claim, Claims, WorkerRows
from worker.queue.job.takeover import Takeover
from worker.queue.rows import MAX_COUNTS, worker_rows
from worker.queue.running import RunningJobs
from worker.queue.server.outage import until_redis_answers
from worker.queue.server.readiness import Readiness
from worker.queue.server.redis_server import RedisServer
from worker.settings import Settings


class Pickup:
    """Claims jobs of both lanes while rows are free, and starts them. Owns the times of polls and of Redis's answers:
    when the next sweep is due, if the worker is ready, and if it may take over jobs of other workers."""

    def __init__(
        self,
        server: RedisServer,
        settings: Settings,
        claims: Claims,
        jobs: RunningJobs,
        cancel_keys: CancelKeys,
        cancels: CancelBacklog,
        stopping: asyncio.Event,
        step_times: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """`stopping`: once it is set, no claim is begun, and the jobs of a claim that is under way are requeued.
        `step_times`: see `ServedModel`."""
        self._server, self._settings = server, settings
        self._claims = claims
        self._jobs = jobs
        self._cancel_keys, self._cancels = cancel_keys, cancels
        self._stopping = stopping
        self._step_times = step_times
        # Much shorter than a lease, so that a dead worker's jobs wait hardly longer than for their leases.
        self._sweep_s = min(settings.poll_s, max(0.1, settings.lease_s / 20))
        self._swept_at = 0.0  # monotonic
        self._next_at = math.inf  # monotonic: of a poll that a claim asked for
        self._woken, self._connected = asyncio.Event(), False
        self._takeover = Takeover(settings.lease_s)
        self.readiness = Readiness(self._sweep_s)

    def wake(self) -> None:
        """Claim jobs at once instead of at the next poll."""
        self._woken.set()

    async def connect(self) -> bool:
        """Wait for Redis and check it. Returns False if the worker is stopped first. Raises `CannotStart`."""
        if not self._connected:
            connect = partial(self.readiness.watch, self._connect)
            self._connected = await until_redis_answers(connect, self._stopping)
        return self._connected

    async def _connect(self) -> None:
        self._takeover.record_first_answer(await self._server.connect())
        self.readiness.record_answer()

    async def run(self, poll: Callable[[], Awaitable[None]]) -> None:
        """Call `poll` when the worker is woken, when its last claims asked for it, and at least once per sweep, until
        the worker is stopped. It is repeated while Redis does not answer."""
        while not self._stopping.is_set():
            self._woken.clear()
            await until_redis_answers(partial(self.readiness.watch, poll), self._stopping)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._sweep_s, self._next_at - time.monotonic())):
                    await self._woken.wait()

    async def poll(self) -> bool:
        """Claim a job for every free row, or this worker's share of fewer jobs. Returns True if this poll was a sweep:
        it also claimed jobs past their deadline, and found the cancel keys of running jobs and the jobs that arq
        aborts. Raises RedisError, OSError."""
        sweep = time.monotonic() - self._swept_at >= self._sweep_s
        self._next_at = math.inf
        for lane in keys.LANES:
            await self._poll_lane(lane, sweep=sweep)
        if sweep:
            await self._cancel_keys.check_all()
            await self._cancels.add_aborted()
            self._swept_at = time.monotonic()
        return sweep

    async def requeue_lost_claims(self) -> None:
        """Requeue claims whose reply was lost; their jobs would wait for their leases, and then count as suspects. And
        tell the other workers to leave no more jobs to this one."""
        no_rows = WorkerRows(len(self._jobs), self._settings.max_rows, dict.fromkeys(keys.LANES, 0))
        with suppress(RedisError, OSError):  # then the leases expire
            for lane in keys.LANES:
                # A claim for no row requeues them, and returns only jobs past their deadline.
                await self._start_all(await self._take(lane, 0, no_rows))

    async def _poll_lane(self, lane: Lane, *, sweep: bool) -> None:
        if self._stopping.is_set():  # it may have been set since the poll began
            return
        rows = worker_rows(self._jobs.claims(), self._settings, self._server.clock.utc(), self._step_times())
        limit = rows.free[lane]
        if limit or sweep or self._claims.needs_reconcile(lane):
            counts = MAX_COUNTS - sum(claim.is_count for claim in self._jobs.claims())
            # A job that only this poll has found woke no worker that it may be left to.
            claimed = await self._take(lane, limit, rows, counts=max(0, counts), wake=sweep)
            self._next_at = min(self._next_at, self._claims.next_at(lane))
            self._takeover.record_answer()
            self.readiness.record_answer()
            await self._start_all(claimed)
            # A cancellation that arrived before the claim's reply found no job to interrupt.
            await self._cancel_keys.check([claim.job_id for claim in claimed])
        if self._claims.needs_reconcile(lane):
            self.wake()

    async def _take(
        self, lane: Lane, limit: int, rows: WorkerRows, *, counts: int = 0, wake: bool = False
    ) -> list[Claim]:
        return await self._claims.take(
            lane,
            limit,
            counts=counts,
            running=self._jobs.claims(),
            suspects=self._jobs.suspects(),
            takeover=self._takeover.allowed(),
            rows=rows,
            wake=wake,
        )

    async def _start_all(self, claims: list[Claim]) -> None:
        for claim in claims:
            if claim.job_id in self._jobs:
                # Our own job, claimed again after its lease had expired: the running attempt has lost it.
                self._jobs.interrupt(claim.job_id, OwnershipLost())
                await self._requeue(claim)
            elif self._stopping.is_set() and not claim.expired:  # set while the claim was under way
                await self._requeue(claim)
            else:
                self._jobs.start(claim)

    async def _requeue(self, claim: Claim) -> None:
        with suppress(RedisError, OSError):  # then its lease expires
            await self._claims.release(claim)
