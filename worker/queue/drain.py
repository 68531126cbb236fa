"""The drain of a worker: running jobs get a grace period to end, and the rest are requeued."""

import asyncio
import logging
from collections.abc import Callable, Collection

from worker.errors import Requeue
from worker.queue.job.job import Job

logger = logging.getLogger("sluice.queue")

_LAST_WRITES_S = 5.0  # for the last writes of a stopping worker, if Redis does not answer at once


def jobs_text(count: int) -> str:
    """Return the number of jobs in words, such as "1 job"."""
    return "1 job" if count == 1 else f"{count} jobs"


def drain_message(running: int, grace_s: float) -> str:
    """Return the log text for the first signal: which jobs the worker waits for, and the effect of a second signal."""
    if not running:
        return "no job is running"
    if not grace_s:
        return f"requeueing {jobs_text(running)}"
    return f"waiting up to {grace_s:g} s for {jobs_text(running)}; a second signal requeues them at once"


async def drain(jobs: Callable[[], Collection[Job]], grace_s: float, force_stop: asyncio.Event) -> None:
    """Wait up to `grace_s` seconds for running jobs, requeue the rest, and wait for the last writes.

    `jobs` returns the jobs that have not ended; `force_stop` ends the grace period early.
    """
    either = [asyncio.create_task(_all_ended(jobs)), asyncio.create_task(force_stop.wait())]
    await asyncio.wait(either, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for task in either:
        task.cancel()
    for job in list(jobs()):
        job.interrupt(Requeue())
    await asyncio.wait([asyncio.create_task(_all_ended(jobs))], timeout=_LAST_WRITES_S)
    if left := jobs():
        logger.error("%d jobs could not be requeued: other workers take them over when their leases expire", len(left))


async def _all_ended(jobs: Callable[[], Collection[Job]]) -> None:
    while tasks := [job.task for job in jobs() if job.task is not None]:
        await asyncio.wait(tasks)
