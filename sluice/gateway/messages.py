"""The routes of Anthropic's Messages."""

import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.contract.events import Event, Progress, Restarted
from sluice.gateway import sse
from sluice.gateway.body import Body, in_thread_if_long, json_response
from sluice.gateway.caller import Caller
from sluice.gateway.errors import anthropic_endpoint, id_headers
from sluice.gateway.gateway import Gateway
from sluice.gateway.idempotency import expired
from sluice.gateway.jobs import AnswerJobs, Available, StoredAnswer
from sluice.gateway.sse import unless_disconnected
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError, anthropic_body
from sluice.interfaces.messages import committed
from sluice.interfaces.messages.body import CountBody, validate
from sluice.interfaces.messages.request import prompt_fields, read_message
from sluice.interfaces.messages.stream import PING, UNCHANGED, MessageEvent, MessageStream, whole_message
from sluice.presence import mapped_name

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
    """A request whose job is queued. It holds nothing of the body."""

    jobs: AnswerJobs
    model: str  # as the request names it
    stream: bool
    omit_thinking: bool
    ignored: tuple[str, ...] = ()

    @property
    def job_id(self) -> str:
        """The id of the job, and of the message."""
        return self.jobs.ids[0]

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
        timer = self._gateway.timer(accepted.model, started, stream=accepted.stream)
        events = self._gateway.jobs.events(accepted.job_id, timer=timer)
        if accepted.stream:
            return await self._stream(request, accepted, events)
        whole = await self._gateway.whole(request, accepted.jobs, self._whole(events, accepted))
        return await json_response(whole, id_headers(accepted.job_id))

    async def _accept(self, request: Request) -> _Accepted:
        """Read a request, and queue its job or join the one that it has queued before."""
        caller, body = await self._read(request)
        wanted, chat = await in_thread_if_long(body.length, read_message, body.content)

        async def submit(jobs: AnswerJobs) -> None:
            (request.state.request_id,) = jobs.ids
            await self._gateway.submission.submit(caller, {jobs.ids[0]: chat}, jobs)

        async def join(jobs: AnswerJobs, stored: StoredAnswer) -> None:
            """Hold the events so far. Raises `ApiError` 410 if these have expired."""
            (request.state.request_id,) = jobs.ids
            if stored.available is not Available.EVENTS:
                raise expired("the message has expired; use a new key to have it computed again.")
            caller.held.release()
            caller.held.add(stored.event_bytes)

        new_id = request.state.request_id
        jobs, _ = await unless_disconnected(
            request, self._gateway.accept(request, caller, body, _PATH, new_id, submit=submit, join=join)
        )
        return _Accepted(jobs, wanted.model, bool(wanted.stream), wanted.omits_thinking, body.ignored)

    async def count_tokens(self, request: Request) -> Response:
        """Answer `POST /v1/messages/count_tokens`."""
        caller, body = await self._read(request)
        prompt = await in_thread_if_long(body.length, _read_prompt, body.content)
        jobs = AnswerJobs([job_id := request.state.request_id])
        submitting = self._gateway.submission.submit(caller, {job_id: prompt}, jobs, function="count")
        await unless_disconnected(request, submitting)
        counted = await self._gateway.whole(request, jobs, self._gateway.jobs.result(job_id))
        return JSONResponse({"input_tokens": counted["usage"]["prompt_tokens"]}, headers=id_headers(job_id))

    async def _read(self, request: Request) -> tuple[Caller, Body]:
        caller = await self._gateway.authenticate(request)
        version = request.headers.get("anthropic-version", _FIRST_VERSION)
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", version) or version < _FIRST_VERSION:
            message = f"anthropic-version: {version[:40]!r} is not supported; send {_FIRST_VERSION} or a later one."
            raise ApiError(ErrorForm.INVALID_REQUEST, message)
        return caller, await self._gateway.read_body(request, caller, committed.messages)

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
        return await self._gateway.stream(
            request,
            accepted.jobs,
            self._frames(stream, events),
            error_frame=lambda error: _frame(anthropic_body(error, job_id)),
            headers=id_headers(job_id),
            heartbeat=lambda: _frame(stream.keep_alive(job_id, model, between_blocks=between_blocks)),
        )

    async def _frames(self, stream: MessageStream, source: AsyncGenerator[Event]) -> AsyncGenerator[bytes]:
        async with aclosing(source) as events:
            async for event in events:
                if isinstance(event, Progress) and not event.stored:
                    yield sse.waiting(event) + _frame(PING)
                for each in stream.events(event):
                    yield _frame(each)


def _read_prompt(content: dict[str, Any]) -> dict[str, Any]:
    return prompt_fields(validate(CountBody, content))


def _frame(event: MessageEvent) -> bytes:
    return sse.frame(event, event=event["type"])
