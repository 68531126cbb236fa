"""The jobs that belong to the lines of a run, as stored on the server."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from redis.asyncio import Redis

from sluice.cancellation import Cancellation
from sluice.contract import keys
from sluice.errors import QueueFull, ServerFull
from sluice.submission import NewJob, Submission, Submitted
from sluice.transport.retries import Retries

_AT_ONCE = 64  # jobs, or results, in one round trip
_BYTES_AT_ONCE = 4_000_000


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job's result as the worker wrote it, or None; `exists` is True if the server has the job's state."""

    result: bytes | None
    exists: bool


class JobStore:
    """Submits, reads and deletes jobs; each call waits out outages. No transactions: a full server rejects them."""

    def __init__(self, redis: Redis, retries: Retries) -> None:
        self._redis, self._retries = redis, retries
        self._submission, self._cancellation = Submission(redis, retries), Cancellation(redis, retries)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted | QueueFull | ServerFull]:
        """Queue jobs, and return an outcome for each."""
        answers: list[Submitted | QueueFull | ServerFull] = await self._retries.run_until_answered(
            lambda: self._submission.submit_all(jobs)
        )
        return answers

    async def read(self, ids: Sequence[str]) -> list[StoredJob]:
        """Return each job as it is stored, in order."""
        found: list[StoredJob] = []
        for start in range(0, len(ids), _AT_ONCE):
            found += await self._read(ids[start : start + _AT_ONCE])
        return found

    async def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs: queued ones at once, running ones through their workers."""
        await self._cancellation.cancel_all(ids)

    async def delete(self, jobs: Sequence[tuple[str, str]]) -> None:
        """Delete all keys of these jobs (id and model). A queued one will not run; the output of a running one is
        discarded."""

        async def send() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                for job_id, model in jobs:
                    pipe.zrem(keys.queue(model, "batch"), job_id)
                    pipe.unlink(*(name(job_id) for name in _JOB_KEYS))
                await pipe.execute()

        if jobs:
            await self._retries.run_until_answered(send)

    async def delete_run(self, run_id: str, models: Iterable[str]) -> None:
        """Delete the run's queued or running jobs of these models."""
        for model in models:
            queued = await self._queued(f"{run_id}-*", model)
            for start in range(0, len(queued), _AT_ONCE):
                await self.delete([(job_id, model) for job_id in queued[start : start + _AT_ONCE]])

    async def _queued(self, pattern: str, model: str) -> list[str]:
        names, cursor = set[str](), None
        while cursor != 0:
            scan = partial(self._redis.zscan, keys.queue(model, "batch"), cursor or 0, match=pattern, count=1000)
            cursor, found = await self._retries.run_until_answered(scan)
            names.update(member.decode() for member, _ in found)
        return list(names)

    async def _read(self, ids: Sequence[str]) -> list[StoredJob]:
        async def send() -> tuple[list[bytes | None], int]:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.mget([keys.result(job_id) for job_id in ids])
                pipe.exists(*(keys.job(job_id) for job_id in ids))
                results, num_known = await pipe.execute()
            return results, num_known

        results, num_known = await self._retries.run_until_answered(send)
        if num_known == len(ids):
            return [StoredJob(result, True) for result in results]
        return [StoredJob(result, await self._exists(job_id)) for job_id, result in zip(ids, results, strict=True)]

    async def _exists(self, job_id: str) -> bool:
        return bool(await self._retries.run_until_answered(lambda: self._redis.exists(keys.job(job_id))))


_JOB_KEYS = (keys.body, keys.job, keys.log, keys.result)
