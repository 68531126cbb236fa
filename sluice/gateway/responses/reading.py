"""Reads a job into a response: whole, or as server-sent events."""

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeGuard

from sluice.contract.events import Event, Failed, Progress
from sluice.errors import JobFailed
from sluice.gateway import sse
from sluice.gateway.errors import ApiError, from_client, openai_body
from sluice.gateway.gateway import Gateway
from sluice.gateway.monitoring.metrics import AnswerTimer
from sluice.gateway.responses.head import Response, ResponseHead
from sluice.gateway.responses.store import Store
from sluice.gateway.responses.stream import ResponseState
from sluice.openai import exceeds_context
from sluice.sse import take
from sluice.streaming.streams import ReadAhead

_OWN_NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
}
_FIRST_EVENT_S = 1.0  # within which a failure still becomes an HTTP status


class Reading:
    """One reader of a job's events. `timer`: of the request that they answer."""

    def __init__(self, gateway: Gateway, store: Store, head: ResponseHead, *, timer: AnswerTimer | None = None) -> None:
        self._gateway = gateway
        self._store = store
        self._head = head
        self._state = ResponseState(head)
        self._source = ReadAhead(gateway.jobs.events(head.id, timer=timer))
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
            events = await take(self._source, _FIRST_EVENT_S)
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


def own_name(param: str | None) -> str | None:
    """Return the field of a response's request for one of the contract's."""
    name = re.match(r"\w+", param or "")
    return _OWN_NAMES.get(name[0], param) if name else param


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
