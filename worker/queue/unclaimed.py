"""Finds jobs that no worker claims, and logs what would be right: a producer gets no error for a wrong queue."""

import asyncio
import logging

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, RedisError

from sluice.contract import keys

logger = logging.getLogger("sluice.queue")

_EVERY_S = 10.0
_PER_STEP = 2000  # keys of the server that one step looks at: about 1 ms of its time
_MAX_LOGGED = 100  # queues, since any client can create them


class UnclaimedQueues:
    """Walks over the keys of the server, a bounded part in each step, and logs each such queue once."""

    def __init__(self, redis: Redis, model: str, *, every_s: float = _EVERY_S) -> None:
        """`model`: the one that this worker serves. `every_s`: seconds between two steps."""
        self._redis, self._model = redis, model
        self._every_s = every_s
        self._cursor = 0
        self._logged = set[str]()

    async def run(self) -> None:
        """Look for such queues until this task is cancelled. A user without SCAN looks for none."""
        while True:
            try:
                await self._step()
            except NoPermissionError:
                logger.debug("the server denies SCAN: queues without a worker are not looked for")
                await asyncio.Event().wait()
            except (RedisError, OSError):
                pass  # the claim loop logs an outage
            await asyncio.sleep(self._every_s)

    async def _step(self) -> None:
        self._cursor, found = await self._redis.scan(self._cursor, match=keys.QUEUES, count=_PER_STEP)
        for name in found[:_MAX_LOGGED]:
            key = name.decode("utf-8", "replace")
            if key in self._logged or len(self._logged) >= _MAX_LOGGED:
                continue
            problem = keys.queue_problem(key) or await self._unserved(key)
            if problem and (jobs := await self._jobs(name)):
                self._logged.add(key)
                logger.warning("no worker takes the %d jobs in %s: %s", jobs, key[:200], problem)

    async def _unserved(self, key: str) -> str | None:
        model = key.split(":")[2]
        if model == self._model or await self._redis.exists(keys.model(model)):
            return None
        remedy = f"start one, correct the name in the producer, or run sluice queue purge {model}"
        return f"no worker serves {model!r}; {remedy}"

    async def _jobs(self, name: bytes) -> int:
        if await self._redis.type(name) != b"zset":
            return 0
        return int(await self._redis.zcard(name))
