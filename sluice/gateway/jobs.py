"""Jobs that are queued: what is stored of them, their events and results, their owners and their end."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from sluice.client import Client
from sluice.contract import keys
from sluice.contract.events import Event, parse_event
from sluice.errors import JobCancelled, JobFailed, NoWorker, ServerUnreachable, SluiceError
from sluice.gateway.caller import Caller, Limits, estimate, used_tokens
from sluice.gateway.errors import was_refused
from sluice.gateway.monitoring import AnswerTimer
from sluice.gateway.settings import ServeSettings
from sluice.gateway.sse import ClientDisconnected, raised_by, until_ended
from sluice.gateway.workers import (
    POLL_S,
    QueueWatch,
    ServedModels,
    model_missing,
    model_not_found,
    served_name,
    worker_gone,
)
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError, from_client
from sluice.interfaces.fields import requested_model
from sluice.submission import ExtraKey, NewJob, Submitted, lane_of
from sluice.tracing import describe_request

logger = logging.getLogger("sluice.gateway")

_LEFT = asyncio.CancelledError, GeneratorExit, ClientDisconnected  # what ends the work for a client that has left
_ENDED = b"finished", b"failed", b"cancelled"


class Available(Enum):
    """What the server still has of a job that was queued. A job with events may have a result, too."""

    EVENTS = auto()
    RESULT = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What the server has of an answer: `available` is that of its first job, the bytes are those of all jobs together.
    Those of events are their number by the mean length of the last ones. `is_lost`: the first job has failed or was
    cancelled."""

    available: Available
    result_bytes: int
    event_bytes: int
    is_lost: bool


@dataclass(frozen=True, slots=True)
class AnswerJobs:
    """The jobs of one answer. `detached`: they continue when the client leaves; else `retry_key` is where a retry finds
    them for a while. `has_key`: a retry finds them by its `Idempotency-Key`."""

    ids: Sequence[str]
    detached: bool = False
    retry_key: str | None = None
    has_key: bool = False


