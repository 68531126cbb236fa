"""The routes of Anthropic's Messages."""

import re
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.contract.events import Event, Progress, Restarted
from sluice.gateway import committed, idempotency, sse
from sluice.gateway.body import Body
from sluice.gateway.caller import Caller
from sluice.gateway.disconnect import unless_disconnected
from sluice.gateway.errors import ANTHROPIC_ID_PREFIX, ApiError, anthropic_body, anthropic_endpoint, id_headers
from sluice.gateway.gateway import Gateway
from sluice.gateway.idempotency import expired
from sluice.gateway.jobs.jobs import Available
from sluice.gateway.messages.body import CountBody, MessagesBody, validate
from sluice.gateway.messages.request import chat_request, prompt_fields
from sluice.gateway.messages.stream import PING, UNCHANGED, MessageEvent, MessageStream, whole_message
from sluice.gateway.threads import in_thread_if_long, json_response
from sluice.http_errors import ErrorForm
from sluice.presence import mapped_name

T = TypeVar("T")

_PATH = "/v1/messages"
_CLAUDE_CODE = "claude-cli/"  # the beginning of its User-Agent
_FIRST_VERSION = "2023-06-01"  # later ones add to this form; earlier ones stream another


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of Messages."""
    messages = _Messages(gateway)
    return [
        Route(_PATH, anthropic_endpoint(messages.create), methods=["POST"]),
        Route(f"{_PATH}/count_tokens", anthropic_endpoint(messages.count_tokens), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request whose job is queued. It holds nothing of the body. `retry_key`: where a retry finds the job for a while
    after the client has left; without one, the job continues then."""

    job_id: str
    model: str  # as the request names it
    stream: bool
    omit_thinking: bool
    retry_key: str | None
    ignored: tuple[str, ...] = ()

    def new_stream(self) -> MessageStream:
        """Return the state of a stream of the message, before its first event."""
        return MessageStream(omit_thinking=self.omit_thinking, ignored=self.ignored)


