"""Cron jobs with crontab expressions, in UTC. One worker takes each slot and runs it."""

import logging
from collections.abc import Callable, Sequence
from datetime import datetime

from arq.cron import CronJob, cron
from arq.typing import WorkerCoroutine
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from schemas import keys
from worker.queue.server.redis_server import RedisServer
from worker.schedule_times import Crontab

logger = logging.getLogger("sluice.queue")

_TAKEN_S = 86_400  # expiry of a taken slot: a busy worker may try to take it late


class Cron(CronJob):
    """A job with a crontab: arq's own schedule has no ranges or steps, and cannot match weekday or day of month."""

    def __init__(self, name: str, coroutine: WorkerCoroutine, crontab: Crontab, *, free: Callable[[], bool]) -> None:
        """`free` returns False while this worker should leave the slots to others."""
        super().__init__(**vars(cron(coroutine, name=name)))
        self._crontab, self._free = crontab, free

    def calculate_next(self, prev_run: datetime) -> None:
        """Set the next slot after `prev_run`. Overrides arq's method."""
        self.next_run = self._crontab.after(prev_run)

    async def run_if_due(self, redis: Redis, worker: str, now: datetime) -> None:
        """Run the job if a slot is due and this worker takes it. Call it often.

        A worker that is not free leaves the slot to others, and tries to take it when it is free. Slots missed while
        no worker is up are skipped; several slots that pass while this worker is busy count as one. Raises RedisError,
        OSError.
        """
        if self.next_run is None:
            self.calculate_next(now)
        elif self.next_run <= now and self._free():
            taken = await self._take(redis, worker, self.next_run)
            self.calculate_next(now)
            if taken:
                await self.coroutine({})

    async def _take(self, redis: Redis, worker: str, slot: datetime) -> bool:
        """Take the slot. Returns True also if an earlier call took it and its reply was lost."""
        key = keys.slot(self.name, int(slot.timestamp()))
        try:
            before = await redis.set(key, worker, nx=True, get=True, ex=_TAKEN_S)
        except ResponseError:
            if await redis.type(key) in (b"string", b"none"):
                raise
            logger.warning("%s holds a foreign value: this slot is skipped", key)
            return False
        return before in (None, worker.encode())


class Crons:
    """The cron jobs of a worker. Their slots are times of the server's clock."""

    def __init__(self, crons: Sequence[Cron], server: RedisServer, worker: str) -> None:
        """`worker`: the worker's name, which marks the slots that it takes."""
        self._crons = tuple(crons)
        self._server = server
        self._worker = worker

    async def run_due(self) -> None:
        """Run the jobs of which a slot is due. Call it often. Raises RedisError, OSError."""
        for job in self._crons:
            await job.run_if_due(self._server.client, self._worker, self._server.clock.utc())
