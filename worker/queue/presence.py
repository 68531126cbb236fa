"""That a worker is alive, and what it serves: a hash that runs out with the lease."""

import time

from redis.asyncio import Redis

from schemas import keys
from worker import __version__
from worker.settings import Settings


class Presence:
    def __init__(self, redis: Redis, settings: Settings) -> None:
        self._redis, self._key = redis, keys.worker(settings.worker_name)
        self._lease_ms = int(settings.lease_s * 1000)
        self._fields: dict[str, str | int | float] = {
            "name": settings.worker_name,
            "model": settings.model_name,
            "max_rows": settings.max_rows,
            "version": __version__,
            "started_at": time.time(),
        }

    async def show(self, rows: int) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._key, mapping={**self._fields, "rows": rows})
            pipe.pexpire(self._key, self._lease_ms)
            await pipe.execute()

    async def remove(self) -> None:
        await self._redis.delete(self._key)