class _Messages:
    """Answers requests for messages and token counts."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/messages`."""
        started = time.monotonic()
        accepted = await self._accept(request)
        job_id = accepted.job_id
        timer = self._gateway.timer(accepted.model, started, stream=accepted.stream)
        events = self._gateway.jobs.events(job_id, timer=timer)
        if accepted.stream:
            return await self._stream(request, accepted, events)
        reading = self._whole(events, accepted)
        detached, retry_key = accepted.retry_key is None, accepted.retry_key
        whole = await self._unless_disconnected(request, reading, detached=detached, retry_key=retry_key)
        return await json_response(whole, id_headers(job_id))

    async def _accept(self, request: Request) -> _Accepted:
        """Read a request, and queue its job or find that of its `Idempotency-Key`."""
        caller, body = await self._read(request)
        wanted, chat = await in_thread_if_long(body.length, _read_message, body.content)
        omits = getattr(wanted.thinking, "display", None) == "omitted"
        key = idempotency.key_of(request)
        retry_key = await idempotency.retry_key(caller, _PATH, body) if key is None else None
        if retry_key is not None:
            submitting = self._submit_or_return(caller, request.state.request_id, chat, retry_key)
            request.state.request_id = await unless_disconnected(request, submitting)
        else:
            assert key is not None
            request.state.request_id = idempotency.job_id(caller, _PATH, key, ANTHROPIC_ID_PREFIX)
            await unless_disconnected(request, self._submit_once(caller, request.state.request_id, chat, body.digest))
        job_id: str = request.state.request_id
        return _Accepted(job_id, wanted.model, bool(wanted.stream), omits, retry_key, body.ignored)

    async def _submit_or_return(self, caller: Caller, job_id: str, chat: dict[str, Any], retry_key: str) -> str:
        """Queue the job of a request without a key, or return to the one that it has queued before its client left.
        Returns the id of the job."""
        if (returned := await self._gateway.jobs.returned(retry_key)) is None:
            await self._submit(caller, job_id, chat)
            return job_id
        (found,), stored = returned
        with self._gateway.jobs.abandoning([found], detached=False):
            caller.held.release()
            caller.held.add(stored.event_bytes)
        return found

    async def _submit(self, caller: Caller, job_id: str, chat: dict[str, Any], *, has_key: bool = False) -> None:
        """Queue the job. After that the caller holds nothing of the body."""
        await self._gateway.submission.submit(caller, {job_id: chat}, detached=has_key, has_key=has_key)
        caller.held.release()

    async def _submit_once(self, caller: Caller, job_id: str, chat: dict[str, Any], digest: str) -> None:
        """Queue the job of a key, or join the one that was queued before: the caller holds its events so far. Raises
        `ApiError` 410 if these have expired."""
        async with self._gateway.idempotency_keys.registered(job_id, [job_id], digest) as was_queued:
            if not was_queued:
                return await self._submit(caller, job_id, chat, has_key=True)
            stored = await self._gateway.jobs.stored([job_id])
            if stored.available is not Available.EVENTS:
                raise expired("the message has expired; use a new key to have it computed again.")
            caller.held.release()
            caller.held.add(stored.event_bytes)

    async def count_tokens(self, request: Request) -> Response:
        """Answer `POST /v1/messages/count_tokens`."""
        caller, body = await self._read(request)
        prompt = await in_thread_if_long(body.length, _read_prompt, body.content)
        job_id: str = request.state.request_id
        await unless_disconnected(request, self._gateway.submission.submit(caller, {job_id: prompt}, function="count"))
        caller.held.release()
        counted = await self._unless_disconnected(request, self._gateway.jobs.result(job_id), detached=False)
        return JSONResponse({"input_tokens": counted["usage"]["prompt_tokens"]}, headers=id_headers(job_id))

    async def _read(self, request: Request) -> tuple[Caller, Body]:
        caller = await self._gateway.authenticate(request)
        version = request.headers.get("anthropic-version", _FIRST_VERSION)
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", version) or version < _FIRST_VERSION:
            message = f"anthropic-version: {version[:40]!r} is not supported; send {_FIRST_VERSION} or a later one."
            raise ApiError(ErrorForm.INVALID_REQUEST, message)
        return caller, await self._gateway.read_body(request, caller, committed.messages)

    async def _unless_disconnected(
        self, request: Request, work: Coroutine[Any, Any, T], *, detached: bool, retry_key: str | None = None
    ) -> T:
        """Return what the work returns. Cancels the job if the work fails or the client leaves."""
        with self._gateway.jobs.abandoning([request.state.request_id], detached=detached, retry_key=retry_key):
            return await unless_disconnected(request, work)

    async def _whole(self, source: AsyncGenerator[Event], accepted: _Accepted) -> dict[str, Any]:
        stream, emitted = accepted.new_stream(), list[MessageEvent]()
        async with aclosing(source) as events:
            async for event in events:
                if isinstance(event, Restarted):
                    stream, emitted = accepted.new_stream(), []
                emitted += stream.events(event)
        return whole_message(emitted)

    async def _stream(self, request: Request, accepted: _Accepted, events: AsyncGenerator[Event]) -> Response:
        stream, job_id = accepted.new_stream(), accepted.job_id
        is_claude_code = request.headers.get("user-agent", "").startswith(_CLAUDE_CODE)
        between_blocks = UNCHANGED if is_claude_code else PING
        model = mapped_name(accepted.model, self._gateway.settings.model_map)
        return await sse.stream(
            request,
            self._frames(stream, job_id, events, accepted.retry_key),
            heartbeat_s=self._gateway.settings.heartbeat_s,
            error_frame=lambda error: _frame(anthropic_body(error, job_id)),
            headers=id_headers(job_id),
            heartbeat=lambda: _frame(stream.keep_alive(job_id, model, between_blocks=between_blocks)),
        )

    async def _frames(
        self, stream: MessageStream, job_id: str, source: AsyncGenerator[Event], retry_key: str | None
    ) -> AsyncGenerator[bytes]:
        """Yield the frames. If the job fails or the client leaves, it is cancelled."""
        with self._gateway.jobs.abandoning([job_id], detached=retry_key is None, retry_key=retry_key):
            async with aclosing(source) as events:
                async for event in events:
                    if isinstance(event, Progress) and not event.stored:
                        yield sse.waiting(event) + _frame(PING)
                    for each in stream.events(event):
                        yield _frame(each)


def _read_message(content: dict[str, Any]) -> tuple[MessagesBody, dict[str, Any]]:
    wanted = validate(MessagesBody, content)
    return wanted, chat_request(wanted)


def _read_prompt(content: dict[str, Any]) -> dict[str, Any]:
    return prompt_fields(validate(CountBody, content))


def _frame(event: MessageEvent) -> bytes:
    return sse.frame(event, event=event["type"])
