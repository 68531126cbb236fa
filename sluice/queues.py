"""The queues of a server, whether somebody serves them or not."""

from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from redis.asyncio import Redis

from sluice import wire
from sluice.transport.retries import Retries
from sluice.wire import Lane

_AT_ONCE = 1000  # ids in one answer


@dataclass(frozen=True, slots=True)
class Queue:
    """One lane of a model in which there are jobs."""

    model: str
    lane: Lane
    jobs: int  # those that run included
    oldest_s: float  # since the oldest of them was queued
    workers: int  # that serve the model

    @property
    def served(self) -> bool:
        return self.workers > 0


class Queues:
    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries

    async def read_all(self, workers: Collection[str]) -> list[Queue]:
        """Every queue with jobs, by model. `workers`: the model of each live worker."""
        lanes = sorted(filter(None, map(wire.parse_queue_key, await self._retries.scan(wire.QUEUES))))
        found = [await self._read(model, lane, workers) for model, lane in lanes]
        return [queue for queue in found if queue is not None]

    async def _read(self, model: str, lane: Lane, workers: Iterable[str]) -> Queue | None:
        key = wire.queue_key(model, lane)
        if await self._retries.run(lambda: self._redis.type(key)) != b"zset":
            return None  # it has just ended, or is a foreign value
        jobs: int = await self._retries.run(lambda: self._redis.zcard(key))
        oldest = await self._retries.run(lambda: self._redis.zrange(key, 0, 0, withscores=True))
        since_s = await self._now() - oldest[0][1] / 1000 if oldest else 0.0
        return Queue(model, lane, jobs, max(0.0, since_s), list(workers).count(model)) if jobs else None

    async def pages(self, model: str, lane: Lane, *, older_than_s: float = 0.0) -> AsyncGenerator[Sequence[bytes]]:
        """The ids of the jobs that were queued so long ago, oldest first, as they are at the beginning."""
        key = wire.queue_key(model, lane)
        until_ms = (await self._now() - older_than_s) * 1000 if older_than_s else "+inf"
        ids: list[bytes] = []
        while True:
            read = partial(self._redis.zrangebyscore, key, "-inf", until_ms, start=len(ids), num=_AT_ONCE)
            page = await self._retries.run(read)
            ids += page
            if len(page) < _AT_ONCE:
                break
        for start in range(0, len(ids), _AT_ONCE):
            yield ids[start : start + _AT_ONCE]

    async def _now(self) -> float:
        seconds, microseconds = await self._retries.run(self._redis.time)
        return float(seconds + microseconds / 1e6)
