"""The shutdown of a worker: running jobs get a grace period to end, and the rest are requeued."""

import asyncio
import logging
from signal import Signals

from worker.errors import Requeue
from worker.queue.running import RunningJobs
from worker.queue.services import wait_first

logger = logging.getLogger("sluice.queue")

_LAST_WRITES_S = 5.0  # for the last writes of a stopping worker, if Redis does not answer at once


class Shutdown:
    """Stops a worker at a signal. `stopping` is set by the first one: no more jobs are claimed. `force_stop` is set by
    the second one: the grace period ends early. Only `signal` sets them."""

    def __init__(self, jobs: RunningJobs, grace_s: float) -> None:
        """`grace_s`: seconds that running jobs may continue after the first signal."""
        self._jobs, self._grace_s = jobs, grace_s
        self.stopping, self.force_stop = asyncio.Event(), asyncio.Event()

    def signal(self, signum: Signals) -> None:
        """Start the shutdown at the first signal; end its grace period at the second."""
        name = Signals(signum).name
        if not self.stopping.is_set():
            logger.info("%s: stopping; %s", name, _plan(len(self._jobs), self._grace_s))
        elif not self.force_stop.is_set():
            logger.info("%s again: requeueing %s", name, _jobs(len(self._jobs)))
            self.force_stop.set()
        self.stopping.set()

    async def drain(self) -> None:
        """Wait for the running jobs until the grace period ends, requeue the rest, and wait for the last writes."""
        await wait_first(self._jobs.all_ended(), self.force_stop.wait(), timeout_s=self._grace_s)
        self._jobs.interrupt_all(Requeue)
        await wait_first(self._jobs.all_ended(), timeout_s=_LAST_WRITES_S)
        if left := len(self._jobs):
            logger.error("%d jobs could not be requeued: other workers take them over when their leases expire", left)


def _plan(running: int, grace_s: float) -> str:
    """Return the log text for the first signal: which jobs the worker waits for, and the effect of a second signal."""
    if not running:
        return "no job is running"
    if not grace_s:
        return f"requeueing {_jobs(running)}"
    return f"waiting up to {grace_s:g} s for {_jobs(running)}; a second signal requeues them at once"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"
