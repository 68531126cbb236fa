"""The routes of Anthropic's Messages."""

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.gateway import idempotency, sse
from sluice.gateway.body import Body, read_body
from sluice.gateway.caller import Caller
from sluice.gateway.disconnect import ClientLeft, unless_left
from sluice.gateway.errors import ApiError
from sluice.gateway.gateway import Gateway
from sluice.gateway.messages.body import CountBody, MessagesBody, validate
from sluice.gateway.messages.errors import ID_PREFIX, endpoint, error_body, id_headers
from sluice.gateway.messages.request import chat_request, prompt_fields
from sluice.gateway.messages.stream import PING, MessageEvent, MessageStream, whole_message
from sluice.submission import Submitted
from sluice.wire import Restarted

T = TypeVar("T")

_PATH = "/v1/messages"
_FIRST_VERSION = "2023-06-01"  # later ones add to this form; earlier ones stream another
_INLINE_BYTES = 65_536  # a longer body is validated and translated in a thread


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of Messages."""
    messages = _Messages(gateway)
    return [
        Route(_PATH, endpoint(messages.create), methods=["POST"]),
        Route(f"{_PATH}/count_tokens", endpoint(messages.count_tokens), methods=["POST"]),
    ]


class _Messages:
    """Answers requests for messages and token counts."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/messages`."""
        caller, body = await self._read(request)
        wanted, chat = await _translated(body, _read_message)
        outlives = await self._identify(request, caller, body)
        job_id: str = request.state.request_id
        policy = "continue" if outlives else "cancel"
        submission = self._gateway.submit(caller, chat, job_id=job_id, on_disconnect=policy)
        await self._submit(request, submission, outlives=outlives)
        thinking = wanted.thinking
        omit_thinking = getattr(thinking, "display", None) == "omitted"
        if wanted.stream:
            return await self._stream(request, self._frames(job_id, outlives=outlives, omit_thinking=omit_thinking))
        whole = await self._unless_left(request, self._whole(job_id, omit_thinking=omit_thinking), outlives=outlives)
        return JSONResponse(whole, headers=id_headers(job_id))

    async def count_tokens(self, request: Request) -> Response:
        """Answer `POST /v1/messages/count_tokens`."""
        caller, body = await self._read(request)
        prompt = await _translated(body, _read_prompt)
        job_id: str = request.state.request_id
        submission = self._gateway.submit(caller, prompt, job_id=job_id, function="count")
        await self._submit(request, submission)
        counted = await self._unless_left(request, self._gateway.result(job_id))
        return JSONResponse({"input_tokens": counted["usage"]["prompt_tokens"]}, headers=id_headers(job_id))

    async def _read(self, request: Request) -> tuple[Caller, Body]:
        caller = await self._gateway.authenticate(request)
        version = request.headers.get("anthropic-version", _FIRST_VERSION)
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", version) or version < _FIRST_VERSION:
            message = f"anthropic-version: {version[:40]!r} is not supported; send {_FIRST_VERSION} or a later one."
            raise ApiError(400, message, code="invalid_request")
        return caller, await read_body(request, self._gateway.settings.max_body_bytes)

    async def _identify(self, request: Request, caller: Caller, body: Body) -> bool:
        """Set the job's id to that of its `Idempotency-Key`, if it has one. Returns True if the job outlives its
        client."""
        key = idempotency.key_of(request)
        if key is None:
            return False
        request.state.request_id = idempotency.job_id(caller, _PATH, key, ID_PREFIX)
        job_id: str = request.state.request_id
        await idempotency.claim(self._gateway.redis, self._gateway.retries, job_id, body.digest)
        return True

    async def _submit(self, request: Request, submission: Awaitable[Submitted], *, outlives: bool = False) -> None:
        """Queue the job. Cancels it if the client leaves meanwhile; a job that is refused was not queued."""
        try:
            await unless_left(request, submission)
        except (ClientLeft, asyncio.CancelledError):
            if not outlives:
                self._gateway.abandon([request.state.request_id])
            raise

    async def _unless_left(self, request: Request, work: Awaitable[T], *, outlives: bool = False) -> T:
        """Return what the work returns. Cancels the job if the work fails or the client leaves."""
        with self._gateway.abandoning([request.state.request_id], outlive=outlives):
            return await unless_left(request, work)

    async def _whole(self, job_id: str, *, omit_thinking: bool) -> dict[str, Any]:
        stream, emitted = MessageStream(omit_thinking=omit_thinking), list[MessageEvent]()
        async with aclosing(self._gateway.events(job_id)) as events:
            async for event in events:
                if isinstance(event, Restarted):
                    stream, emitted = MessageStream(omit_thinking=omit_thinking), []
                emitted += stream.events(event)
        return whole_message(emitted)

    async def _stream(self, request: Request, frames: AsyncGenerator[bytes]) -> Response:
        request_id: str = request.state.request_id
        return await sse.stream(
            request,
            frames,
            heartbeat_s=self._gateway.settings.heartbeat_s,
            error_frame=lambda error: _frame(error_body(error, request_id)),
            headers=id_headers(request_id),
            heartbeat=_frame(PING),
        )

    async def _frames(self, job_id: str, *, outlives: bool, omit_thinking: bool) -> AsyncGenerator[bytes]:
        """Yield the frames. If the job fails or the client leaves, it is cancelled."""
        stream = MessageStream(omit_thinking=omit_thinking)
        with self._gateway.abandoning([job_id], outlive=outlives):
            async with aclosing(self._gateway.events(job_id)) as events:
                async for event in events:
                    for each in stream.events(event):
                        yield _frame(each)


async def _translated(body: Body, translate: Callable[[dict[str, Any]], T]) -> T:
    if body.length <= _INLINE_BYTES:
        return translate(body.content)
    return await asyncio.to_thread(translate, body.content)


def _read_message(content: dict[str, Any]) -> tuple[MessagesBody, dict[str, Any]]:
    wanted = validate(MessagesBody, content)
    return wanted, chat_request(wanted)


def _read_prompt(content: dict[str, Any]) -> dict[str, Any]:
    return prompt_fields(validate(CountBody, content))


def _frame(event: MessageEvent) -> bytes:
    return sse.frame(event, event=event["type"])
