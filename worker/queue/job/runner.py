"""Runs one claimed job: reads its log and body, calls its function, and brings it to its one ending."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from arq.worker import Function
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.contract import keys
from sluice.contract.events import parse_event
from sluice.tracing import JobTrace
from worker.bounded_json.reader import BodyReader
from worker.errors import CancelJob, JobFailure, OwnershipLost, Requeue
from worker.json_bytes import dumps, dumps_with_items
from worker.monitoring.sink import MetricsSink
from worker.queue.job.claims import Claim, Claims
from worker.queue.job.job import Job, JobInterruption, JobResult
from worker.queue.job.publisher import Publisher
from worker.queue.redis_server import until_redis_answers
from worker.settings import Settings

logger = logging.getLogger("sluice.queue")


class JobFunctions:
    """The functions that a job can name, as arq registers them, the context that they share, and the reader of the
    bodies that name them: arq's `{t, f, a, k, et}`, as JSON, with one argument."""

    def __init__(self, functions: Sequence[Function], ctx: dict[Any, Any], reader: BodyReader | None = None) -> None:
        """`ctx`: their first argument, as arq passes it. Each call gets a copy, with the running `Job` as its "job"."""
        self._ctx = ctx
        self._by_name = {function.name: function for function in functions}
        self._reader = reader or BodyReader()

    async def open(self, claim: Claim, body: bytes, max_bytes: int) -> Callable[[Job], Awaitable[JobResult]]:
        """Return the call that a body asks for, which is made by passing it the job. Nothing in the body is executed.
        Raises `JobFailure`."""
        if not keys.is_job_id(claim.job_id):
            raise JobFailure("invalid_request", f"A job id must match {keys.JOB_ID}.")
        if claim.body_bytes > max_bytes:
            raise JobFailure("too_large", f"The job is {claim.body_bytes:,} bytes; this worker accepts {max_bytes:,}.")
        if not body:
            raise JobFailure(
                "invalid_request", "The job's body has expired or was deleted; submit it again.", retryable=True
            )
        name, request = _named(await self._reader.parse(body, claim.lane, claim.tenant))
        function = self._function(name)

        async def call(job: Job) -> JobResult:
            job.call_of(function.name)
            answer = await function.coroutine({**self._ctx, "job": job}, request)
            assert isinstance(answer, JobResult), f"{function.name} must return a JobResult"
            return answer

        return call

    def _function(self, name: str) -> Function:
        if name not in self._by_name:
            if kind := {"chat": "a chat model", "count": "a chat model", "embed": "an embedding model"}.get(name):
                message = f"The function {name!r} needs {kind}, and this queue's model is none; name another model."
                raise JobFailure("unsupported", message)
            known = ", ".join(sorted(self._by_name))
            raise JobFailure("invalid_request", f"The function {name[:64]!r} does not exist; this worker has: {known}.")
        return self._by_name[name]


def _named(envelope: Any) -> tuple[str, Any]:
    """Return the function's name and its argument. Raises `JobFailure`."""
    match envelope:
        case {"f": str(name), "a": [request], "k": {**kwargs}} if not kwargs:
            return name, request
        case {"f": str(name)}:
            raise JobFailure(
                "invalid_request", f"{name[:64]} takes one positional argument, the request, and nothing by name."
            )
    raise JobFailure("invalid_request", "The job's body is not an arq job: it has no function name.")


MAX_CRASHES = 3  # worker crashes during which this job was the only suspect

POISON_JOB = JobFailure(
    "internal",
    f"Workers died {MAX_CRASHES} times while this job was the only suspect; it is kept with the dead letters.",
)


