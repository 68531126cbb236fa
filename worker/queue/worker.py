"""The queue worker: wire format, sorted-set queue and functions are arq's; claims, leases and endings are ours."""

import asyncio
import logging
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from signal import Signals
from typing import Any

from arq.connections import ArqRedis
from arq.worker import Function, Worker
from redis.exceptions import RedisError

from schemas import keys
from schemas.keys import Lane
from worker.bounded_json.reader import Reader
from worker.errors import Cancelled, JobFailure, OwnershipLost, Requeue
from worker.json_bytes import dumps, dumps_with_items
from worker.monitoring.heartbeat import Heartbeat
from worker.monitoring.metrics import Metrics
from worker.queue.cancel_backlog import CancelBacklog
from worker.queue.cron import Cron
from worker.queue.drain import drain, drain_message, jobs_text
from worker.queue.job.channel import Publisher
from worker.queue.job.claims import Claim, Claims
from worker.queue.job.endings import MAX_CRASHES, POISON_JOB, Endings
from worker.queue.job.envelope import open_envelope
from worker.queue.job.job import Interruption, Job, JobResult
from worker.queue.job.lease import LeaseKeeper
from worker.queue.job.takeover import Takeover
from worker.queue.presence import Presence
from worker.queue.rows import free_rows
from worker.queue.server.check import ServerCheck, uptime_s
from worker.queue.server.clock import ServerClock
from worker.queue.server.outage import until_redis_answers
from worker.queue.server.readiness import Readiness
from worker.queue.services import running_services
from worker.queue.wake import ControlListener
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")


