"""The jobs that this worker runs, each from its claim to the end of its task."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from sluice.contract.keys import Lane
from worker.errors import Cancelled, OwnershipLost
from worker.monitoring.sink import MetricsSink
from worker.queue.job.channel import Publisher
from worker.queue.job.claims import Claim
from worker.queue.job.job import Interruption, Job

_RATE_OVER_S = 60.0


class RunningJobs:
    """Starts jobs, interrupts them, and forgets each when its task ends. Create it while the event loop runs.

    All methods are for the event loop's thread, except `claims` and `ownership_lost`.
    """

    def __init__(
        self,
        publisher: Publisher,
        metrics: MetricsSink,
        *,
        run: Callable[[Job], Coroutine[Any, Any, None]],
        wake: Callable[[], None],
    ) -> None:
        """`run` brings a job to its ending, and does not raise. `wake` is called when a job may be claimed in place of
        one that has ended or has left its probation."""
        self._publisher, self._metrics = publisher, metrics
        self._run, self._wake = run, wake
        self._loop = asyncio.get_running_loop()
        self._jobs: dict[str, Job] = {}
        self._ended_at = deque[float]()  # monotonic, of the last `_RATE_OVER_S`

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._jobs

    def __getitem__(self, job_id: str) -> Job:
        return self._jobs[job_id]

    def start(self, claim: Claim) -> None:
        """Start the task of a claimed job. Its id must not be running."""

        def lost() -> None:
            self.interrupt(claim.job_id, OwnershipLost())

        log = self._publisher.open(claim, on_lost=lost)
        self._metrics.claimed(
            claim.lane, queue_s=claim.age_s(log.clock.now()), lease_expirations=claim.lease_expirations
        )
        on_probation = claim.lease_expirations > 0
        job = Job(claim, log, on_probation=on_probation, on_probation_end=self._wake)
        self._jobs[claim.job_id] = job
        job.start(self._loop, self._run(job)).add_done_callback(partial(self._ended, claim.job_id))

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        job = self._jobs.pop(job_id)
        self._publisher.close(job.log)
        self._metrics.released(job.claim.lane)
        self._ended_at.append(time.monotonic())
        self._wake()
        task.result()  # `run` does not raise; if it does, the loop's exception handler logs it

    def interrupt(self, job_id: str, why: Interruption) -> bool:
        """Interrupt a job. Returns False if it does not run here."""
        job = self._jobs.get(job_id)
        if job is not None:
            job.interrupt(why)
        return job is not None

    def interrupt_all(self, why: Callable[[], Interruption]) -> None:
        """Interrupt every job, each with a reason of its own."""
        for job in list(self._jobs.values()):
            job.interrupt(why())

    def cancel(self, job_id: str) -> bool:
        """Interrupt a job whose client asked for it. Returns False if it does not run here."""
        return self.interrupt(job_id, Cancelled("requested"))

    def ownership_lost(self, claim: Claim) -> None:
        """Interrupt the job of a claim that another attempt has replaced. For any thread."""
        try:
            self._loop.call_soon_threadsafe(self._interrupt_lost, claim)
        except RuntimeError:
            pass  # the loop has closed: there is nothing left to stop

    def _interrupt_lost(self, claim: Claim) -> None:
        job = self._jobs.get(claim.job_id)
        if job is not None and job.claim is claim:
            job.interrupt(OwnershipLost())

    def ids(self) -> list[str]:
        """Return the ids of the running jobs."""
        return list(self._jobs)

    def claims(self) -> list[Claim]:
        """Return the claims of the running jobs. For any thread."""
        return [job.claim for job in list(self._jobs.values())]

    def by_lane(self) -> Counter[Lane]:
        """Return the number of running jobs by lane, token counts included."""
        return Counter(job.claim.lane for job in self._jobs.values())

    def rows(self) -> int:
        """Return the number of running jobs that take a row: all but token counts."""
        return sum(not job.claim.is_count for job in self._jobs.values())

    def suspects(self) -> int:
        """Return the number of running jobs that are on probation."""
        return sum(job.on_probation for job in self._jobs.values())

    def per_s(self) -> float:
        """Return the jobs that ended in a second, over the last minute; clients estimate from it how long a full queue
        takes to drain."""
        since = time.monotonic() - _RATE_OVER_S
        while self._ended_at and self._ended_at[0] < since:
            self._ended_at.popleft()
        return len(self._ended_at) / _RATE_OVER_S

    async def all_ended(self) -> None:
        """Wait until no job runs."""
        while tasks := [job.task for job in self._jobs.values() if job.task is not None]:
            await asyncio.wait(tasks)