class _Endings:
    """Writes the endings of jobs, and counts them in the metrics."""

    def __init__(self, publisher: Publisher, claims: Claims, model: str, metrics: MetricsSink) -> None:
        self._publisher = publisher
        self._claims = claims
        self._model = model
        self._metrics = metrics

    async def finish(self, job: Job, answer: JobResult, result: bytes) -> None:
        """Write the final event of a finished job, and wait for it. `result`: the JSON text to store."""
        job.begin_ending()
        job.mark("finished")
        warnings: dict[str, Any] = {"warnings": answer.warnings} if answer.warnings else {}
        ending = self._publisher.finish(
            job.log,
            "finished",
            result,
            finish_reason=answer.finish_reason,
            stop_sequence=answer.stop_sequence,
            usage=job.usage.as_event(),
            timings=answer.timings,
            **warnings,
        )
        if not await _write_ending(job, ending):
            return
        self._trace(job, finish_reason=answer.finish_reason)
        if answer.is_answer:
            self._metrics.finished(
                job.claim.lane,
                answer.finish_reason,
                e2e_s=job.claim.age_s(job.log.clock.now()),
                decode_s=answer.timings["decode_s"],
                prompt_tokens=job.usage.prompt_tokens,
                completion_tokens=job.usage.completion_tokens,
            )
            self._metrics.faulty_calls(job.claim.lane, answer.faulty_calls)

    async def end(self, job: Job, why: JobInterruption) -> None:
        """End a job that did not finish, by the reason: fail, cancel or requeue it, or log that it is lost."""
        job.begin_ending()
        job_id, usage = job.claim.job_id, job.usage.as_event()
        match why:
            case JobFailure():
                # A field may be a name that the client made up, of any length and with line breaks.
                field = "" if why.param is None else f", {why.param[:80]!r}"
                record = job.claim.record(error=why.type, **usage)
                logger.info("job %s failed: %s%s", job_id, why.type, field, extra=record)
                job.mark("failed")
                if await _write_ending(job, self._fail(job, why)):
                    self._trace(job, error=why.type)
                    self._metrics.failed(job.claim.lane, why.type)
            case CancelJob():
                record = job.claim.record(reason=why.reason, **usage)
                logger.info("job %s cancelled: %s", job_id, why.reason, extra=record)
                job.mark("cancelled")
                ending = self._publisher.finish(job.log, "cancelled", reason=why.reason, usage=usage)
                if await _write_ending(job, ending):
                    self._trace(job, error="cancelled")
                    self._metrics.cancelled(job.claim.lane)
            case Requeue():
                job.mark("queue")
                await _write_ending(job, self._requeue(job))
            case OwnershipLost():
                _log_lost_lease(job)

    def _trace(self, job: Job, *, finish_reason: str = "", error: str = "") -> None:
        """Make the spans of a job that this worker has ended, those of its earlier attempts included."""
        if self._metrics.tracing is None:
            return
        claim, usage = job.claim, job.usage
        self._metrics.tracing.record_job(
            JobTrace(
                id=claim.job_id,
                function=job.function,
                model=self._model,
                requested_model=claim.alias or self._model,
                lane=claim.lane,
                tenant=claim.tenant,
                traceparent=claim.traceparent,
                phases=job.phases,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                finish_reason=finish_reason,
                error=error,
            )
        )

    async def _fail(self, job: Job, why: JobFailure) -> None:
        named = {} if why.param is None else {"param": why.param}
        error = {"type": why.type, "message": why.message, "retryable": why.retryable, **named}
        # In a thread: a dead letter is as large as the job's body.
        dead_letter = await asyncio.to_thread(self._dead_letter, job, error) if why is POISON_JOB else b""
        await self._publisher.finish(
            job.log, "failed", dead_letter=dead_letter, error=error, usage=job.usage.as_event()
        )

    def _dead_letter(self, job: Job, error: dict[str, object]) -> bytes:
        """Return the dead letter, which `sluice dead` can show and submit again. Its body is JSON text."""
        return dumps(
            {
                "id": job.claim.job_id,
                "model": self._model,
                "lane": job.claim.lane,
                "crashes": job.claim.crashes,
                "parked_at": time.time(),
                "error": error,
                "body": job.body.decode("utf-8", "replace"),
            }
        )

    async def _requeue(self, job: Job) -> None:
        await self._publisher.until_written(job.log)
        try:
            await self._claims.release(job.claim, job.phases.as_json())
        except (RedisError, OSError):
            await asyncio.sleep(0.1)  # retry without a limit: `drain` bounds how long the worker waits
            await self._requeue(job)
        else:
            logger.info("job %s requeued", job.claim.job_id, extra=job.claim.record())


