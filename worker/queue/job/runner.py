"""Runs one claimed job: reads its log and body, calls its function, and brings it to its one ending."""

import asyncio
import logging

from redis.asyncio import Redis

from sluice.contract import keys
from worker.errors import Cancelled, JobFailure, OwnershipLost, Requeue
from worker.json_bytes import dumps_with_items
from worker.queue.job.claims import Claim, Claims
from worker.queue.job.endings import MAX_CRASHES, POISON_JOB, Endings
from worker.queue.job.functions import JobFunctions
from worker.queue.job.job import Job, JobResult
from worker.queue.server.outage import until_redis_answers

logger = logging.getLogger("sluice.queue")


class JobRunner:
    """Runs claimed jobs, any number at a time."""

    def __init__(
        self,
        redis: Redis,
        functions: JobFunctions,
        claims: Claims,
        endings: Endings,
        *,
        max_bytes: int,
        stopping: asyncio.Event,
    ) -> None:
        """`max_bytes`: largest body that is accepted. `stopping`: once it is set, a job that cannot be read because
        Redis does not answer is requeued."""
        self._redis, self._functions = redis, functions
        self._claims, self._endings = claims, endings
        self._max_bytes, self._stopping = max_bytes, stopping

    async def run(self, job: Job) -> None:
        """Run a job to its one ending. Does not raise."""
        try:
            await self._load_log(job)
            job.begin()
            answer = await self._call(job)
            result = dumps_with_items(answer.result)
        except asyncio.CancelledError:
            await self._endings.end(job, job.interruption or Requeue())
        except (JobFailure, Cancelled, Requeue, OwnershipLost) as why:
            await self._endings.end(job, why)
        except Exception:  # the border of a job: an error in one request ends that request alone
            logger.exception("job %s failed", job.claim.job_id)
            failure = JobFailure("internal", "The worker failed on this job; its log says why.", retryable=True)
            await self._endings.end(job, failure)
        else:
            await self._endings.finish(job, answer, result)

    async def _load_log(self, job: Job) -> None:
        async def read() -> None:
            events: list[bytes] = await self._redis.lrange(keys.log(job.claim.job_id), 0, -1)  # type: ignore[misc]
            job.log.load(events)

        if job.claim.events and not await until_redis_answers(read, self._stopping):
            raise Requeue

    async def _call(self, job: Job) -> JobResult:
        if job.claim.cancelled:
            raise Cancelled("requested")
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
