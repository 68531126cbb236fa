"""arq's cron jobs, by a crontab and in UTC. Each slot is run by the one worker that takes it."""

import logging
from collections.abc import Callable
from datetime import datetime

from arq.cron import CronJob, cron
from arq.typing import WorkerCoroutine
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from schemas import keys
from worker.schedule_times import Crontab

logger = logging.getLogger("sluice.queue")

_TAKEN_S = 86_400  # how long a slot stays taken: a worker that was busy all the while may look at it late


class Cron(CronJob):
    """arq's own times know no ranges or steps, and its weekday is beside the day of month, never instead of it."""

    def __init__(self, name: str, coroutine: WorkerCoroutine, crontab: Crontab, *, free: Callable[[], bool]) -> None:
        super().__init__(**vars(cron(coroutine, name=name)))
        self._crontab, self._free = crontab, free

    def calculate_next(self, prev_run: datetime) -> None:
        self.next_run = self._crontab.after(prev_run)

    async def run_if_due(self, redis: Redis, worker: str, now: datetime) -> None:
        """Call it often. A worker that is not free leaves the slot to others, and looks again when it is.

        Slots that nobody was there for are not made up for, and those that passed meanwhile are one.
        Raises RedisError, OSError.
        """
        if self.next_run is None:
            self.calculate_next(now)
        elif self.next_run <= now and self._free():
            taken = await self._take(redis, worker, self.next_run)
            self.calculate_next(now)
            if taken:
                await self.coroutine({})

    async def _take(self, redis: Redis, worker: str, slot: datetime) -> bool:
        """Ours also where it was taken by us and the answer was lost."""
        key = keys.slot(self.name, int(slot.timestamp()))
        try:
            before = await redis.set(key, worker, nx=True, get=True, ex=_TAKEN_S)
        except ResponseError:
            if await redis.type(key) in (b"string", b"none"):
                raise
            logger.warning("%s holds a foreign value: nobody takes this slot", key)
            return False
        return before in (None, worker.encode())