def _last_time(events: Sequence[bytes]) -> float:
    """Return the time of the last event; 0 without one, and for what another program wrote there."""
    try:
        return parse_event(events[-1]).ts if events else 0.0
    except ValueError:
        return 0.0


async def _write_ending(job: Job, ending: Awaitable[None]) -> bool:
    """Write the ending. Returns False if another attempt owns the job."""
    try:
        await ending
    except OwnershipLost:
        _log_lost_lease(job)
        return False
    return True


def _log_lost_lease(job: Job) -> None:
    logger.warning("job %s lost: another attempt owns it", job.claim.job_id, extra=job.claim.record())


class JobRunner:
    """Runs claimed jobs, any number at a time."""

    def __init__(
        self,
        redis: Redis,
        functions: JobFunctions,
        claims: Claims,
        publisher: Publisher,
        metrics: MetricsSink,
        *,
        settings: Settings,
        stopping: asyncio.Event,
    ) -> None:
        """`stopping`: once it is set, a job that cannot be read because Redis does not answer is requeued."""
        self._redis, self._functions = redis, functions
        self._claims = claims
        self._endings = _Endings(publisher, claims, settings.model_name, metrics)
        self._max_bytes, self._stopping = settings.max_request_bytes, stopping
        self._worker = settings.worker_name

    async def run(self, job: Job) -> None:
        """Run a job to its one ending. Does not raise."""
        try:
            await self._load_log(job)
            job.begin()
            answer = await self._call(job)
            result = dumps_with_items(answer.result)
        except asyncio.CancelledError:
            await self._endings.end(job, job.interruption or Requeue())
        except (JobFailure, CancelJob, Requeue, OwnershipLost) as why:
            await self._endings.end(job, why)
        except Exception:  # the border of a job: an error in one request ends that request alone
            logger.exception("job %s failed", job.claim.job_id)
            failure = JobFailure("internal", "The worker failed on this job; its log says why.", retryable=True)
            await self._endings.end(job, failure)
        else:
            await self._endings.finish(job, answer, result)

    async def _load_log(self, job: Job) -> None:
        claimed_at = job.log.clock.now()

        async def read() -> None:
            events: list[bytes] = await self._redis.lrange(keys.log(job.claim.job_id), 0, -1)  # type: ignore[misc]
            job.log.load(events)

        is_read = not job.claim.events or await until_redis_answers(read, self._stopping)
        job.begin_phases(self._worker, claimed_at, _last_time(job.log.events))
        if not is_read:
            raise Requeue

    async def _call(self, job: Job) -> JobResult:
        if job.claim.cancelled:
            raise CancelJob("requested")
        if job.claim.expired:
            raise JobFailure("deadline", "The job's deadline passed while it waited in the queue.", retryable=True)
        body = await self._body(job.claim)
        call = await self._functions.open(job.claim, body, self._max_bytes)
        if job.claim.crashes >= MAX_CRASHES:
            job.keep_body(body)
            raise POISON_JOB
        del body  # a large one would stay in memory until the job ends
        return await call(job)

    async def _body(self, claim: Claim) -> bytes:
        body = claim.body

        async def fetch() -> None:
            nonlocal body
            body = await self._claims.body(claim)

        if not body and claim.body_bytes and not await until_redis_answers(fetch, self._stopping):
            raise Requeue
        return body
