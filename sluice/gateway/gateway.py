"""What all surfaces share: callers, models, and jobs."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.requests import Request

from sluice import wire
from sluice.cancellation import Outcome
from sluice.client import Client
from sluice.errors import JobFailed, NoWorker, SluiceError
from sluice.gateway.body import Body, read_body
from sluice.gateway.caller import LOCAL, Caller
from sluice.gateway.disconnect import error_of, until_ended
from sluice.gateway.errors import ApiError, from_client, was_refused
from sluice.gateway.idempotency import IdempotencyKeys
from sluice.gateway.keys.authentication import Authentication
from sluice.gateway.keys.estimate import estimate
from sluice.gateway.keys.limits import Limits
from sluice.gateway.keys.store import KeyStore
from sluice.gateway.models import model_not_found, requested_model, served_name
from sluice.gateway.monitoring.metrics import Metrics
from sluice.gateway.protection.memory import Memory
from sluice.gateway.settings import ServeSettings
from sluice.gateway.workers import POLL_S, QueueWatch, Workers, no_worker
from sluice.submission import NewJob, Submitted, lane_of
from sluice.transport.retries import Retries
from sluice.wire import Event

logger = logging.getLogger("sluice.gateway")

_UNKNOWN_S = 2.0  # short, since a job exists as soon as it is submitted
_OUTAGE_S = 5.0  # that a command of the front's own waits out
_SAMPLE = 8  # events, whose mean length is taken for that of all
_REFUSED = {"invalid_request", "unsupported", "too_large"}  # errors of jobs that were never computed

Submissions = dict[str, asyncio.Task[Submitted]]  # by the id of the job


class Available(Enum):
    """What the server still has of a job that was queued. A job with events may have a result, too."""

    EVENTS = auto()
    RESULT = auto()
    NOTHING = auto()


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """What the server has of an answer: `available` is that of its first job, the bytes are those of all jobs together.
    Those of events are their number by the mean length of the last ones."""

    available: Available
    result_bytes: int
    event_bytes: int


class Gateway:
    """Connects the surfaces with the queue."""

    def __init__(self, client: Client, settings: ServeSettings) -> None:
        """Raises `BadKeyFile`."""
        self.client = client
        self.settings = settings
        self.retries = Retries(client.redis, _OUTAGE_S)
        self.workers = Workers(client, self.retries)
        self._queue_watch = QueueWatch(client, self.workers, settings.no_worker_s)
        self.metrics = Metrics()
        self._limits = Limits(client.redis, self.retries)
        self._authentication = (
            Authentication(KeyStore(settings.keys), self._limits, settings.max_connections_per_key)
            if settings.keys
            else None
        )
        self._memory = Memory(settings.max_held_bytes, settings.max_body_bytes)
        self.idempotency_keys = IdempotencyKeys(client.redis, self.retries)
        self.draining = False
        self._background = set[asyncio.Task[None]]()

    @property
    def redis(self) -> Redis:
        """The server, for keys of the front's own, which begin with `sluice:serve:`; `retries` sends its commands."""
        return self.client.redis

    def drain(self) -> None:
        """Stop being ready. From now on a connection that ends is this front's doing, and its job continues."""
        self.draining = True

    async def authenticate(self, request: Request) -> Caller:
        """Return the caller of a request. Raises `ApiError`."""
        caller = await self._authentication.caller(request) if self._authentication else LOCAL
        held = request.scope.setdefault("state", {}).setdefault("held", self._memory.hold(caller.key_id))
        return replace(caller, held=held)

    async def read_body(self, request: Request, caller: Caller) -> Body:
        """Return the body of a request. The caller holds its bytes until it releases them. Raises `ApiError`."""
        return await read_body(request, self.settings.max_body_bytes, caller.held)

    async def submit(
        self,
        caller: Caller,
        bodies: Mapping[str, Mapping[str, Any]],
        *,
        detached: bool = False,
        has_key: bool = False,
        function: wire.Function = "chat",
    ) -> None:
        """Queue a chat completion or a token count for each id, once a worker serves their model. Raises `ApiError` and
        `SluiceError`. The caller gets back the tokens that were reserved for the jobs that were refused.

        `bodies` are the choices of one request of the contract. `detached`: the jobs continue when the client leaves,
        unless their bodies decide. The front decides their `model`, and their `tenant` if the caller has one. An id
        that exists is not queued again.

        If some jobs are refused, or the client leaves meanwhile, those that were queued are cancelled: nobody knows
        their ids. They continue if the client finds them by its `Idempotency-Key` (`has_key`) or their bodies say so.
        """
        body = next(iter(bodies.values()))
        requested = requested_model(body)
        model = served_name(caller, requested, self.settings.model_map)
        lane = lane_of(body)
        if lane not in caller.lanes:
            raise ApiError(403, f"service_tier: this key may not use the lane {lane}.", code="lane_not_allowed")
        own = {"model": model} | ({"tenant": caller.tenant} if caller.tenant is not None else {})
        policy = "continue" if detached else "cancel"
        jobs = [
            NewJob(job_id, {**each, **own, "on_disconnect": each.get("on_disconnect") or policy}, model, lane, function)
            for job_id, each in bodies.items()
        ]
        is_counted = function == "chat" and caller.meter is not None
        await caller.take(list(bodies), estimate(body) if is_counted else 0)
        with ExitStack() as stack:
            sent = self._send(jobs, wait_worker_s=0.0)
            if not has_key and body.get("on_disconnect") != "continue":
                stack.callback(self._abandon_queued, sent)
            await self._complete(caller, requested, jobs, sent)
            stack.pop_all()

    async def _complete(self, caller: Caller, requested: str, jobs: Sequence[NewJob], sent: Submissions) -> None:
        """Wait until the submissions have ended, also if the client leaves: only what is queued can be cancelled. Those
        without a worker are sent again when there is one. Raises the first error."""
        try:
            await until_ended(sent.values())
            if unserved := [job for job in jobs if isinstance(error_of(sent[job.id]), NoWorker)]:
                await self._wait_for_worker(caller, requested, unserved[0].model)
                sent.update(self._send(unserved))
                await until_ended(sent.values())
        finally:
            if refused := [id for id, task in sent.items() if was_refused(error_of(task))]:
                await caller.release(refused)
        submitted = [task.result() for task in sent.values()]
        if any(each.served for each in submitted):
            self.workers.note(jobs[0].model)

    def _send(self, jobs: Iterable[NewJob], wait_worker_s: float | None = None) -> Submissions:
        """Submit jobs; one that exists already needs no worker."""
        return {
            job.id: asyncio.create_task(
                self.client.submit(
                    job.request,
                    model=job.model,
                    lane=job.lane,
                    id=job.id,
                    wait_worker_s=wait_worker_s,
                    function=job.function,
                )
            )
            for job in jobs
        }

    def _abandon_queued(self, sent: Submissions) -> None:
        """Cancel the jobs that were not certainly refused."""
        queued = [id for id, task in sent.items() if not was_refused(error_of(task))]
        if queued:
            self.abandon(queued)

    async def _wait_for_worker(self, caller: Caller, requested: str, model: str) -> None:
        """Wait until a worker serves the model. Raises `ApiError` if there is no such model, or no worker in time."""
        until = time.monotonic() + self.settings.no_worker_s
        await self._check_exists(caller, requested, model)
        while not await self.workers.is_served(model):
            if time.monotonic() >= until:
                raise no_worker(requested)
            await asyncio.sleep(POLL_S)
            await self._check_exists(caller, requested, model)  # a worker of another model may have started

    async def _check_exists(self, caller: Caller, requested: str, model: str) -> None:
        """Raise `ApiError` if other models are served and this one is not known."""
        if not await self.workers.exists(model):
            served = {worker.get("model", "") for worker in await self.workers.live()}
            usable = served if caller.models is None else served & caller.models
            raise from_client(NoWorker(requested, list(usable))) if usable else model_not_found(requested)

    async def events(self, job_id: str, after: int = -1) -> AsyncGenerator[Event]:
        """Yield the job's events after `after`, as `Client.stream` does.

        Raises `ApiError` 503, and cancels the job, if its workers are gone before the first event.
        """
        stream = self.client.stream(job_id, after=after, unknown_s=_UNKNOWN_S)
        async with aclosing(self._limits.settled(stream) if self._authentication else stream) as events:
            with self._queue_watch.watching(job_id):
                first = await anext(events, None)
            if first is None:
                return
            yield first
            async for event in events:
                yield event

    async def result(self, job_id: str) -> dict[str, Any]:
        """Return the job's result, waiting until it has ended. A token count costs a request and no tokens.

        Raises as `Client.result` and `events` do."""
        try:
            with self._queue_watch.watching(job_id):
                completion = await self.client.result(job_id)
        except JobFailed as failed:
            if self._authentication and failed.error.type in _REFUSED:
                await self._limits.settle(job_id, 0)
            raise
        match completion:
            case {"object": "token_count"} if self._authentication:
                await self._limits.settle(job_id, 0)
            case {"usage": {"total_tokens": int(tokens)}} if self._authentication:
                await self._limits.settle(job_id, tokens)
        return completion

    async def cancel(self, job_id: str) -> Outcome:
        """Cancel a job, as `Client.cancel` does."""
        return await self.client.cancel(job_id)

    def abandon(self, job_ids: Iterable[str]) -> None:
        """Cancel jobs that no client waits for any more, without waiting; none while this front drains."""
        if self.draining:
            return
        self.in_background(self._cancel_all(list(job_ids)))

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that no client waits for. It handles its own errors."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    @contextmanager
    def abandoning(self, job_ids: Iterable[str], *, detached: bool) -> Iterator[None]:
        """Cancel these jobs, as `abandon` does, if the body fails or its client leaves, unless they are detached."""
        with ExitStack() as stack:
            if not detached:
                stack.callback(self.abandon, job_ids)
            yield
            stack.pop_all()

    async def _cancel_all(self, job_ids: list[str]) -> None:
        for job_id in job_ids:
            try:
                await self.client.cancel(job_id)
            except (SluiceError, RedisError) as error:
                logger.warning("job %s: not cancelled, although its client has left: %s", job_id, error)

    async def stored(self, job_ids: Sequence[str]) -> StoredAnswer:
        """Return what the server has of the answer that these jobs make."""
        first = job_ids[0]

        async def read() -> list[Any]:
            async with self.redis.pipeline(transaction=False) as pipe:
                pipe.hget(wire.job_key(first), "state")
                pipe.exists(wire.body_key(first))
                for job_id in job_ids:
                    pipe.strlen(wire.result_key(job_id))
                    pipe.llen(wire.log_key(job_id))
                    pipe.lrange(wire.log_key(job_id), -_SAMPLE, -1)
                return await pipe.execute()

        state, has_body, *sizes = await self.retries.run(read)
        event_bytes = sum(map(_event_bytes, sizes[1::3], sizes[2::3]))
        if sizes[1] or state in (b"queued", b"running") or (has_body and state is None):
            available = Available.EVENTS
        else:
            available = Available.NOTHING if state is None else Available.RESULT
        return StoredAnswer(available, sum(sizes[::3]), event_bytes)

    async def check_owner(self, caller: Caller, job_id: str) -> None:
        """Check that the job is the caller's. Raises `ApiError` 404 for another's, as for a job that does not exist."""
        if not re.fullmatch(wire.JOB_ID, job_id):
            raise unknown(job_id)
        if caller.tenant is None:
            return
        tenant: bytes | None = await self.retries.run(lambda: self.redis.hget(wire.job_key(job_id), "tenant"))
        if tenant is None or tenant.decode("utf-8", "replace") != caller.tenant:
            raise unknown(job_id)


def _event_bytes(number: int, last: Sequence[bytes]) -> int:
    return number * sum(map(len, last)) // max(1, len(last))


def unknown(job_id: str) -> ApiError:
    """Return the error for a job that does not exist, as far as the caller may know."""
    return ApiError(404, f"There is no job {json.dumps(job_id[:128])}, or it has expired.", code="unknown_job")
