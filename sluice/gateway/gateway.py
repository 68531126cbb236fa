"""The parts that the routes of all interfaces share: authentication, workers, jobs, limits and metrics."""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from sluice.client import Client
from sluice.contract.keys import DEFAULT_MODEL
from sluice.gateway import idempotency, sse
from sluice.gateway.body import Body, Interface, in_thread_if_long, receive_body
from sluice.gateway.caller import LOCAL, Authentication, Caller, Limits
from sluice.gateway.idempotency import IdempotencyKeys
from sluice.gateway.jobs import AnswerJobs, Jobs, JobSubmission, StoredAnswer
from sluice.gateway.key_file import KeyStore
from sluice.gateway.monitoring import AnswerTimer, GatewayMetrics
from sluice.gateway.protection import Memory, at_end
from sluice.gateway.settings import ServeSettings
from sluice.gateway.sse import unless_disconnected
from sluice.gateway.workers import QueueWatch, ServedModels
from sluice.interfaces.errors import ApiError
from sluice.presence import mapped_name

logger = logging.getLogger("sluice.gateway")

T = TypeVar("T")


class Gateway:
    """Connects the routes of all interfaces with the queue."""

    def __init__(self, client: Client, settings: ServeSettings) -> None:
        """Raises `BadKeyFile`."""
        self.client = client
        self.settings = settings
        self.workers = ServedModels(client)
        self.metrics = GatewayMetrics()
        limits = Limits(client.redis, client.retries)
        self._authentication = (
            Authentication(KeyStore(settings.keys), limits, settings.max_connections_per_key) if settings.keys else None
        )
        self._memory = Memory(settings.max_held_bytes, settings.max_body_bytes)
        self.idempotency_keys = IdempotencyKeys(client)
        queue_watch = QueueWatch(client, self.workers, settings.no_worker_s)
        counted = limits if settings.keys else None
        self.jobs = Jobs(client, queue_watch, counted, settings.disconnect_grace_s)
        self.submission = JobSubmission(client, self.workers, settings, self.jobs)
        self.draining = False

    def drain(self) -> None:
        """Stop being ready, and cancel no job from now on."""
        self.draining = True
        self.jobs.drain()

    async def authenticate(self, request: Request) -> Caller:
        """Return the caller of a request. Raises `ApiError`."""
        caller = await self._authentication.caller(request) if self._authentication else LOCAL
        state = request.scope.setdefault("state", {})
        if "held" not in state:  # a request may be authenticated more than once
            state["held"] = self._memory.hold(caller.key_id)
            at_end(request).callback(state["held"].release)
        return replace(caller, held=state["held"])

    async def read_body(self, request: Request, caller: Caller, interface: Interface) -> Body:
        """Return the body of a request, as its interface reads it. The caller holds its bytes until it releases them.
        Raises `ApiError`."""
        body = await receive_body(request, self.settings.max_body_bytes, caller.held)
        if self.settings.strict:
            return body
        content, ignored = await in_thread_if_long(body.length, interface, body.content)
        if ignored:
            logger.info("left out of a request: %s", ascii(", ".join(ignored)))
        return replace(body, content=content, ignored=tuple(ignored))

    async def accept(
        self,
        request: Request,
        caller: Caller,
        body: Body,
        path: str,
        new_id: str,
        *,
        submit: Callable[[AnswerJobs], Awaitable[T]],
        join: Callable[[AnswerJobs, StoredAnswer], Awaitable[T]],
        ids_of: Callable[[str], Sequence[str]] = lambda base: [base],
        continues: bool = False,
    ) -> tuple[AnswerJobs, T]:
        """Queue the jobs of a request with `submit`, or `join` those that it has queued before: by its
        `Idempotency-Key`, or, without one, because its client has left. Returns the jobs, and what the call returns.
        Raises `ApiError` and `SluiceError`.

        `path`: of the route; `new_id`: a prefix of the interface and 32 digits, from which `ids_of` makes the ids of
        the jobs. `continues`: they do so in any case when the client leaves.
        """
        model = body.content.get("model")
        at = self.client.of_model(
            mapped_name(model if isinstance(model, str) else DEFAULT_MODEL, self.settings.model_map)
        )
        if (key := idempotency.key_of(request)) is not None:
            base = idempotency.job_id(caller, path, key, new_id[:-32])
            jobs = AnswerJobs(ids_of(base), detached=True, has_key=True)
            async with self.idempotency_keys.registered(at, base, jobs.ids, body.digest) as was_queued:
                if was_queued:
                    return jobs, await join(jobs, await self.jobs.stored(jobs.ids))
                return jobs, await submit(jobs)
        if continues:
            jobs = AnswerJobs(ids_of(new_id), detached=True)
            return jobs, await submit(jobs)
        retry_key = await idempotency.retry_key(caller, path, body)
        if (returned := await self.jobs.returned(at, retry_key)) is None:
            jobs = AnswerJobs(ids_of(new_id), retry_key=retry_key)
            return jobs, await submit(jobs)
        jobs = AnswerJobs(returned[0], retry_key=retry_key)
        with self.jobs.abandoning(jobs):
            return jobs, await join(jobs, returned[1])

    async def whole(self, request: Request, jobs: AnswerJobs, work: Coroutine[Any, Any, T]) -> T:
        """Return what the work for an answer returns. Its jobs are abandoned if it fails or the client leaves. Raises
        `ClientDisconnected`."""
        with self.jobs.abandoning(jobs):
            return await unless_disconnected(request, work)

    async def stream(
        self,
        request: Request,
        jobs: AnswerJobs,
        frames: sse.Frames,
        *,
        error_frame: Callable[[ApiError], bytes],
        headers: Mapping[str, str] | None = None,
        heartbeat: Callable[[], bytes] = lambda: sse.KEEP_ALIVE,
    ) -> Response:
        """Return the response that streams an answer, as `sse.stream` does. Its jobs are abandoned if it fails or the
        client leaves."""

        async def abandoning() -> sse.Frames:
            with self.jobs.abandoning(jobs):
                async with aclosing(frames) as source:
                    async for frame in source:
                        yield frame

        return await sse.stream(
            request,
            abandoning(),
            heartbeat_s=self.settings.heartbeat_s,
            error_frame=error_frame,
            headers=headers,
            heartbeat=heartbeat,
        )

    def timer(self, model: str, started: float, *, stream: bool) -> AnswerTimer:
        """Return the timer of the answer to a request that was accepted. `model`: as the request names it; `started`:
        when the request came, by the monotonic clock."""
        return AnswerTimer(self.metrics, mapped_name(model, self.settings.model_map), started, stream=stream)
