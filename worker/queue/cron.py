"""Cron jobs with crontab expressions, in UTC. One worker takes each slot and runs it."""

import logging
from collections.abc import Callable
from datetime import datetime

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from sluice.batch.times import Crontab
from sluice.contract import keys

logger = logging.getLogger("sluice.queue")


class Cron:
    """A job that begins at each slot of a crontab."""

    def __init__(
        self,
        name: str,
        begin: Callable[[], None],
        crontab: Crontab,
        *,
        free: Callable[[], bool],
        early: Callable[[], bool] = lambda: False,
    ) -> None:
        """`name`: workers that run the same job have the same one. `begin` starts the job, and returns at once. `free`
        returns False while this worker should leave the slots to others; `early` True if the next slot is not to be
        waited for."""
        self.name, self._begin = name, begin
        self._crontab, self._free = crontab, free
        self._early = early
        self.next_run: datetime | None = None  # the slot that is due next; None before the first look
        self.now: datetime | None = None  # when the last look was

    async def begin_if_due(self, redis: Redis, worker: str, now: datetime) -> None:
        """Begin the job if a slot is due and this worker takes it. Call it often. `worker`: its name, which marks the
        slots that it takes; `now`: by the server's clock, in UTC.

        A worker that is not free leaves the slot to others, and tries to take it when it is free. Slots missed while
        no worker is up are skipped; several slots that pass while this worker is busy count as one. The worker that
        takes a slot early has it until it has passed. Raises RedisError, OSError.
        """
        self.now = now
        if self.next_run is None:
            self.next_run = self._crontab.after(now)
        elif self._free() and (self.next_run <= now or self._early()):
            taken = await self._take(redis, worker, self.next_run)
            self.next_run = self._crontab.after(now)
            if taken:
                self._begin()

    async def _take(self, redis: Redis, worker: str, slot: datetime) -> bool:
        """Take the slot. Returns True also if an earlier call took it and its reply was lost."""
        key = keys.slot(self.name, int(slot.timestamp()))
        day_s = 86_400  # a busy worker may try to take it late
        try:
            before = await redis.set(key, worker, nx=True, get=True, ex=day_s)
        except ResponseError:
            if await redis.type(key) in (b"string", b"none"):
                raise
            logger.warning("%s holds a foreign value: this slot is skipped", key)
            return False
        return before in (None, worker.encode())
