"""The arq worker: of arq we keep the wire format, the queue's sorted set and the functions; the rest is ours."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from signal import Signals
from typing import Any

from arq.connections import ArqRedis
from arq.worker import Function, Worker
from redis.exceptions import RedisError

from schemas import keys
from schemas.keys import Lane
from worker.errors import Cancelled, HandBack, OwnershipLost, Refusal
from worker.queue.channel import Publisher
from worker.queue.claims import Claim, Claims
from worker.queue.clock import ServerClock
from worker.queue.envelope import open_envelope
from worker.queue.job import Answer, Interruption, Job
from worker.queue.presence import Presence
from worker.queue.scripts import dumps
from worker.queue.wake import Listener
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")

_LAST_WORDS_S = 5.0  # for the last writes of a worker that leaves, should Redis be away just then


class QueueWorker(Worker):
    """Pulls jobs of both lanes while the engine has rows, and sees each to its one ending.

    arq's tries, timeout, results, abort and health check are off: a lease, an attempt that fences every write,
    and one final script stand in their place.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        *,
        redis: ArqRedis,
        settings: Settings,
        ctx: dict[Any, Any],
    ) -> None:
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
        self.settings, self.clock = settings, ServerClock()
        self.claims = Claims(
            redis,
            model,
            settings.worker_name,
            lease_s=settings.lease_s,
            most_bytes=settings.max_request_bytes,
        )
        self.publisher = Publisher(
            redis, self.clock, model, log_ttl_s=settings.log_ttl_s, result_ttl_s=settings.result_ttl_s
        )
        self.presence = Presence(redis, settings)
        self.listener = Listener(
            redis,
            model,
            keyspace_events=settings.keyspace_events,
            wake=self.wake,
            cancel=self.cancel,
            missed=self._cancel_missed,
        )
        self.jobs: dict[str, Job] = {}
        self._awake, self._stopping, self._hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()

    # The life of the worker

    async def main(self) -> None:
        """Until a signal; then what runs gets its grace, and what is left goes back to the queue."""
        await self._until_redis_answers(lambda: self.clock.sync(self.pool))
        async with asyncio.TaskGroup() as group:
            services = [group.create_task(service()) for service in (self.publisher.run, self.listener.run, self._keep)]
            await self._claim_until_stopping()
            await self._drain()
            for service in services:
                service.cancel()
        await self._leave()

    def handle_sig(self, signum: Signals) -> None:
        """The first signal starts the drain, a second one ends its grace."""
        if self._stopping.is_set():
            self._hurry.set()
        logger.info("%s: stopping, %d jobs running", Signals(signum).name, len(self.jobs))
        self._stopping.set()
        self.wake()

    def stop(self) -> None:
        self.handle_sig(signal.SIGTERM)

    def wake(self) -> None:
        self._awake.set()

    async def _claim_until_stopping(self) -> None:
        while not self._stopping.is_set():
            self._awake.clear()
            await self._until_redis_answers(self._poll_iteration)
            try:
                await asyncio.wait_for(self._awake.wait(), self.poll_delay_s)
            except TimeoutError:
                pass

    async def _until_redis_answers(self, call: Callable[[], Awaitable[None]]) -> None:
        waited = False
        while not self._stopping.is_set():
            try:
                await call()
            except (RedisError, OSError) as error:
                if not waited:
                    logger.warning("waiting for redis: %s", error)
                waited = True
                await asyncio.sleep(0.5)
            else:
                if waited:
                    logger.warning("redis is back")
                return

    async def _drain(self) -> None:
        either = [asyncio.create_task(self._all_ended()), asyncio.create_task(self._hurry.wait())]
        await asyncio.wait(either, timeout=self.settings.grace_s, return_when=asyncio.FIRST_COMPLETED)
        for task in either:
            task.cancel()
        for job in list(self.jobs.values()):
            job.interrupt(HandBack())
        await asyncio.wait([asyncio.create_task(self._all_ended())], timeout=_LAST_WORDS_S)
        if self.tasks:
            logger.error("%d jobs could not be handed back; others take them when the lease is out", len(self.tasks))

    async def _all_ended(self) -> None:
        while self.tasks:
            await asyncio.wait(list(self.tasks.values()))

    async def _leave(self) -> None:
        try:
            await self.presence.remove()
        except (RedisError, OSError):
            logger.info("redis is away: the worker's presence runs out by itself")

    async def _keep(self) -> None:
        """Leases and presence, three times a lease."""
        while True:
            try:
                held = [job.claim for job in self.jobs.values()]
                for claim in await self.claims.renew(held) if held else []:
                    self._interrupt(claim.job_id, OwnershipLost())
                await self.presence.show(rows=len(self.jobs))
                await self.clock.sync(self.pool)
            except (RedisError, OSError):
                pass  # the publisher and the claim loop say what they wait for
            await asyncio.sleep(self.settings.lease_s / 3)

    # From the queue to a running job

    async def _poll_iteration(self) -> None:
        for lane in keys.LANES:
            if (want := self._free_rows(lane)) > 0:
                for claim in await self.claims.take(lane, want):
                    self._start(claim)

    def _free_rows(self, lane: Lane) -> int:
        """Offline jobs leave the reserved rows free, so that an interactive one always finds a place."""
        free = self.max_jobs - len(self.jobs)
        return free if lane == "interactive" else free - self.settings.reserved_rows

    def _start(self, claim: Claim) -> None:
        log = self.publisher.open(claim, lost=lambda: self._interrupt(claim.job_id, OwnershipLost()))
        job = self.jobs[claim.job_id] = Job(claim, log)
        job.task = self.loop.create_task(self.run_job(claim.job_id, int(claim.queued_at * 1000)))
        self.tasks[claim.job_id] = job.task
        job.task.add_done_callback(lambda task: self._ended(claim.job_id, task))

    def _ended(self, job_id: str, task: asyncio.Task[None]) -> None:
        self.publisher.close(self.jobs.pop(job_id).log)
        del self.tasks[job_id]
        self.wake()
        task.result()  # run_job never raises; if it does, the loop's handler shows it

    async def run_job(self, job_id: str, score: int) -> None:
        """One claimed job to its one ending."""
        job = self.jobs[job_id]
        try:
            answer = await self._call(job)
            job.closing = True
        except asyncio.CancelledError:
            await self._end_badly(job, job.interruption or HandBack())
        except (Refusal, Cancelled) as why:
            await self._end_badly(job, why)
        except Exception:  # the border of a job: whatever a request sets off ends that request alone
            logger.exception("job %s failed", job_id)
            ours = Refusal("internal", "The worker failed on this job; its log says why.", retryable=True)
            await self._end_badly(job, ours)
        else:
            await self._finish(job, answer)

    async def _call(self, job: Job) -> Answer:
        if job.claim.cancelled:
            raise Cancelled("requested")
        function, request = open_envelope(job.claim, self.functions, self.settings.max_request_bytes)
        answer = await function.coroutine({**self.ctx, "job": job}, request)
        assert isinstance(answer, Answer), f"{function.name} must return an Answer"
        return answer

    async def _finish(self, job: Job, answer: Answer) -> None:
        await self._unless_lost(
            job,
            self.publisher.finish(
                job.log,
                "finished",
                dumps(answer.result),
                finish_reason=answer.finish_reason,
                usage=job.usage.as_event(),
                timings=answer.timings,
            ),
        )

    async def _end_badly(self, job: Job, why: Interruption) -> None:
        job.closing = True
        finish, usage = self.publisher.finish, job.usage.as_event()
        match why:
            case Refusal():
                error = {"type": why.type, "message": why.message, "retryable": why.retryable}
                logger.info("job %s failed: %s", job.claim.job_id, why.type)
                await self._unless_lost(job, finish(job.log, "failed", error=error, usage=usage))
            case Cancelled():
                logger.info("job %s cancelled: %s", job.claim.job_id, why.reason)
                await self._unless_lost(job, finish(job.log, "cancelled", reason=why.reason, usage=usage))
            case HandBack():
                await self._unless_lost(job, self._hand_back(job))
            case OwnershipLost():
                logger.warning("job %s is another worker's now", job.claim.job_id)

    async def _hand_back(self, job: Job) -> None:
        await self.publisher.settle(job.log)
        await self.claims.release(job.claim)
        logger.info("job %s handed back", job.claim.job_id)

    async def _unless_lost(self, job: Job, ending: Awaitable[None]) -> None:
        try:
            await ending
        except OwnershipLost:
            logger.warning("job %s is another worker's now", job.claim.job_id)

    # Cancellation

    async def cancel(self, job_id: str) -> None:
        """A running job of ours is interrupted, a waiting one is claimed only to end."""
        if job_id in self.jobs:
            self._interrupt(job_id, Cancelled("requested"))
            return
        for lane in keys.LANES:
            for claim in await self.claims.take(lane, 1, only=job_id):
                self._start(claim)

    async def _cancel_missed(self) -> None:
        running = list(self.jobs)
        wanted = await self.pool.mget([keys.cancel(job_id) for job_id in running]) if running else []
        for job_id, flag in zip(running, wanted, strict=True):
            if flag is not None:
                self._interrupt(job_id, Cancelled("requested"))

    def _interrupt(self, job_id: str, why: Interruption) -> None:
        if job := self.jobs.get(job_id):
            job.interrupt(why)