class QueueWorker(Worker):
    """Claims jobs of both lanes while rows are free, and brings each to exactly one ending.

    arq's retries, timeout, results, abort and health check are disabled; a lease, an attempt number that fences every
    write, and one final script replace them.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        redis: ArqRedis,
        settings: Settings,
        ctx: dict[Any, Any],
        metrics: Metrics,
        crons: Sequence[Cron] = (),
        clock: ServerClock | None = None,
        heartbeats: Sequence[Heartbeat] = (),
        hold: Callable[[bool], None] = lambda on: None,
        reader: Reader | None = None,
        check: ServerCheck | None = None,
        images: bool = False,
    ) -> None:
        """`crons` are not jobs: they take no row, and no client can enqueue one. `heartbeats`: heartbeats of further
        threads to watch. `hold`: see `Publisher`. `images`: True if the model accepts images."""
        model = settings.model_name
        super().__init__(
            functions,
            queue_name=keys.queue(model, "interactive"),
            redis_pool=redis,
            ctx=ctx,
            max_jobs=settings.max_rows,
            poll_delay=settings.poll_s,
            keep_result=0,
            retry_jobs=False,
            allow_abort_jobs=False,
            job_serializer=dumps,
        )
        self.settings, self.clock, self._crons = settings, clock or ServerClock(), crons
        self.jobs: dict[str, Job] = {}
        self.claims = Claims(redis, settings)
        self.publisher = Publisher(redis, self.clock, settings, hold)
        self._metrics, self._reader = metrics, reader or Reader()
        self.endings = Endings(self.publisher, self.claims, model, metrics)
        self.presence = Presence(redis, settings, self.clock, images=images)
        self._cancels = CancelBacklog(self.cancel, self.claims)
        self.listener = ControlListener(
            redis,
            model,
            keyspace_events=settings.keyspace_events,
            wake=self.wake,
            cancel=self._cancels.add,
            on_reconnect=lambda: self._interrupt_cancelled(list(self.jobs)),
        )
        self.heartbeat = Heartbeat("event loop")
        self.leases = LeaseKeeper(settings, self._running_claims, self._on_lease_lost, [self.heartbeat, *heartbeats])
        self._wake, self.stopping, self.force_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()
        # Much shorter than a lease, so that a dead worker's jobs wait hardly longer than for their leases.
        self._sweep_s = min(self.poll_delay_s, max(0.1, settings.lease_s / 20))
        self._swept_at = 0.0  # monotonic
        self._check, self._server_checked = check or ServerCheck(redis, settings), False
        self.readiness = Readiness(self._sweep_s)
        self._takeover = Takeover(settings.lease_s)

    # The life of the worker

    async def main(self) -> None:
        """Run until a signal, give running jobs `grace_s` seconds to end, requeue the rest. Raises `CannotStart`."""
        if not await self.connect():
            return
        self.leases.start()
        try:
            services = self.publisher.run, self.listener.run, self._cancels.run
            async with running_services(*services, self._refresh_presence, self.heartbeat.keep_beating):
                await self._claim_until_stopping()
                await self._requeue_lost_claims()
                await drain(self.jobs.values, self.settings.grace_s, self.force_stop)
        finally:
            self.leases.stop()
        await self._remove_presence()

    async def connect(self) -> bool:
        """Wait for Redis and check it. Returns False if the worker is stopped first. Raises `CannotStart`."""
        if not self._server_checked:
            self._server_checked = await until_redis_answers(self._check_server, self.stopping)
        return self._server_checked

    def handle_sig(self, signum: Signals) -> None:
        """Start the drain at the first signal; end its grace period at the second."""
        name = Signals(signum).name
        if not self.stopping.is_set():
            logger.info("%s: stopping; %s", name, drain_message(len(self.jobs), self.settings.grace_s))
        elif not self.force_stop.is_set():
            logger.info("%s again: requeueing %s", name, jobs_text(len(self.jobs)))
            self.force_stop.set()
        self.stopping.set()
        self.readiness.drain()
        self.wake()

    def stop(self) -> None:
        """Start the drain, as at SIGTERM."""
        self.handle_sig(signal.SIGTERM)

    def wake(self) -> None:
        """Claim jobs at once instead of at the next poll."""
        self._wake.set()

    async def _check_server(self) -> None:
        await self._check.run()
        await self.clock.sync(self.pool)
        self._takeover.record_first_answer(await uptime_s(self.pool))
        self.readiness.record_answer()

    async def _claim_until_stopping(self) -> None:
        while not self.stopping.is_set():
            self._wake.clear()
            await until_redis_answers(self._poll_iteration, self.stopping)
            try:
                await asyncio.wait_for(self._wake.wait(), self._sweep_s)
            except TimeoutError:
                pass

    async def _requeue_lost_claims(self) -> None:
        """Requeue claims whose reply was lost; their jobs would wait for their leases, and then count as suspects."""
        try:
            for lane in keys.LANES:
                for claim in await self._claim_jobs(lane, 0):
                    await self._begin(claim)
        except (RedisError, OSError):
            pass  # then the leases expire

    async def _remove_presence(self) -> None:
        try:
            await self.presence.remove()
        except (RedisError, OSError):
            logger.info("redis does not answer: the worker's presence expires with its lease")

    async def _refresh_presence(self) -> None:
        """Refresh presence and clock, three times per lease."""
        while True:
            try:
                running = Counter(job.claim.lane for job in self.jobs.values())
                for lane, jobs in (await self.presence.publish(running)).items():
                    self._metrics.set_waiting(lane, jobs)
                await self.clock.sync(self.pool)
            except (RedisError, OSError):
                pass  # the publisher and the claim loop log an outage
            await asyncio.sleep(self.settings.lease_s / 3)

    # From the queue to a running job

    async def _poll_iteration(self) -> None:
        """Claim a job for every free row. Every `_sweep_s` seconds also claim jobs past their deadline, check the
        cancel keys of running jobs, and run the crons that are due."""
        sweep = time.monotonic() - self._swept_at >= self._sweep_s
        for lane in keys.LANES:
            limit = max(0, free_rows(lane, self._running_claims(), self.settings, self.clock.utc()))
            if limit or sweep or self.claims.needs_reconcile(lane):
                claimed = await self._claim_jobs(lane, limit)
                self._takeover.record_answer()
                self.readiness.record_answer()
                for claim in claimed:
                    await self._begin(claim)
                # A cancellation that arrived before the claim's reply found no job to interrupt.
                await self._interrupt_cancelled([claim.job_id for claim in claimed])
            if self.claims.needs_reconcile(lane):
                self.wake()
        if sweep:
            await self._interrupt_cancelled(list(self.jobs))
            self._swept_at = time.monotonic()
            await self.heart_beat()

    async def heart_beat(self) -> None:
        """Run the crons that are due. Overrides arq's method, which would enqueue a job for each slot."""
        for job in self._crons:
            await job.run_if_due(self.pool, self.settings.worker_name, self.clock.utc())

    async def _claim_jobs(self, lane: Lane, limit: int) -> list[Claim]:
        return await self.claims.take(
            lane,
            limit,
            running=self._running_claims(),
            suspects=sum(job.on_probation for job in self.jobs.values()),
            takeover=self._takeover.allowed(),
        )

    def _running_claims(self) -> list[Claim]:
        return [job.claim for job in list(self.jobs.values())]

    async def _begin(self, claim: Claim) -> None:
        if claim.job_id not in self.jobs:
            self._start(claim)
            return
        # Our own job, claimed again after its lease had expired: the running attempt has lost it, so requeue it.
        self._interrupt(claim.job_id, OwnershipLost())
        try:
            await self.claims.release(claim)
        except (RedisError, OSError):
            pass  # then its lease expires

    def _start(self, claim: Claim) -> None:
        queue_s = claim.age_s(self.clock.now())
        self._metrics.claimed(claim.lane, queue_s=queue_s, lease_expirations=claim.lease_expirations)
        log = self.publisher.open(claim, on_lost=lambda: self._interrupt(claim.job_id, OwnershipLost()))
        job = self.jobs[claim.job_id] = Job(
            claim, log, on_probation=claim.lease_expirations > 0, on_probation_end=self.wake
        )
        job.task = self.loop.create_task(self.run_job(claim.job_id, int(claim.queued_at * 1000)))
        self.tasks[claim.job_id] = job.task
        job.task.add_done_callback(lambda task: self._ended(claim.job_id, task))

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        job = self.jobs.pop(job_id)
        self.publisher.close(job.log)
        self._metrics.released(job.claim.lane)
        del self.tasks[job_id]
        self.presence.job_ended()
        self.wake()
        task.result()  # run_job does not raise; if it does, the loop's exception handler logs it

    async def run_job(self, job_id: str, score: int) -> None:
        """Run a claimed job to its one ending. Does not raise."""
        job = self.jobs[job_id]
        try:
            await self._load_log(job)
            job.begin()
            answer = await self._call(job)
            result = dumps_with_items(answer.result)
            job.is_ending = True
        except asyncio.CancelledError:
            await self.endings.end(job, job.interruption or Requeue())
        except (JobFailure, Cancelled, Requeue, OwnershipLost) as why:
            await self.endings.end(job, why)
        except Exception:  # the border of a job: an error in one request ends that request alone
            logger.exception("job %s failed", job_id)
            failure = JobFailure("internal", "The worker failed on this job; its log says why.", retryable=True)
            await self.endings.end(job, failure)
        else:
            await self.endings.finish(job, answer, result)

    async def _load_log(self, job: Job) -> None:
        async def read() -> None:
            events: list[bytes] = await self.pool.lrange(keys.log(job.claim.job_id), 0, -1)  # type: ignore[misc]
            job.log.load(events)

        if job.claim.events and not await until_redis_answers(read, self.stopping):
            raise Requeue

    async def _call(self, job: Job) -> JobResult:
        if job.claim.cancelled:
            raise Cancelled("requested")
        if job.claim.expired:
            raise JobFailure("deadline", "The job's deadline passed while it waited in the queue.", retryable=True)
        body, most_bytes = await self._body(job.claim), self.settings.max_request_bytes
        function, request = await open_envelope(job.claim, body, self._reader, self.functions, most_bytes)
        if job.claim.crashes >= MAX_CRASHES:
            job.keep_body(body)
            raise POISON_JOB
        del body  # a large one would stay in memory until the job ends
        answer = await function.coroutine({**self.ctx, "job": job}, request)
        assert isinstance(answer, JobResult), f"{function.name} must return a JobResult"
        return answer

    async def _body(self, claim: Claim) -> bytes:
        body = claim.body

        async def fetch() -> None:
            nonlocal body
            body = await self.claims.body(claim)

        if not body and claim.body_bytes and not await until_redis_answers(fetch, self.stopping):
            raise Requeue
        return body

    # Interruption

    def cancel(self, job_id: str) -> bool:
        """Interrupt a running job. Returns False if it does not run on this worker."""
        self._interrupt(job_id, Cancelled("requested"))
        return job_id in self.jobs

    async def _interrupt_cancelled(self, running: Sequence[str]) -> None:
        """Interrupt the jobs that have a cancel key: the message on the channel may be late or lost."""
        wanted = await self.pool.mget([keys.cancel(job_id) for job_id in running]) if running else []
        for job_id, flag in zip(running, wanted, strict=True):
            if flag is not None:
                self._interrupt(job_id, Cancelled("requested"))

    def _interrupt(self, job_id: str, why: Interruption) -> None:
        if job := self.jobs.get(job_id):
            job.interrupt(why)

    def _on_lease_lost(self, claim: Claim) -> None:
        """Interrupt a job that another attempt owns. Called on the lease keeper's thread."""
        try:
            self.loop.call_soon_threadsafe(self._interrupt_lost, claim)
        except RuntimeError:
            pass  # the loop has closed: there is nothing left to stop

    def _interrupt_lost(self, claim: Claim) -> None:
        job = self.jobs.get(claim.job_id)
        if job is not None and job.claim is claim:
            job.interrupt(OwnershipLost())
