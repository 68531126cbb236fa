"""Requests to cancel jobs: running ones are interrupted at once, waiting ones are cancelled in Redis in batches."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.contract import keys
from sluice.contract.scripts import source
from worker.queue.running import RunningJobs
from worker.queue.scripts import JOB_LIFE_MS, script
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

_BATCH = 500  # ids in one call of the script: about 1 ms of the server's time
_MAX_PENDING = 10_000  # further ids are dropped: a job among them ends when it is claimed, by its key `sluice:cancel`
_RETRY_S = 0.2


class CancelRequests:
    """Ends the jobs of one model that a client, or arq's `Job.abort`, asks to end.

    A cancel key is set before the message on the channel, which may be late or lost: `check` finds it. Any client may
    publish ids, and most jobs run elsewhere, so `add` does not call Redis.
    """

    def __init__(self, redis: Redis, settings: Settings, jobs: RunningJobs) -> None:
        self._redis, self._jobs = redis, jobs
        self._queues = [keys.queue(settings.model_name, lane) for lane in keys.LANES]
        self._find_waiting = script(redis, "waiting")
        self._cancel = redis.register_script(source("cancel"))
        self._find_aborted = script(redis, "aborted")
        self._log_ttl_ms, self._result_ttl_ms = settings.log_ttl_s * 1000, settings.result_ttl_s * 1000
        self._pending: dict[str, None] = {}  # in order of arrival
        self._added = asyncio.Event()

    async def check_running(self) -> None:
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

    def add(self, job_id: str) -> None:
        """Interrupt the job if it runs here; else store its id for `run`. Drops ids that break the contract."""
        if self._jobs.cancel(job_id) or not keys.is_job_id(job_id) or len(self._pending) >= _MAX_PENDING:
            return
        self._pending[job_id] = None
        self._added.set()

    async def add_aborted(self) -> None:
        """Add the jobs in the model's queues that arq's `Job.abort` asks to end; they may be running, here or on
        another worker. Raises RedisError, OSError."""
        self._add_all(_ids(await self._find_aborted(keys=self._queues)))

    async def run(self) -> None:
        """Cancel stored jobs that wait in the queue, until this task is cancelled."""
        while True:
            await self._added.wait()
            ids = self._next_batch()
            try:
                for job_id in await self.find_waiting(ids):
                    if await self.cancel_waiting(job_id):
                        logger.info("job %s cancelled in the queue", job_id)
            except (RedisError, OSError):
                self._add_all(ids)
                await asyncio.sleep(_RETRY_S)

    def _next_batch(self) -> list[str]:
        """Remove up to `_BATCH` ids from those stored. Interrupts jobs that run here now, and returns the other ids."""
        ids = list(islice(self._pending, _BATCH))
        for job_id in ids:
            del self._pending[job_id]
        if not self._pending:
            self._added.clear()
        return [job_id for job_id in ids if not self._jobs.cancel(job_id)]

    def _add_all(self, ids: Iterable[str]) -> None:
        for job_id in ids:
            self.add(job_id)

    async def find_waiting(self, job_ids: Collection[str]) -> list[str]:
        """Return the ids that are in one of the model's queues; their jobs may be running, here or on another worker.
        Raises RedisError, OSError."""
        return _ids(await self._find_waiting(keys=self._queues, args=list(job_ids))) if job_ids else []

    async def cancel_waiting(self, job_id: str) -> bool:
        """Cancel a job that waits in one of the model's queues. Returns False if it does not wait there. Raises
        RedisError, OSError."""
        (outcome,) = await self._cancel(
            keys=self._queues,
            args=[job_id, JOB_LIFE_MS, self._log_ttl_ms, self._result_ttl_ms, "", ""],
        )
        return bool(outcome == b"cancelled")


def _ids(found: Iterable[bytes]) -> list[str]:
    return [job_id.decode("utf-8", "surrogateescape") for job_id in found]
