"""The routes of chat completions."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.gateway import idempotency, sse
from sluice.gateway.body import Body, read_body
from sluice.gateway.caller import Caller
from sluice.gateway.chat.answer import whole
from sluice.gateway.chat.order import ID_PREFIX, Order, job_ids, job_ids_of, read_order
from sluice.gateway.chat.stream import error_frame, frames, seen_by
from sluice.gateway.disconnect import unless_left
from sluice.gateway.errors import ApiError, endpoint, was_refused
from sluice.gateway.gateway import Gateway, unknown

_PATH = "/v1/chat/completions"


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of chat completions."""
    chat = _Chat(gateway)
    return [
        Route(_PATH, endpoint(chat.create), methods=["POST"]),
        Route(f"{_PATH}/{{id}}", endpoint(chat.retrieve)),
        Route(f"{_PATH}/{{id}}/stream", endpoint(chat.resume)),
        Route(f"{_PATH}/{{id}}/cancel", endpoint(chat.cancel), methods=["POST"]),
        Route("/v1/completions", endpoint(_refuse_raw_prompts), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Jobs:
    """The jobs of one answer. `outlive`: they continue when the client leaves."""

    ids: Sequence[str]
    outlive: bool


class _Chat:
    """Answers requests for chat completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        caller = await self._gateway.authenticate(request)
        max_bytes = self._gateway.settings.max_body_bytes
        body = await read_body(request, max_bytes)
        order = read_order(body.content, body.length, max_bytes)
        jobs = await self._jobs(request, caller, body, order)
        await unless_left(request, self._submit(caller, order, jobs))
        if order.stream:
            return await self._stream(request, jobs, [-1] * len(jobs.ids), include_usage=order.include_usage)
        completion = await unless_left(request, self._whole(jobs))
        return JSONResponse(completion, headers=_headers(jobs))

    async def _jobs(self, request: Request, caller: Caller, body: Body, order: Order) -> _Jobs:
        """Return the jobs of a request: new ones, or those of its `Idempotency-Key`."""
        key = idempotency.key_of(request)
        if key is None:
            ids = job_ids(f"{ID_PREFIX}{uuid.uuid4().hex}", order.choices)
            return _Jobs(ids, order.body.get("on_disconnect") == "continue")
        base = idempotency.job_id(caller, _PATH, key, ID_PREFIX)
        await idempotency.claim(self._gateway.redis, self._gateway.retries, base, body.digest)
        return _Jobs(job_ids(base, order.choices), True)

    async def _submit(self, caller: Caller, order: Order, jobs: _Jobs) -> None:
        """Queue all jobs, or none: those that were queued are cancelled if one is refused."""
        policy = "continue" if jobs.outlive else "cancel"
        tasks = [
            asyncio.create_task(self._gateway.submit(caller, order.choice(index), job_id=job_id, on_disconnect=policy))
            for index, job_id in enumerate(jobs.ids)
        ]
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
            for task in tasks:
                task.result()
        except BaseException:
            queued = [
                job_id
                for job_id, task in zip(jobs.ids, tasks, strict=True)
                if task.cancelled() or not was_refused(task.exception())
            ]
            self._abandon(_Jobs(queued, jobs.outlive))
            raise

    async def _whole(self, jobs: _Jobs) -> dict[str, Any]:
        """Return the completion. If one job fails or the client leaves, all are cancelled."""
        tasks = [asyncio.create_task(self._gateway.result(job_id)) for job_id in jobs.ids]
        try:
            with self._gateway.abandoning(jobs.ids, outlive=jobs.outlive):
                return whole(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stream(self, request: Request, jobs: _Jobs, seen: Sequence[int], *, include_usage: bool) -> Response:
        return await sse.stream(
            request,
            self._frames(jobs, seen, include_usage=include_usage),
            heartbeat_s=self._gateway.settings.heartbeat_s,
            error_frame=error_frame,
            headers=_headers(jobs),
        )

    async def _frames(self, jobs: _Jobs, seen: Sequence[int], *, include_usage: bool) -> AsyncGenerator[bytes]:
        """Yield the frames. If one job fails or the client leaves, all are cancelled."""
        started = time.monotonic()

        def on_first(model: str) -> None:
            if max(seen) < 0:
                self._gateway.metrics.first_token(model, time.monotonic() - started)

        source = frames(jobs.ids, self._gateway.events, include_usage=include_usage, seen=seen, on_first=on_first)
        with self._gateway.abandoning(jobs.ids, outlive=jobs.outlive):
            async with aclosing(source):
                async for frame in source:
                    yield frame

    def _abandon(self, jobs: _Jobs) -> None:
        if jobs.ids and not jobs.outlive:
            self._gateway.abandon(jobs.ids)

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions/{id}`: the whole answer, as soon as it has ended."""
        jobs = await self._known(request)
        if await self._gateway.client.state(jobs.ids[0]) is None:
            raise unknown(jobs.ids[0])
        completion = await unless_left(request, self._whole(jobs))
        return JSONResponse(completion, headers=_headers(jobs))

    async def resume(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions/{id}/stream`: the stream after the events that `Last-Event-ID` names."""
        jobs = await self._known(request)
        seen = seen_by(request.headers.get("last-event-id"), len(jobs.ids))
        include_usage = request.query_params.get("include_usage") == "true"
        return await self._stream(request, jobs, seen, include_usage=include_usage)

    async def cancel(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions/{id}/cancel`."""
        jobs = await self._known(request)
        outcomes = [await self._gateway.cancel(job_id) for job_id in jobs.ids]
        return JSONResponse({"id": jobs.ids[0], "outcome": outcomes[0]}, headers=_headers(jobs))

    async def _known(self, request: Request) -> _Jobs:
        """Return the jobs that the path names. Raises `ApiError` unless they are the caller's."""
        caller = await self._gateway.authenticate(request)
        ids = job_ids_of(request.path_params["id"])
        await self._gateway.check_owner(caller, ids[0])
        return _Jobs(ids, True)


async def _refuse_raw_prompts(request: Request) -> Response:
    message = (
        "/v1/completions is not supported: workers put every prompt into a chat template. Use /v1/chat/completions."
    )
    raise ApiError(400, message, code="unsupported")


def _headers(jobs: _Jobs) -> dict[str, str]:
    return {"x-request-id": jobs.ids[0]}
