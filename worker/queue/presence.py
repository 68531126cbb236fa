"""Publishes a worker's presence: a hash with its model and limits, which expires with its lease."""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from schemas import keys
from schemas.keys import LANES, Lane
from worker import __version__
from worker.queue.rows import offline_rows
from worker.queue.server.clock import ServerClock
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

_RATE_OVER_S = 60.0
# Groups: valid until, in Unix seconds, and running jobs by lane. Any client can write a field, so digits are bounded:
# int() refuses very long numbers.
_REPORT = re.compile(rb"[\d.]+ [\d.]+ (\d{1,15}) (\d{1,15}) (\d{1,15})")


@dataclass(frozen=True, slots=True)
class Abilities:
    """What the served model accepts and emits, as a worker publishes it."""

    context_tokens: int = 0  # prompt and answer together; 0 if unknown
    images: bool = False
    tools: bool = False
    reasoning: bool = False

    def as_fields(self) -> dict[str, str | int]:
        """Return the fields of the worker's hash."""
        flags = {"images": self.images, "tools": self.tools, "reasoning": self.reasoning}
        context: dict[str, str | int] = {"context_tokens": self.context_tokens} if self.context_tokens else {}
        return {**context, **{name: "yes" if on else "no" for name, on in flags.items()}}


class Running(Protocol):
    """The jobs that this worker runs."""

    def by_lane(self) -> Mapping[Lane, int]:
        """Return their number by lane."""

    def rows(self) -> int:
        """Return how many of them take a row."""


class Presence:
    """Publishes that this worker is alive, for one lease at a time."""

    def __init__(
        self, redis: Redis, settings: Settings, clock: ServerClock, abilities: Abilities | None = None
    ) -> None:
        self._clock, self._settings = clock, settings
        self._redis, self._key = redis, keys.worker(settings.worker_name)
        self._model_key = keys.model(settings.model_name)
        self._queues = [keys.queue(settings.model_name, lane) for lane in LANES]
        self._lease_ms = int(settings.lease_s * 1000)
        self._ended: deque[float] = deque()
        self._fields: dict[str, str | int | float] = {
            "name": settings.worker_name,
            "model": settings.model_name,
            "max_rows": settings.max_rows,
            "queue_limit": settings.queue_limit,
            **(abilities or Abilities()).as_fields(),
            "version": __version__,
            "started_at": round(time.time(), 3),
        }

    def job_ended(self) -> None:
        """Count an ended job for the reported rate."""
        self._ended.append(time.monotonic())

    async def run(self, running: Running, on_waiting: Callable[[Lane, int], None]) -> None:
        """Publish, and synchronize the clock, three times per lease until this task is cancelled. `on_waiting` receives
        the waiting jobs of each lane."""
        while True:
            try:
                for lane, jobs in (await self.publish(running)).items():
                    on_waiting(lane, jobs)
                await self._clock.sync(self._redis)
            except (RedisError, OSError):
                pass  # the publisher and the claim loop log an outage
            await asyncio.sleep(self._lease_ms / 1000 / 3)

    async def publish(self, running: Running) -> dict[Lane, int]:
        """Publish this worker's state, valid for one lease.

        Returns the waiting jobs by lane, computed from the reports of all workers of the model. Raises RedisError,
        OSError.
        """
        try:
            return await self._publish(running)
        except ResponseError:
            await self._delete_foreign()
            raise

    async def _delete_foreign(self) -> None:
        """Delete values of other types from our keys: other programs wrote them, and they hide the worker."""
        for key in (self._key, self._model_key):
            if (kind := await self._redis.type(key)) not in (b"hash", b"none"):
                logger.warning("deleted a foreign value: %s held a %s", key, kind.decode())
                await self._redis.delete(key)

    async def _publish(self, running: Running) -> dict[Lane, int]:
        rate, now = round(self._jobs_per_s(), 3), self._clock.now()
        jobs = running.by_lane()
        offline = offline_rows(self._settings, self._clock.utc())
        load = {"rows": running.rows(), "offline_rows": offline, "jobs_per_s": rate}
        counts = " ".join(str(jobs[lane]) for lane in LANES)
        report = f"{self._settings.queue_limit} {rate} {self._valid_until():.0f} {counts}"
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._key, mapping={**self._fields, **load})
            pipe.pexpire(self._key, self._lease_ms)
            pipe.hset(self._model_key, self._settings.worker_name, report)
            pipe.pexpire(self._model_key, self._lease_ms)
            pipe.hvals(self._model_key)
            for queue in self._queues:
                pipe.zcount(queue, "-inf", now * 1000)
            *_, workers, interactive, batch = await pipe.execute()
        return _waiting(dict(zip(LANES, (interactive, batch), strict=True)), workers, now)

    def _valid_until(self) -> float:
        return self._clock.now() + self._lease_ms / 1000 + 1

    async def remove(self) -> None:
        """Delete this worker's presence. If Redis does not answer, it expires."""
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.delete(self._key)
                pipe.hdel(self._model_key, self._settings.worker_name)
                await pipe.execute()
        except (RedisError, OSError):
            logger.info("redis does not answer: the worker's presence expires with its lease")

    def _jobs_per_s(self) -> float:
        """Ended jobs per second over the last minute; clients estimate from it how long a full queue takes to drain."""
        since = time.monotonic() - _RATE_OVER_S
        while self._ended and self._ended[0] < since:
            self._ended.popleft()
        return len(self._ended) / _RATE_OVER_S


def _waiting(due: Mapping[Lane, int], workers: Iterable[bytes], now: float) -> dict[Lane, int]:
    """Waiting jobs by lane: due jobs minus running jobs of live workers, since running jobs stay in the queue."""
    reports = [match.groups() for worker in workers if (match := _REPORT.fullmatch(worker))]
    alive = [running for until, *running in reports if int(until) > now]
    return {lane: max(0, due[lane] - sum(int(running[i]) for running in alive)) for i, lane in enumerate(LANES)}
