"""The stored results of jobs."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.events import JobError, parse_as
from sluice.errors import JobCancelled, JobFailed, UnknownJob
from sluice.streaming.streams import Streams
from sluice.transport.retries import Retries

_INLINE_BYTES = 65_536  # a longer result is parsed in a thread
_UNKNOWN_S = 10.0  # without a trace of the job, after which there is none


class Results:
    """Reads results, as soon as they are there."""

    def __init__(self, redis: Redis, retries: Retries, streams: Streams) -> None:
        self._redis, self._retries = redis, retries
        self._streams = streams

    async def wait(self, job_id: str) -> dict[str, Any]:
        """Return the result of a job, waiting until it has ended. Raises as `Client.result`."""
        stored = await self._read(job_id)
        if stored is None:
            async with aclosing(self._streams.follow(job_id, -1, _UNKNOWN_S)) as events:
                async for _ in events:
                    pass
            stored = await self._read(job_id)
        if stored is None:
            raise UnknownJob(f"the result of job {job_id!r} has expired")
        is_long = len(stored) > _INLINE_BYTES
        return _completion(await asyncio.to_thread(json.loads, stored) if is_long else json.loads(stored))

    async def _read(self, job_id: str) -> bytes | None:
        key = keys.result(job_id)
        stored: bytes | None = await self._retries.run_until_answered(lambda: self._redis.get(key))
        return stored


def _completion(stored: dict[str, Any]) -> dict[str, Any]:
    match stored.get("type"):
        case "failed":
            raise JobFailed(parse_as(JobError, stored["error"]))
        case "cancelled":
            raise JobCancelled(stored["reason"])
    return stored
