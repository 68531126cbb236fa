"""The cancel keys of running jobs. They are set before the message on the channel, which may be late or lost."""

from collections.abc import Sequence

from redis.asyncio import Redis

from schemas import keys
from worker.queue.running import RunningJobs


class CancelKeys:
    """Finds the running jobs that have a cancel key, and interrupts them."""

    def __init__(self, redis: Redis, jobs: RunningJobs) -> None:
        self._redis, self._jobs = redis, jobs

    async def check_all(self) -> None:
        """Interrupt the running jobs that have a cancel key. Raises RedisError, OSError."""
        await self.check(self._jobs.ids())

    async def check(self, job_ids: Sequence[str]) -> None:
        """Interrupt those of the jobs that have a cancel key. Raises RedisError, OSError."""
        if not job_ids:
            return
        values = await self._redis.mget([keys.cancel(job_id) for job_id in job_ids])
        for job_id, value in zip(job_ids, values, strict=True):
            if value is not None:
                self._jobs.cancel(job_id)
