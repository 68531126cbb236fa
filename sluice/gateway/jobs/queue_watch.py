"""The end of a wait for a queued job whose workers have gone."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from redis.exceptions import RedisError

from sluice.client import Client
from sluice.errors import SluiceError
from sluice.gateway.workers import POLL_S, Workers, no_worker
from sluice.transport.interruption import Interruption


class QueueWatch:
    """Checks waiting jobs. A job that starts before its first check costs a timer alone."""

    def __init__(self, client: Client, workers: Workers, no_worker_s: float) -> None:
        self._client, self._workers = client, workers
        self._no_worker_s = no_worker_s
        self._every_s = max(POLL_S, no_worker_s / 4)

    @contextmanager
    def watching(self, job_id: str) -> Iterator[None]:
        """Interrupt the block with `ApiError` 503, and cancel the job, if it waits in its queue and its model has been
        without a worker for `no_worker_s` seconds. Also raises the errors of that cancellation."""
        with Interruption() as block, ExitStack() as stack:

            def begin() -> None:
                stack.callback(asyncio.create_task(self._watch(job_id, block)).cancel)

            stack.callback(asyncio.get_running_loop().call_later(self._every_s, begin).cancel)
            yield

    async def _watch(self, job_id: str, block: Interruption) -> None:
        absent_since = float("inf")
        while True:
            model = await self._unserved_model(job_id)
            absent_since = min(absent_since, time.monotonic()) if model else float("inf")
            if model and time.monotonic() - absent_since >= self._no_worker_s:
                return block.interrupt(await self._cancel(job_id, model))
            await asyncio.sleep(self._every_s)

    async def _unserved_model(self, job_id: str) -> str | None:
        """Return the model of a job that waits for a worker that does not exist, else None."""
        try:
            model = await self._client.waits_for(job_id)
            return model if model and not await self._workers.is_served(model) else None
        except (SluiceError, RedisError):
            return None  # an outage or a refusal, which the block itself meets

    async def _cancel(self, job_id: str, model: str) -> Exception:
        """Cancel the job, and return the error for its client."""
        try:
            await self._client.cancel(job_id)
        except (SluiceError, RedisError) as error:
            return error
        return no_worker(model)
