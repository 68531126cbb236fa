"""The routes of responses."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from sluice.contract.events import Event, Failed, Progress
from sluice.errors import JobFailed, SluiceError, UnknownJob
from sluice.gateway import idempotency, sse
from sluice.gateway.body import Body, in_thread, in_thread_if_long, json_response
from sluice.gateway.caller import Caller
from sluice.gateway.errors import endpoint
from sluice.gateway.gateway import Gateway
from sluice.gateway.idempotency import expired
from sluice.gateway.jobs import AnswerJobs, Available, StoredAnswer
from sluice.gateway.monitoring import AnswerTimer, identify
from sluice.gateway.responses.history import History, Store, page
from sluice.gateway.sse import unless_disconnected
from sluice.http_errors import ErrorForm
from sluice.interfaces import committed
from sluice.interfaces.errors import ApiError, from_client, openai_body
from sluice.interfaces.fields import refusal
from sluice.interfaces.responses.record import (
    PREFIX,
    NewResponse,
    Record,
    Response,
    ResponseHead,
    new_response,
    parse_record,
    skeleton,
)
from sluice.interfaces.responses.request import ResponseRequest, own_name, read_response_request
from sluice.interfaces.responses.stream import ResponseState
from sluice.openai import exceeds_context
from sluice.sse import take
from sluice.streaming import BackgroundReader

logger = logging.getLogger("sluice.gateway")


class _Reading:
    """One reader of a job's events. `timer`: of the request that they answer."""

    def __init__(self, gateway: Gateway, store: Store, head: ResponseHead, *, timer: AnswerTimer | None = None) -> None:
        self._gateway = gateway
        self._store = store
        self._head = head
        self._state = ResponseState(head)
        self._source = BackgroundReader(gateway.jobs.events(head.id, timer=timer))
        self._is_over = False
        self._last_number = 0  # of the last event that was framed

    async def whole(self) -> Response:
        """Return the response after the job's end, and store it if the request said so. Raises `ApiError`."""
        try:
            while events := await self._source.take():
                for event in events:
                    await self._check(event)
                    self._state.add(event)
            await self._store_end()
            return self._state.response
        finally:
            await asyncio.shield(self._source.close())

    async def frames(self, after: int = -1, *, refuses: bool) -> AsyncGenerator[bytes]:
        """Yield the stream's events after number `after`, as server-sent events.

        The stream ends with the response, or with the event `error` if the job starts over. With `refuses`, raises
        `ApiError` if that is the job's first event, before the first frame. A prompt that is too long fails in the
        stream all the same: Codex compacts its conversation only after `response.failed`.
        """
        try:
            events = await take(self._source, 1.0)  # seconds within which a failure still becomes an HTTP status
            if refuses and events and not _is_overflow(events[0]):
                await self._check(events[0])
            made = self._state.opening()
            while events != []:
                waits = b"".join(sse.waiting(each) for each in events or () if _is_wait(each))
                made += await self._add(events or (), after)
                self._last_number = made[-1]["sequence_number"] if made else self._last_number
                if frames := waits + _framed(made, after):
                    yield frames
                made, events = [], [] if self._is_over else await self._source.take()
        finally:
            await asyncio.shield(self._source.close())

    def keep_alive(self) -> bytes:
        """Return the event for a silence, as OpenAI sends it; Codex counts events as signs of life, comments not. It is
        not one of the numbered events: its number is that of the one before it."""
        return sse.frame({"type": "keepalive", "sequence_number": self._last_number}, event="keepalive")

    def error_frame(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed on the way to the client. It is not one of the numbered events:
        a stream that continues after the one before it does not have it."""
        number = max(self._state.count - 1, 0)
        return sse.frame(error_event(error, number), event="error")

    async def _add(self, events: Sequence[Event], after: int) -> list[dict[str, Any]]:
        made = list[dict[str, Any]]()
        for event in events:
            made += self._state.add(event)
            if made and made[-1]["type"] == "error" and made[-1]["sequence_number"] > after:
                self._is_over = True
                return made
        if self._state.ended:
            self._is_over = True
            await self._store_end()
        return made

    async def _store_end(self) -> None:
        if self._head.echo["store"] and self._state.ended:
            await self._store.store_final(self._state.response)

    async def _check(self, event: Event) -> None:
        """Raise `ApiError` for a failure. Nothing is kept of such a response."""
        if isinstance(event, Failed):
            await self._store.delete(self._head.id)
            failure = from_client(JobFailed(event.error))
            failure.param = own_name(failure.param)
            raise failure


def _is_wait(event: Event) -> TypeGuard[Progress]:
    return isinstance(event, Progress) and not event.stored


def _is_overflow(event: Event) -> bool:
    return isinstance(event, Failed) and exceeds_context(event.error)


def error_event(error: ApiError, number: int) -> dict[str, Any]:
    """Return an error as an event of a stream, with OpenAI's `error` beside, which its clients raise."""
    body = openai_body(error)
    fields = {name: body["error"][name] for name in ("code", "message", "param")}
    return {"type": "error", **fields, "sequence_number": number, **body}


def _framed(events: Sequence[dict[str, Any]], after: int) -> bytes:
    return b"".join(
        sse.frame(event, event=event["type"], id=event["sequence_number"])
        for event in events
        if event["sequence_number"] > after
    )


_PATH = "/v1/responses"


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


@dataclass(frozen=True)
class _Accepted:
    """A request whose job is queued, or was before. `response` is the answer if no event has to be awaited."""

    head: ResponseHead
    stream: bool
    response: Response | None = None


class _Responses:
    """Answers requests for responses."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = Store(gateway.client, gateway.settings.response_ttl_s)
        self._history = History(gateway, self._store)

    async def create(self, http: Request) -> HttpResponse:
        """Answer `POST /v1/responses`."""
        started = time.monotonic()
        jobs, accepted = await self._accept(http)
        head = accepted.head
        identify(http, head.id)
        if accepted.response is not None:
            return await json_response(accepted.response)
        timer = self._gateway.timer(head.echo["model"], started, stream=accepted.stream)
        reading = _Reading(self._gateway, self._store, head, timer=timer)
        if accepted.stream:
            return await self._stream(http, jobs, reading, reading.frames(refuses=True))
        return await json_response(await self._gateway.whole(http, jobs, reading.whole()))

    async def _accept(self, http: Request) -> tuple[AnswerJobs, _Accepted]:
        """Queue the job of a request, or join the one that it has queued before."""
        caller = await self._gateway.authenticate(http)
        body = await self._gateway.read_body(http, caller, committed.responses)
        request = await in_thread_if_long(body.length, read_response_request, body.content)
        request = replace(request, ignored=body.ignored)

        async def submit(jobs: AnswerJobs) -> _Accepted:
            return await self._queue(caller, request, await self._new(caller, request, body, jobs.ids[0]), jobs)

        async def join(jobs: AnswerJobs, stored: StoredAnswer) -> _Accepted:
            return await self._join(caller, request, body, jobs.ids[0], stored)

        new_id = f"{PREFIX}{uuid.uuid4().hex}"
        accepting = self._gateway.accept(
            http, caller, body, _PATH, new_id, submit=submit, join=join, continues=request.background
        )
        return await unless_disconnected(http, accepting)

    async def _new(self, caller: Caller, request: ResponseRequest, body: Body, response_id: str) -> NewResponse:
        request = replace(request, items=await self._history.resolved(caller, request.items))
        if request.previous is None:
            return await in_thread_if_long(body.length, new_response, request, response_id, caller.tenant)
        previous, earlier = await self._history.conversation(caller, request.previous)
        return await in_thread(new_response, request, response_id, caller.tenant, previous, earlier)

    async def _queue(self, caller: Caller, request: ResponseRequest, new: NewResponse, jobs: AnswerJobs) -> _Accepted:
        """Queue the job and store the record, in one step. A job that another request with the same key has queued is
        joined. Raises `ApiError`, `SluiceError`."""
        head = new.record.head
        if new.dropped:
            logger.info("response %s: without the hosted tools %s", head.id, ", ".join(new.dropped))
        (submitted,) = await self._gateway.submission.submit(
            caller,
            {head.id: new.chat},
            jobs,
            extra_keys=[self._store.record(head.id, new.written)] if request.store else [],
            webhooks="response" if request.background else "none",
        )
        # Without a record the request has `store: false`, or the job has failed: the job's events are the answer.
        if not submitted.new and (stored := await self._store.read(head.id)) is not None:
            head = (await _parsed(stored)).head
        if not request.background or request.stream:
            return _Accepted(head, request.stream)
        return _Accepted(head, False, {**skeleton(head), "status": "queued"})

    async def _join(
        self, caller: Caller, request: ResponseRequest, body: Body, response_id: str, stored: StoredAnswer
    ) -> _Accepted:
        """Find the response that an earlier request has queued. The caller holds what is stored of it.
        Raises `ApiError` 410 if what the request asks for has expired."""
        caller.held.release()
        caller.held.add(await self._store.length(response_id))
        raw = await self._store.read(response_id)
        caller.held.add(stored.event_bytes)
        if raw is None:
            # With events it has `store: false`, or has failed: the events are the answer, under a new `created_at`.
            if stored.available is not Available.EVENTS:
                raise expired("the response has expired or was deleted; use a new key to have it computed again.")
            return _Accepted((await self._new(caller, request, body, response_id)).record.head, request.stream)
        record = await _parsed(raw)
        if stored.available is Available.EVENTS and (request.stream or not request.background):
            return _Accepted(record.head, request.stream)
        if request.stream:
            raise expired(f"the events of the response have expired; retrieve it at {_PATH}/{response_id}.")
        return _Accepted(record.head, False, await self._history.current(record))

    async def _stream(
        self, http: Request, jobs: AnswerJobs, reading: _Reading, frames: AsyncGenerator[bytes]
    ) -> HttpResponse:
        return await self._gateway.stream(
            http, jobs, frames, error_frame=reading.error_frame, heartbeat=reading.keep_alive
        )

    async def retrieve(self, http: Request) -> HttpResponse:
        """Answer `GET /v1/responses/{id}`: the response, or with `stream=true` its events."""
        caller, record = await self._find(http)
        if not _streams(http.query_params):
            await caller.count_request()
            return await self._current(record)
        after = _starting_after(http.query_params, http.headers.get("last-event-id"))
        if not await self._history.has_events(record):
            problem = "the events of the response have expired; retrieve it without stream."
            raise refusal("stream", problem, ErrorForm.STREAM_EXPIRED)
        caller.held.add((await self._gateway.jobs.stored([record.head.id])).event_bytes)
        reading = _Reading(self._gateway, self._store, record.head)
        jobs = AnswerJobs([record.head.id], detached=True)
        return await self._stream(http, jobs, reading, reading.frames(after, refuses=False))

    async def cancel(self, http: Request) -> HttpResponse:
        """Answer `POST /v1/responses/{id}/cancel`: the response after its end."""
        _, record = await self._find(http)
        if await self._gateway.client.cancel(record.head.id) == "requested":
            await self._wait_for_end(record.head.id)
        return await self._current(record)

    async def delete(self, http: Request) -> HttpResponse:
        """Answer `DELETE /v1/responses/{id}`. If the job has not ended, it is cancelled, and its content deleted at
        its end."""
        _, record = await self._find(http)
        response_id = record.head.id
        await self._gateway.client.cancel(response_id)
        await self._store.delete(response_id)
        if not await self._store.delete_content(response_id):
            self._gateway.jobs.in_background(self._delete_later(response_id))
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _delete_later(self, response_id: str) -> None:
        """Delete the content of a response when its job has ended. If the gateway ends before that, they expire."""
        try:
            for _ in range(120):  # ten minutes, after which a worker has taken over a dead one's job
                await self._wait_for_end(response_id)
                if await self._store.delete_content(response_id):
                    return
        except (ApiError, SluiceError, RedisError) as error:
            logger.warning("response %s: its text was not deleted: %s", response_id, error)

    async def input_items(self, http: Request) -> HttpResponse:
        """Answer `GET /v1/responses/{id}/input_items`."""
        caller, record = await self._find(http)
        await caller.count_request()
        return await json_response(page(await self._history.items(caller, record), http.query_params))

    async def _find(self, http: Request) -> tuple[Caller, Record]:
        """Return the caller, and the record that the path names."""
        caller = await self._gateway.authenticate(http)
        record = await self._history.find(caller, http.path_params["id"])
        identify(http, record.head.id)
        return caller, record

    async def _current(self, record: Record) -> HttpResponse:
        """Return the response as it is now."""
        if (stored := await self._store.final_json(record.head.id)) is not None:
            return HttpResponse(stored, media_type="application/json")
        return await json_response(await self._history.current(record))

    async def _wait_for_end(self, response_id: str) -> None:
        """Wait until a job that was cancelled has ended, but for 5 s at most."""
        try:
            async with asyncio.timeout(5.0):
                async for _ in self._gateway.jobs.events(response_id):
                    pass
        except (TimeoutError, UnknownJob):
            pass


async def _parsed(raw: bytes) -> Record:
    """Parse the record that another request with the same key has stored. Raises `ApiError` 409 if another version of
    the gateway has written it."""
    record = await in_thread_if_long(len(raw), parse_record, raw)
    if record is None:
        raise idempotency.other_version()
    return record


def _streams(query: Mapping[str, str]) -> bool:
    """Return True if the query asks for the events. Raises `ApiError`."""
    streams = query.get("stream", "false").lower()
    if streams not in ("true", "false"):
        raise refusal("stream", "it must be true or false.")
    if streams == "false" and "starting_after" in query:
        raise refusal("starting_after", "it is for streams; add stream=true.")
    return streams == "true"


def _starting_after(query: Mapping[str, str], last_event_id: str | None) -> int:
    """Return the number of the last event that the client has; -1 for none. Raises `ApiError`."""
    given = query.get("starting_after")
    if given is None:
        return sse.seq_of_header(last_event_id)
    if not (given.isascii() and given.isdigit() and len(given) < 16):
        raise refusal("starting_after", "it must be the sequence_number of an event.")
    return int(given)
