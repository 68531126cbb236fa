"""The queues of a server, with or without workers."""

import re
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.keys import Lane
from sluice.presence import Attendances
from sluice.transport.retries import Retries

_PAGE = 1000  # ids in one reply


@dataclass(frozen=True, slots=True)
class Queue:
    """One lane of a model that holds jobs."""

    model: str
    lane: Lane
    jobs: int  # queued and running
    oldest_s: float  # seconds since the oldest of them was queued
    workers: int  # live workers of the model

    @property
    def served(self) -> bool:
        """True if a live worker serves the model."""
        return self.workers > 0


@dataclass(frozen=True, slots=True)
class MisplacedJobs:
    """Jobs under a key that no worker reads: `problem` says why, and where they belong."""

    key: str
    jobs: int
    problem: str


class Queues:
    """Reads the queues of a server."""

    def __init__(self, redis: Redis, retries: Retries, attendances: Attendances) -> None:
        self._redis, self._retries = redis, retries
        self._attendances = attendances

    async def read_all(self, workers: Collection[str]) -> list[Queue]:
        """Return every queue with jobs, sorted by model and lane. `workers`: the model of each live worker."""
        lanes = sorted(filter(None, map(keys.parse_queue, await self._retries.scan(keys.QUEUES))))
        found = [await self._read(model, lane, workers) for model, lane in lanes]
        return [queue for queue in found if queue is not None]

    async def read_misplaced(self) -> list[MisplacedJobs]:
        """Return the keys that begin like a queue and hold jobs which no worker takes."""
        found = []
        for name in sorted(await self._retries.scan(keys.QUEUES)):
            key = name.decode("utf-8", "replace")
            problem = keys.queue_problem(key)
            if problem and await self._retries.run(partial(self._redis.type, name)) == b"zset":
                jobs: int = await self._retries.run(partial(self._redis.zcard, name))
                found.append(MisplacedJobs(key, jobs, problem))
        return found

    async def _read(self, model: str, lane: Lane, workers: Collection[str]) -> Queue | None:
        key = keys.queue(model, lane)
        if await self._retries.run(lambda: self._redis.type(key)) != b"zset":
            return None  # the queue has just emptied, or is a foreign value
        if model not in workers:
            await self._end_overdue(model, lane)
        jobs: int = await self._retries.run(lambda: self._redis.zcard(key))
        oldest = await self._retries.run(lambda: self._redis.zrange(key, 0, 0, withscores=True))
        since_s = await self._now() - oldest[0][1] / 1000 if oldest else 0.0
        return Queue(model, lane, jobs, max(0.0, since_s), list(workers).count(model)) if jobs else None

    async def _end_overdue(self, model: str, lane: Lane) -> None:
        """End the jobs past their deadline. Others are read only: 1,000 jobs take two round trips."""
        async for ids in self.pages(model, lane):
            late = await self._retries.run(partial(self._past_deadline, ids))
            await self._attendances.check_all(late)

    async def _past_deadline(self, ids: Sequence[bytes]) -> list[str]:
        """Return those of the jobs that may be past their deadline: the script decides, when it ends them."""
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.time()
            for id in ids:
                pipe.hget(keys.job(id.decode("utf-8", "surrogateescape")), "deadline")
            (seconds, _), *deadlines = await pipe.execute(raise_on_error=False)
        return [
            id.decode("utf-8", "surrogateescape")
            for id, text in zip(ids, deadlines, strict=True)
            if isinstance(text, bytes) and re.fullmatch(rb"\d{1,12}(\.\d{1,12})?", text) and float(text) <= seconds + 1
        ]

    async def pages(self, model: str, lane: Lane, *, older_than_s: float = 0.0) -> AsyncGenerator[Sequence[bytes]]:
        """Yield pages of the ids of the jobs that were queued at least `older_than_s` seconds ago, oldest first. The
        ids are read before the first page is yielded."""
        key = keys.queue(model, lane)
        until_ms = (await self._now() - older_than_s) * 1000 if older_than_s else "+inf"
        ids: list[bytes] = []
        while True:
            read = partial(self._redis.zrangebyscore, key, "-inf", until_ms, start=len(ids), num=_PAGE)
            page = await self._retries.run(read)
            ids += page
            if len(page) < _PAGE:
                break
        for start in range(0, len(ids), _PAGE):
            yield ids[start : start + _PAGE]

    async def _now(self) -> float:
        seconds, microseconds = await self._retries.run(self._redis.time)
        return float(seconds + microseconds / 1e6)
