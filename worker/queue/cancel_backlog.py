"""Cancel requests: running jobs are interrupted at once, waiting ones are cancelled in Redis in batches."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import islice

from redis.exceptions import RedisError

from schemas import keys
from worker.queue.job.claims import Claims

logger = logging.getLogger("sluice.queue")

_BATCH = 500  # ids in one call of the script: about 1 ms of the server's time
_MAX_PENDING = 10_000  # further ids are dropped: a job among them ends when it is claimed, by its key `sluice:cancel`
_RETRY_S = 0.2


class CancelBacklog:
    """Ids of jobs to cancel. Any client may publish them, and most jobs run elsewhere, so `add` does not call Redis."""

    def __init__(self, cancel_running: Callable[[str], bool], claims: Claims) -> None:
        """`cancel_running` interrupts a job that this worker runs, and returns False for any other."""
        self._cancel_running, self._claims = cancel_running, claims
        self._pending: dict[str, None] = {}  # in order of arrival
        self._added = asyncio.Event()

    def add(self, job_id: str) -> None:
        """Interrupt the job if it runs here; else store its id for `run`. Drops ids that break the contract."""
        if self._cancel_running(job_id) or not keys.is_job_id(job_id) or len(self._pending) >= _MAX_PENDING:
            return
        self._pending[job_id] = None
        self._added.set()

    async def add_aborted(self) -> None:
        """Add the jobs that arq's `Job.abort` asks to end. Raises RedisError, OSError."""
        self._add_all(await self._claims.find_aborted())

    async def run(self) -> None:
        """Cancel stored jobs that wait in the queue, until this task is cancelled."""
        while True:
            await self._added.wait()
            ids = self._next_batch()
            try:
                await self._cancel_waiting(ids)
            except (RedisError, OSError):
                self._add_all(ids)
                await asyncio.sleep(_RETRY_S)

    def _next_batch(self) -> list[str]:
        """Remove up to `_BATCH` ids from the backlog. Interrupts jobs that run here now, and returns the other ids."""
        ids = list(islice(self._pending, _BATCH))
        for job_id in ids:
            del self._pending[job_id]
        if not self._pending:
            self._added.clear()
        return [job_id for job_id in ids if not self._cancel_running(job_id)]

    def _add_all(self, ids: Iterable[str]) -> None:
        for job_id in ids:
            self.add(job_id)

    async def _cancel_waiting(self, ids: list[str]) -> None:
        for job_id in await self._claims.find_waiting(ids):
            if await self._claims.cancel_waiting(job_id):
                logger.info("job %s cancelled in the queue", job_id)