class Jobs:
    """Reads, settles and cancels the jobs of all interfaces."""

    def __init__(self, client: Client, queue_watch: QueueWatch, limits: Limits | None, grace_s: float) -> None:
        """`limits`: those that the usage of jobs counts for; None without keys. `grace_s`: seconds that a job continues
        after its client has left."""
        self._client = client
        self._queue_watch, self._limits = queue_watch, limits
        self._grace_s, self._left = grace_s, 0
        self._draining = False
        self._background = set[asyncio.Task[None]]()

    def drain(self) -> None:
        """Cancel no more jobs whose connections end: from now on the gateway itself closes them."""
        self._draining = True

    async def events(self, job_id: str, after: int = -1, *, timer: AnswerTimer | None = None) -> AsyncGenerator[Event]:
        """Yield the job's events after `after`, as `Client.stream` does. `timer`: of the request that they answer.
        Before the first stored event none is made for a wait without a worker: that could end as an HTTP status.

        Raises `ApiError` 503, and cancels the job, if its workers are gone before the first event.
        """
        # A job exists as soon as it is submitted, so one that is unknown is not awaited for long.
        stream = self._client.stream(job_id, after=after, unknown_s=2.0)
        async with aclosing(self._limits.settled(stream) if self._limits else stream) as events:
            with self._queue_watch.watching(job_id):
                while (first := await anext(events, None)) is not None and not first.stored:
                    pass
            if first is None:
                return
            if timer:
                timer.add_event(first)
            yield first
            async for event in events:
                if timer:
                    timer.add_event(event)
                yield event

    async def result(self, job_id: str, *, timer: AnswerTimer | None = None) -> dict[str, Any]:
        """Return the job's result, waiting until it has ended. `timer`: of the request that it answers.

        Raises as `Client.result` and `events` do."""
        try:
            completion = await self._settled_result(job_id)
        except SluiceError as error:
            if timer:
                timer.add_error(error)
            raise
        if timer:
            timer.add_result(completion)
        return completion

    async def _settled_result(self, job_id: str) -> dict[str, Any]:
        """Return the job's result, and settle it. A token count costs a request and no tokens."""
        try:
            with self._queue_watch.watching(job_id):
                completion = await self._client.result(job_id)
        except (JobFailed, JobCancelled):
            if self._limits:
                await self._settle_unfinished(job_id, self._limits)
            raise
        match completion:
            case {"object": "token_count"} if self._limits:
                await self._limits.settle(job_id, 0)
            case {"usage": {"total_tokens": int(tokens)}} if self._limits:
                await self._limits.settle(job_id, tokens)
        return completion

    async def _settle_unfinished(self, job_id: str, limits: Limits) -> None:
        """Settle a job that failed or was cancelled: its result is its final event."""
        try:
            at = await self._client.of_job(job_id)
            function, stored = await at.retries.run(partial(_read_ending, at.redis, job_id))
            tokens = 0 if function == b"count" else used_tokens(parse_event(stored or b""))
        except (ServerUnreachable, ValueError):
            return  # the estimate stands: the result cannot be read, or has expired
        await limits.settle(job_id, tokens)

    def abandon(self, job_ids: Iterable[str]) -> None:
        """Cancel jobs that no client waits for any more, without waiting; none while this gateway drains."""
        if self._draining:
            return
        self.in_background(self._cancel_all(list(job_ids)))

    def leave(self, job_ids: Sequence[str], retry_key: str) -> None:
        """Let the jobs of an answer continue for the grace after its client has left, without waiting, and cancel them
        then unless `returned` has found them. Beyond 1,000 such answers they are cancelled at once."""
        if not self._grace_s or (self._left >= 1_000 and not self._draining):
            return self.abandon(job_ids)
        self.in_background(self._leave(job_ids, retry_key))

    async def _leave(self, job_ids: Sequence[str], retry_key: str) -> None:
        field = " ".join(job_ids)
        self._left += 1
        try:
            at = await self._client.of_job(job_ids[0])
            if not await at.retries.run(lambda: self._note_left(at.redis, job_ids, retry_key, field)) or self._draining:
                return
            await asyncio.sleep(self._grace_s)
            if not await at.retries.run(lambda: at.redis.hdel(retry_key, field)):
                return
        except (SluiceError, RedisError) as error:
            logger.warning("job %s: cancelled at once, since its retry could not find it: %s", job_ids[0], error)
        finally:
            self._left -= 1
        await self._cancel_all(job_ids)

    async def _note_left(self, redis: Redis, job_ids: Sequence[str], retry_key: str, field: str) -> bool:
        """Note jobs for a retry, unless they have ended: their client has the whole answer, and the same request is a
        new one."""
        async with redis.pipeline(transaction=False) as pipe:
            for job_id in job_ids:
                pipe.hget(keys.job(job_id), "state")
            states = await pipe.execute()
        if all(state in _ENDED for state in states):
            return False
        async with redis.pipeline(transaction=False) as pipe:
            pipe.hset(retry_key, field, str(round(time.time())))
            pipe.pexpire(retry_key, round(self._grace_s * 1000) + 60_000)  # the gateway may be late or ending
            await pipe.execute()
        return True

    async def returned(self, at: Client, retry_key: str) -> tuple[Sequence[str], StoredAnswer] | None:
        """Return the jobs of the same request whose client has left, and what the server has of their answer; None if
        there are none. From then on they are the caller's, and no other request finds them. `at`: the server of the
        request's model."""
        if not self._grace_s:
            return None
        claim = asyncio.create_task(self._claim(at, retry_key))
        try:
            await until_ended([claim])
        except asyncio.CancelledError:
            if raised_by(claim) is None and (found := claim.result()) is not None:
                self.leave(found[0], retry_key)
            raise
        return claim.result()

    async def _claim(self, at: Client, retry_key: str) -> tuple[Sequence[str], StoredAnswer] | None:
        for name in await at.retries.run(lambda: at.redis.hgetall(retry_key)):
            field = name.decode()
            job_ids = field.split()
            if not await at.retries.run(partial(at.redis.hdel, retry_key, field)):
                continue  # another request was faster, or the grace is over
            stored = await self.stored(job_ids)
            if stored.available is Available.EVENTS and not stored.is_lost:
                return job_ids, stored
        return None

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that no client waits for. It handles its own errors."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @contextmanager
    def abandoning(self, jobs: AnswerJobs) -> Iterator[None]:
        """Cancel the jobs of an answer, as `abandon` does, if the body fails or its client leaves, unless they are
        detached. Those whose retry could find them continue for a while after their client has left, as `leave`
        describes."""

        def end(kind: type[BaseException] | None, *_: object) -> None:
            if kind is None or jobs.detached:
                return
            if jobs.retry_key is not None and issubclass(kind, _LEFT):
                self.leave(jobs.ids, jobs.retry_key)
            else:
                self.abandon(jobs.ids)

        with ExitStack() as stack:
            stack.push(end)
            yield

    async def _cancel_all(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            try:
                await self._client.cancel(job_id)
            except (SluiceError, RedisError) as error:
                logger.warning("job %s: not cancelled, although its client has left: %s", job_id, error)

    async def stored(self, job_ids: Sequence[str]) -> StoredAnswer:
        """Return what the server has of the answer that these jobs make, in one round trip."""
        first = job_ids[0]
        at = await self._client.of_job(first)

        async def read() -> list[Any]:
            async with at.redis.pipeline(transaction=False) as pipe:
                pipe.hget(keys.job(first), "state")
                pipe.exists(keys.body(first))
                for job_id in job_ids:
                    pipe.strlen(keys.result(job_id))
                    pipe.llen(keys.log(job_id))
                    pipe.lrange(keys.log(job_id), -8, -1)  # whose mean length is taken for that of all
                return await pipe.execute()

        state, has_body, *sizes = await at.retries.run(read)
        event_bytes = sum(map(_event_bytes, sizes[1::3], sizes[2::3]))
        if sizes[1] or state in (b"queued", b"running") or (has_body and state is None):
            available = Available.EVENTS
        else:
            available = Available.NOTHING if state is None else Available.RESULT
        return StoredAnswer(available, sum(sizes[::3]), event_bytes, state in (b"failed", b"cancelled"))

    async def check_owner(self, caller: Caller, job_id: str) -> None:
        """Check that the job is the caller's. Raises `ApiError` 404 for another's, as for a job that does not exist."""
        if not keys.is_job_id(job_id):
            raise unknown(job_id)
        if caller.tenant is None:
            return
        at = await self._client.of_job(job_id)
        tenant: bytes | None = await at.retries.run(lambda: at.redis.hget(keys.job(job_id), "tenant"))
        if tenant is None or tenant.decode("utf-8", "replace") != caller.tenant:
            raise unknown(job_id)


async def _read_ending(redis: Redis, job_id: str) -> list[Any]:
    """Return the job's function, which is None for a chat, and its stored result."""
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hget(keys.job(job_id), "function")
        pipe.get(keys.result(job_id))
        return await pipe.execute()


def unknown(job_id: str) -> ApiError:
    """Return the error for a job that does not exist, as far as the caller may know."""
    return ApiError(ErrorForm.UNKNOWN_JOB, f"There is no job {json.dumps(job_id[:128])}, or it has expired.")


def _event_bytes(number: int, last: Sequence[bytes]) -> int:
    return number * sum(map(len, last)) // max(1, len(last))


_Sent = dict[str, asyncio.Task[Submitted]]  # submissions by the id of the job


class JobSubmission:
    """Submits jobs."""

    def __init__(self, client: Client, workers: ServedModels, settings: ServeSettings, jobs: Jobs) -> None:
        self._client, self._workers = client, workers
        self._settings, self._jobs = settings, jobs

    async def submit(
        self,
        caller: Caller,
        bodies: Mapping[str, Mapping[str, Any]],
        answer: AnswerJobs,
        *,
        function: keys.JobFunction = "chat",
        extra_keys: Sequence[ExtraKey] = (),
        webhooks: keys.JobWebhooks = "none",
    ) -> Sequence[Submitted]:
        """Queue a job for each id, once a worker serves their model, and return the
        outcomes. After that the caller holds nothing of the body. Raises `ApiError` and `SluiceError`. The caller gets
        back the tokens that were reserved for the jobs that were refused.

        `bodies` are the choices of one request of the contract. Those of a detached answer continue when the client
        leaves, unless their bodies decide. The gateway decides their `model`, and their `tenant` if the caller has one.
        An id that exists is not queued again. `extra_keys` are set with each job that is queued, and not without it.
        `webhooks`: of their ends.

        If some jobs are refused, or the client leaves meanwhile, those that were queued are cancelled: nobody knows
        their ids. They continue if the client finds them by its `Idempotency-Key` or their bodies say so.
        """
        body = next(iter(bodies.values()))
        requested = requested_model(body)
        try:
            model = served_name(caller, requested, self._settings.model_map)
        except ApiError:
            if body.get("model") is not None:
                raise
            raise model_missing(await self._usable(caller)) from None
        describe_request(model)
        lane = lane_of(body)
        if lane not in caller.lanes:
            raise ApiError(ErrorForm.LANE_NOT_ALLOWED, f"service_tier: this key may not use the lane {lane}.")
        own = {"model": model} | ({"tenant": caller.tenant} if caller.tenant is not None else {})
        if body.get("on_disconnect") is None:
            own["on_disconnect"] = "continue" if answer.detached else "cancel"
        requests = {job_id: {**each, **own} for job_id, each in bodies.items()}
        jobs = [NewJob(job_id, each, model, lane, function, extra_keys, webhooks) for job_id, each in requests.items()]
        is_counted = function != "count" and caller.meter is not None
        await caller.reserve(list(bodies), estimate(body, answers=function == "chat") if is_counted else 0)
        with ExitStack() as stack:
            sent = self._send(jobs, wait_worker_s=0.0)
            if not answer.has_key and body.get("on_disconnect") != "continue":
                stack.callback(self._abandon_queued, sent)
            submitted = await self._complete(caller, body, jobs, sent)
            stack.pop_all()
        caller.held.release()
        return submitted

    async def _complete(
        self, caller: Caller, body: Mapping[str, Any], jobs: Sequence[NewJob], sent: _Sent
    ) -> Sequence[Submitted]:
        """Wait until the submissions have ended, also if the client leaves: only what is queued can be cancelled. Those
        without a worker are sent again when there is one. Returns the outcomes, or raises the first error."""
        try:
            await until_ended(sent.values())
            if unserved := [job for job in jobs if isinstance(raised_by(sent[job.id]), NoWorker)]:
                await self._wait_for_worker(caller, body, unserved[0].model)
                sent.update(self._send(unserved))
                await until_ended(sent.values())
        finally:
            if refused := [id for id, task in sent.items() if was_refused(raised_by(task))]:
                await caller.release(refused)
        submitted = [task.result() for task in sent.values()]
        if any(each.served for each in submitted):
            self._workers.note(submitted[0].model or jobs[0].model)
        return submitted

    def _send(self, jobs: Iterable[NewJob], wait_worker_s: float | None = None) -> _Sent:
        """Submit jobs; one that exists already needs no worker."""
        return {
            job.id: asyncio.create_task(
                self._client.submit(
                    job.request,
                    model=job.model,
                    lane=job.lane,
                    id=job.id,
                    wait_worker_s=wait_worker_s,
                    function=job.function,
                    extra_keys=job.extra_keys,
                    webhooks=job.webhooks,
                )
            )
            for job in jobs
        }

    def _abandon_queued(self, sent: _Sent) -> None:
        """Cancel the jobs that were not certainly refused."""
        queued = [id for id, task in sent.items() if not was_refused(raised_by(task))]
        if queued:
            self._jobs.abandon(queued)

    async def _wait_for_worker(self, caller: Caller, body: Mapping[str, Any], model: str) -> None:
        """Wait until a worker serves the model. Raises `ApiError` if there is no such model, or no worker in time."""
        until = time.monotonic() + self._settings.no_worker_s
        await self._check_exists(caller, body, model)
        while not await self._workers.is_served(model):
            if time.monotonic() >= until:
                raise worker_gone(requested_model(body))
            await asyncio.sleep(POLL_S)
            await self._check_exists(caller, body, model)  # a worker of another model may have started

    async def _check_exists(self, caller: Caller, body: Mapping[str, Any], model: str) -> None:
        """Raise `ApiError` if other models are served and this one is not known."""
        if await self._workers.exists(model):
            return
        usable = await self._usable(caller)
        if body.get("model") is None:
            raise model_missing(usable)
        requested = requested_model(body)
        raise from_client(NoWorker(requested, list(usable))) if usable else model_not_found(requested)

    async def _usable(self, caller: Caller) -> Set[str]:
        """Return the models with a live worker that the caller may use, and the aliases of such models."""
        served = {worker.get("model", "") for worker in await self._workers.live()} | {
            *await self._workers.supervised()
        }
        served |= {alias for alias, model in (await self._workers.aliases()).items() if model in served}
        return served if caller.models is None else served & caller.models
