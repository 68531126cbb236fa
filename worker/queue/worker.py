"""The queue worker: arq's wire format, queue and functions, with claims, leases and endings of our own."""

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from signal import Signals

from arq.worker import Worker

from schemas import keys
from worker.json_bytes import dumps
from worker.monitoring.heartbeat import Heartbeat
from worker.monitoring.sink import MetricsSink
from worker.queue.cancel_backlog import CancelBacklog
from worker.queue.cancel_keys import CancelKeys
from worker.queue.cron import Cron, Crons
from worker.queue.job.channel import Publisher
from worker.queue.job.claims import Claims
from worker.queue.job.endings import Endings
from worker.queue.job.functions import JobFunctions
from worker.queue.job.lease import LeaseKeeper
from worker.queue.job.runner import JobRunner
from worker.queue.pickup import Pickup
from worker.queue.presence import Abilities, Presence
from worker.queue.running import RunningJobs
from worker.queue.server.outage import until_redis_answers
from worker.queue.server.redis_server import RedisServer
from worker.queue.services import run_with_services
from worker.queue.shutdown import Shutdown
from worker.queue.unclaimed import UnclaimedQueues
from worker.queue.wake import ControlListener
from worker.settings import Settings


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that the jobs run on, as far as the queue is concerned."""

    set_paused: Callable[[bool], None] = lambda on: None  # pauses it while too many events wait, see `Publisher`
    heartbeats: Sequence[Heartbeat] = ()  # of its threads; the process ends if one stalls
    abilities: Abilities = field(default_factory=Abilities)
    step_times: Callable[[], Sequence[float]] = tuple  # as `StepTimes.seconds` returns them


class QueueWorker(Worker):
    """Claims jobs of both lanes while rows are free, and brings each to exactly one ending.

    arq's retries, timeout, results and health check are disabled, and its abort is a cancellation; a lease, an attempt
    number that fences every write, and one final script replace them. The worker itself only connects its parts:

    - `Pickup` claims jobs, and wakes and polls for that
    - `RunningJobs` owns the jobs that run here; `JobRunner` brings each to its ending
    - `ControlListener`, `CancelBacklog` and `CancelKeys` receive wake-ups and cancellations
    - `LeaseKeeper` renews the leases, `Presence` publishes that the worker is alive
    - `Shutdown` drains the worker at a signal
    """

    def __init__(
        self,
        functions: JobFunctions,
        *,
        server: RedisServer,
        settings: Settings,
        metrics: MetricsSink,
        model: ServedModel | None = None,
        crons: Sequence[Cron] = (),
    ) -> None:
        """`crons` are not jobs: they take no row, and no client can enqueue one."""
        super().__init__(
            functions.all,
            queue_name=keys.queue(settings.model_name, "interactive"),
            redis_pool=server.client,
            ctx=functions.ctx,
            max_jobs=settings.max_rows,
            poll_delay=settings.poll_s,
            keep_result=0,
            retry_jobs=False,
            allow_abort_jobs=False,
            job_serializer=dumps,
        )
        model = model or ServedModel()
        redis, claims = server.client, Claims(server.client, settings)
        publisher = Publisher(redis, server.clock, settings, model.set_paused)
        self.jobs = RunningJobs(publisher, metrics, run=self.run_job, wake=self.wake)
        self.shutdown = Shutdown(self.jobs, settings.grace_s)
        endings = Endings(publisher, claims, settings.model_name, metrics)
        self._runner = JobRunner(
            redis, functions, claims, endings, max_bytes=settings.max_request_bytes, stopping=self.shutdown.stopping
        )
        cancel_keys, cancels = CancelKeys(redis, self.jobs), CancelBacklog(self.jobs.cancel, claims)
        self._pickup = Pickup(
            server, settings, claims, self.jobs, cancel_keys, cancels, self.shutdown.stopping, model.step_times
        )
        self.readiness = self._pickup.readiness
        listener = ControlListener(
            redis,
            settings.model_name,
            keyspace_events=settings.keyspace_events,
            wake=self.wake,
            cancel=cancels.add,
            on_reconnect=cancel_keys.check_all,
        )
        self._crons = Crons(crons, server, settings.worker_name)
        self._presence = Presence(redis, settings, server.clock, model.abilities, self.shutdown.stopping)
        publish_presence = partial(self._presence.run, self.jobs, metrics.set_waiting)
        self.heartbeat = Heartbeat("event loop")
        heartbeats = [self.heartbeat, *model.heartbeats]
        self._leases = LeaseKeeper(settings, self.jobs.claims, self.jobs.ownership_lost, heartbeats)
        unclaimed = UnclaimedQueues(redis, settings.model_name).run
        self._services = (
            publisher.run,
            listener.run,
            cancels.run,
            publish_presence,
            self.heartbeat.keep_beating,
            unclaimed,
        )

    async def main(self) -> None:
        """Run until a signal, give running jobs `grace_s` seconds to end, requeue the rest. Raises `CannotStart`."""
        if not await self.connect():
            return
        self._leases.start()
        try:
            await run_with_services(self._run_jobs(), *self._services)
        finally:
            self._leases.stop()
        await self._presence.remove()

    async def _run_jobs(self) -> None:
        """Claim and run jobs until the worker is stopped and its last job has ended."""
        await self._pickup.run(self._poll_iteration)
        await self._pickup.requeue_lost_claims()
        await self.shutdown.drain()

    async def connect(self) -> bool:
        """Wait for Redis and check it. Returns False if the worker is stopped first. Raises `CannotStart`."""
        take_name = partial(self.readiness.watch, partial(self._presence.take_name, self.jobs))
        return await self._pickup.connect() and await until_redis_answers(take_name, self.shutdown.stopping)

    def handle_sig(self, signum: Signals) -> None:
        """Start the drain at the first signal; end its grace period at the second."""
        self.shutdown.signal(signum)
        self.readiness.drain()
        self.wake()

    def stop(self) -> None:
        """Start the drain, as at SIGTERM."""
        self.handle_sig(signal.SIGTERM)

    def wake(self) -> None:
        """Claim jobs at once instead of at the next poll."""
        self._pickup.wake()

    async def run_job(self, job_id: str, score: int) -> None:
        """Run a claimed job to its one ending. Does not raise."""
        await self._runner.run(self.jobs[job_id])
        self._presence.job_ended()

    async def _poll_iteration(self) -> None:
        """Claim a job for every free row, and at each sweep run the crons that are due."""
        if await self._pickup.poll():
            await self.heart_beat()

    async def heart_beat(self) -> None:
        """Run the crons that are due. Overrides arq's method, which would enqueue a job for each slot."""
        await self._crons.run_due()
