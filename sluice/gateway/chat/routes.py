"""The routes of chat completions."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.gateway import committed, idempotency, sse
from sluice.gateway.body import Body, told
from sluice.gateway.caller import Caller
from sluice.gateway.chat.request import ID_PREFIX, ChatRequest, job_ids, job_ids_of, read_request
from sluice.gateway.chat.stream import completion_of, error_frame, frames, outcome_of, seen_by
from sluice.gateway.disconnect import unless_disconnected
from sluice.gateway.errors import ApiError, endpoint
from sluice.gateway.gateway import Gateway
from sluice.gateway.idempotency import expired
from sluice.gateway.jobs.jobs import Available, unknown
from sluice.gateway.models import requested_model
from sluice.gateway.monitoring.access import identify
from sluice.gateway.monitoring.metrics import AnswerTimer
from sluice.gateway.threads import json_response
from sluice.gateway.tools import Tools
from sluice.http_errors import ErrorForm

_PATH = "/v1/chat/completions"


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of chat completions."""
    chat = _Chat(gateway)
    return [
        Route(_PATH, endpoint(chat.create), methods=["POST"]),
        Route(f"{_PATH}/{{id}}", endpoint(chat.retrieve)),
        Route(f"{_PATH}/{{id}}/stream", endpoint(chat.resume)),
        Route(f"{_PATH}/{{id}}/cancel", endpoint(chat.cancel), methods=["POST"]),
        Route("/v1/completions", endpoint(chat.refuse_raw_prompt), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The jobs of one answer. `detached`: they continue when the client leaves; else `retry_key` is where a retry finds
    them for a while."""

    ids: Sequence[str]
    detached: bool
    retry_key: str | None = None


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request whose jobs are queued. It holds nothing of the body."""

    jobs: _Jobs
    model: str  # as the request names it
    stream: bool
    include_usage: bool
    tools: Tools
    ignored: tuple[str, ...] = ()


class _Chat:
    """Answers requests for chat completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        started = time.monotonic()
        accepted = await self._accept(request)
        jobs = accepted.jobs
        identify(request, jobs.ids[0])
        timer = self._gateway.timer(accepted.model, started, stream=accepted.stream)
        if accepted.stream:
            start, usage = [-1] * len(jobs.ids), accepted.include_usage
            frames = self._frames(
                jobs, start, timer, include_usage=usage, tools=accepted.tools, ignored=accepted.ignored
            )
            return await self._stream(request, frames)
        completion = await unless_disconnected(request, self._completion(jobs, timer, accepted.tools))
        return await json_response(told(completion, accepted.ignored))

    async def _accept(self, request: Request) -> _Accepted:
        """Read a request, and queue its jobs or find those of its `Idempotency-Key`."""
        caller = await self._gateway.authenticate(request)
        body = await self._gateway.read_body(request, caller, committed.chat)
        chat = read_request(body.content, body.length, self._gateway.settings.max_body_bytes)
        caller.count_choices(chat.choices)
        caller.held.add((chat.choices - 1) * body.length)  # each job has the whole body
        key = idempotency.key_of(request)
        if key is None:
            jobs = await unless_disconnected(request, self._submit_or_return(caller, chat, body))
        else:
            base = idempotency.job_id(caller, _PATH, key, ID_PREFIX)
            jobs = _Jobs(job_ids(base, chat.choices), True)
            await unless_disconnected(request, self._submit_once(caller, chat, jobs, base, body.digest))
        model = requested_model(chat.body)
        return _Accepted(jobs, model, chat.stream, chat.include_usage, chat.tools, body.ignored)

    async def _submit_or_return(self, caller: Caller, chat: ChatRequest, body: Body) -> _Jobs:
        """Queue the jobs of a request without a key, or return to those that it has queued before its client left."""
        ids: Sequence[str] = job_ids(f"{ID_PREFIX}{uuid.uuid4().hex}", chat.choices)
        if chat.body.get("on_disconnect") == "continue":
            jobs = _Jobs(ids, True)
        else:
            key = await idempotency.retry_key(caller, _PATH, body)
            if (returned := await self._gateway.jobs.returned(key)) is not None:
                ids, stored = returned
                with self._gateway.jobs.abandoning(ids, detached=False):
                    caller.held.release()
                    caller.held.add(stored.event_bytes)
                return _Jobs(ids, False, key)
            jobs = _Jobs(ids, False, key)
        await self._submit(caller, chat, jobs)
        return jobs

    async def _submit(self, caller: Caller, chat: ChatRequest, jobs: _Jobs, *, has_key: bool = False) -> None:
        """Queue the jobs. After that the caller holds nothing of the body."""
        bodies = {job_id: chat.choice(index) for index, job_id in enumerate(jobs.ids)}
        await self._gateway.submission.submit(caller, bodies, detached=jobs.detached, has_key=has_key)
        caller.held.release()

    async def _submit_once(self, caller: Caller, chat: ChatRequest, jobs: _Jobs, base: str, digest: str) -> None:
        """Queue the jobs of a key, or join those that were queued before: the caller holds what the server has of their
        answer. Raises `ApiError` 410 if that has expired."""
        async with self._gateway.idempotency_keys.registered(base, jobs.ids, digest) as was_queued:
            if not was_queued:
                return await self._submit(caller, chat, jobs, has_key=True)
            stored = await self._gateway.jobs.stored(jobs.ids)
            match stored.available:
                case Available.NOTHING:
                    raise expired("the answer has expired; use a new key to have it computed again.")
                case Available.RESULT if chat.stream:
                    raise expired(f"the events of the answer have expired; get it at {_PATH}/{jobs.ids[0]}.")
            caller.held.release()
            caller.held.add(stored.event_bytes if chat.stream else stored.result_bytes)

    async def _completion(
        self, jobs: _Jobs, timer: AnswerTimer | None = None, tools: Tools | None = None
    ) -> dict[str, Any]:
        """Return the completion. If one job fails or the client leaves, all are cancelled."""
        tasks = [asyncio.create_task(self._gateway.jobs.result(job_id, timer=timer)) for job_id in jobs.ids]
        try:
            with self._gateway.jobs.abandoning(jobs.ids, detached=jobs.detached, retry_key=jobs.retry_key):
                return completion_of(await asyncio.gather(*tasks), tools)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, request: Request, frames: AsyncGenerator[bytes]) -> Response:
        heartbeat_s = self._gateway.settings.heartbeat_s
        return await sse.stream(request, frames, heartbeat_s=heartbeat_s, error_frame=error_frame)

    async def _frames(
        self,
        jobs: _Jobs,
        seen: Sequence[int],
        timer: AnswerTimer | None = None,
        *,
        include_usage: bool,
        tools: Tools | None = None,
        ignored: Sequence[str] = (),
    ) -> AsyncGenerator[bytes]:
        """Yield the frames. If one job fails or the client leaves, all are cancelled."""
        events = partial(self._gateway.jobs.events, timer=timer)
        source = frames(jobs.ids, events, include_usage=include_usage, seen=seen, tools=tools, ignored=ignored)
        with self._gateway.jobs.abandoning(jobs.ids, detached=jobs.detached, retry_key=jobs.retry_key):
            async with aclosing(source):
                async for frame in source:
                    yield frame

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions/{id}`: the whole answer, as soon as it has ended."""
        caller, jobs = await self._known(request)
        caller.count_choices(len(jobs.ids))
        await caller.count_request()
        stored = await self._gateway.jobs.stored(jobs.ids)
        if stored.available is Available.NOTHING:
            raise unknown(jobs.ids[0])
        caller.held.add(stored.result_bytes)
        completion = await unless_disconnected(request, self._completion(jobs))
        return await json_response(completion)

    async def resume(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions/{id}/stream`: the stream after the events that `Last-Event-ID` names."""
        caller, jobs = await self._known(request)
        caller.count_choices(len(jobs.ids))
        stored = await self._gateway.jobs.stored(jobs.ids)
        match stored.available:
            case Available.NOTHING:
                raise unknown(jobs.ids[0])
            case Available.RESULT:
                raise expired(f"the events of the answer have expired; get it at {_PATH}/{jobs.ids[0]}.", "id")
        caller.held.add(stored.event_bytes)
        seen = seen_by(request.headers.get("last-event-id"), len(jobs.ids))
        include_usage = request.query_params.get("include_usage") == "true"
        return await self._stream(request, self._frames(jobs, seen, include_usage=include_usage))

    async def cancel(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions/{id}/cancel`."""
        _, jobs = await self._known(request)
        outcomes = [await self._gateway.jobs.cancel(job_id) for job_id in jobs.ids]
        return JSONResponse({"id": jobs.ids[0], "outcome": outcome_of(outcomes)})

    async def refuse_raw_prompt(self, request: Request) -> Response:
        """Answer `POST /v1/completions`. Raises `ApiError` 400, and 401 without a valid key."""
        await self._gateway.authenticate(request)
        message = (
            "/v1/completions is not supported: workers put every prompt into a chat template. Use /v1/chat/completions."
        )
        raise ApiError(ErrorForm.UNSUPPORTED, message)

    async def _known(self, request: Request) -> tuple[Caller, _Jobs]:
        """Return the caller, and the jobs that the path names. Raises `ApiError` unless they are the caller's."""
        caller = await self._gateway.authenticate(request)
        ids = job_ids_of(request.path_params["id"])
        await self._gateway.jobs.check_owner(caller, ids[0])
        identify(request, ids[0])
        return caller, _Jobs(ids, True)
