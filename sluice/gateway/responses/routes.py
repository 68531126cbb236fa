"""The routes of responses."""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from sluice.errors import UnknownJob
from sluice.gateway import idempotency, sse
from sluice.gateway.body import Body, read_body
from sluice.gateway.caller import Caller
from sluice.gateway.disconnect import unless_left
from sluice.gateway.errors import ApiError, endpoint, was_refused
from sluice.gateway.gateway import Gateway
from sluice.gateway.responses.events.head import PREFIX, Head, skeleton
from sluice.gateway.responses.history import Conversation, History
from sluice.gateway.responses.listing import page
from sluice.gateway.responses.new import NewResponse, new_response
from sluice.gateway.responses.reading import Reading
from sluice.gateway.responses.record import Record, parse_record
from sluice.gateway.responses.request.body import ResponseRequest, read_request
from sluice.gateway.responses.store import Store
from sluice.gateway.responses.threads import in_thread_if_long

logger = logging.getLogger("sluice.serve")

_PATH = "/v1/responses"
_CANCEL_WAIT_S = 5.0  # for the end of a running job that was cancelled


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of responses."""
    responses = _Responses(gateway)
    one = f"{_PATH}/{{id}}"
    return [
        Route(_PATH, endpoint(responses.create), methods=["POST"]),
        Route(one, endpoint(responses.retrieve), methods=["GET"]),
        Route(one, endpoint(responses.delete), methods=["DELETE"]),
        Route(f"{one}/cancel", endpoint(responses.cancel), methods=["POST"]),
        Route(f"{one}/input_items", endpoint(responses.input_items), methods=["GET"]),
    ]


class _Responses:
    """Answers requests for responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = Store(gateway.redis, gateway.retries, gateway.settings.response_ttl_s)
        self._history = History(gateway, self._store)

    async def create(self, http: Request) -> HttpResponse:
        """Answer `POST /v1/responses`."""
        caller = await self._gateway.authenticate(http)
        body = await read_body(http, self._gateway.settings.max_body_bytes)
        request = await in_thread_if_long(body.length, read_request, body.content)
        response_id, has_key = await self._id(http, caller, body)
        before = Conversation()
        if request.previous is not None:
            before = await self._history.conversation(caller, request.previous)
        make = partial(new_response, request, before, response_id, caller.tenant)
        new = await (asyncio.to_thread(make) if before.items else in_thread_if_long(body.length, make))
        outlives = has_key or request.background
        record = await unless_left(http, self._submit(caller, request, new, outlives=outlives))
        if request.background and not request.stream:
            known = await self._history.current(record) if has_key else {**skeleton(record.head), "status": "queued"}
            return _json(known, _headers(record.head))
        return await self._answer(http, request, record.head, outlives=outlives)

    async def _id(self, http: Request, caller: Caller, body: Body) -> tuple[str, bool]:
        """Return the id of the response, and True if it is that of the request's `Idempotency-Key`."""
        key = idempotency.key_of(http)
        if key is None:
            return PREFIX + uuid.uuid4().hex, False
        response_id = idempotency.job_id(caller, _PATH, key, PREFIX)
        await idempotency.claim(self._gateway.redis, self._gateway.retries, response_id, body.digest)
        return response_id, True

    async def _submit(self, caller: Caller, request: ResponseRequest, new: NewResponse, *, outlives: bool) -> Record:
        """Store the record, and queue the job. Returns the record of the response that is joined, if it exists already.
        Raises `ApiError`, `SluiceError`."""
        response_id, written = new.record.head.id, new.written
        if new.dropped:
            logger.info("response %s: without the hosted tools %s", response_id, ", ".join(new.dropped))
        if request.store:
            written = await self._store.create(response_id, new.written)
        try:
            policy = "continue" if outlives else "cancel"
            await self._gateway.submit(caller, new.chat, job_id=response_id, on_disconnect=policy)
        except BaseException as error:
            if written == new.written:
                await asyncio.shield(self._store.delete(response_id))
            if not outlives and not was_refused(error):
                self._gateway.abandon([response_id])
            raise
        return new.record if written == new.written else parse_record(written)

    async def _answer(self, http: Request, request: ResponseRequest, head: Head, *, outlives: bool) -> HttpResponse:
        reading = Reading(self._gateway, self._store, head, outlives=outlives)
        if request.stream:
            return await self._stream(http, reading, reading.frames(refuses=True), head)
        return _json(await unless_left(http, reading.whole()), _headers(head))

    async def _stream(self, http: Request, reading: Reading, frames: AsyncGenerator[bytes], head: Head) -> HttpResponse:
        return await sse.stream(
            http,
            frames,
            heartbeat_s=self._gateway.settings.heartbeat_s,
            error_frame=reading.error_frame,
            headers=_headers(head),
        )

    async def retrieve(self, http: Request) -> HttpResponse:
        """Answer `GET /v1/responses/{id}`: the response, or with `stream=true` its events."""
        record = await self._find(http)
        if http.query_params.get("stream", "false").lower() != "true":
            return _json(await self._history.current(record))
        after = _starting_after(http.query_params, http.headers.get("last-event-id"))
        if not await self._history.has_events(record):
            problem = "stream: the events of the response have expired; retrieve it without stream."
            raise ApiError(400, problem, code="stream_expired", param="stream")
        reading = Reading(self._gateway, self._store, record.head, outlives=True)
        return await self._stream(http, reading, reading.frames(after, refuses=False), record.head)

    async def cancel(self, http: Request) -> HttpResponse:
        """Answer `POST /v1/responses/{id}/cancel`: the response after its end."""
        record = await self._find(http)
        if await self._gateway.cancel(record.head.id) == "requested":
            await self._wait_for_end(record)
        return _json(await self._history.current(record))

    async def delete(self, http: Request) -> HttpResponse:
        """Answer `DELETE /v1/responses/{id}`. The job of a response that has not ended is cancelled."""
        record = await self._find(http)
        await self._gateway.cancel(record.head.id)
        await self._store.delete(record.head.id)
        return _json({"id": record.head.id, "object": "response", "deleted": True})

    async def input_items(self, http: Request) -> HttpResponse:
        """Answer `GET /v1/responses/{id}/input_items`."""
        record = await self._find(http)
        return _json(page(await self._history.items(record), http.query_params))

    async def _find(self, http: Request) -> Record:
        caller = await self._gateway.authenticate(http)
        return await self._history.find(caller, http.path_params["id"])

    async def _wait_for_end(self, record: Record) -> None:
        try:
            async with asyncio.timeout(_CANCEL_WAIT_S):
                async for _ in self._gateway.events(record.head.id):
                    pass
        except (TimeoutError, UnknownJob):
            pass


def _starting_after(query: Mapping[str, str], last_event_id: str | None) -> int:
    """Return the number of the last event that the client has; -1 for none. Raises `ApiError`."""
    given = query.get("starting_after")
    if given is None:
        return sse.seq_of(last_event_id)
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        problem = "starting_after: it must be the sequence_number of an event."
        raise ApiError(400, problem, code="invalid_value", param="starting_after")
    return int(given)


def _headers(head: Head) -> dict[str, str]:
    return {"x-request-id": head.id}


def _json(body: Any, headers: Mapping[str, str] | None = None) -> HttpResponse:
    """Return a JSON response. Half a surrogate pair from the request is written as an escape."""
    return HttpResponse(json.dumps(body), media_type="application/json", headers=dict(headers or {}))
