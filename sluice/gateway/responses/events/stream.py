"""The events of a response's stream: a pure function of its head and of the job's log, from the log's first event.

So every gateway numbers them alike, and a stream continues after any `sequence_number` on any gateway. Progress and
resumption of a job make no event, and heartbeats are comments outside of the numbering.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from sluice import wire
from sluice.gateway.responses.events.head import Head, Response, skeleton
from sluice.gateway.responses.events.output import (
    CustomCallItem,
    Event,
    FunctionCallItem,
    Item,
    MessageItem,
    OutputItem,
    ReasoningItem,
)
from sluice.gateway.responses.events.usage import as_usage
from sluice.openai import CONTEXT_EXCEEDED, exceeds_context

# OpenAI's codes for what a request causes, and for all else.
_CODES = {"invalid_request": "invalid_prompt", "unsupported": "invalid_prompt", "too_large": "invalid_prompt"}
_OUR_FAULT = "server_error"
_RESTARTED = (
    "The job starts over on another worker, and the output so far is not valid. Drop it, and retrieve the response or "
    "its events after this one."
)


class ResponseState:
    """The state of a response after some of the log's events."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._targets = head.tools()
        self._status = "queued" if head.background else "in_progress"
        self._next = 0
        self._started = False
        self._ending: dict[str, Any] = {}  # fields that the final event sets
        self._closed = list[Item]()
        self._open: OutputItem | None = None
        self._call: int | None = None  # the contract's index of the open call

    @property
    def ended(self) -> bool:
        """True after the job's final event."""
        return bool(self._ending)

    @property
    def count(self) -> int:
        """Number of the stream's events so far."""
        return self._next

    @property
    def response(self) -> Response:
        """The response as far as the events go."""
        still = [] if self._open is None else [self._open.item("in_progress")]
        return {**skeleton(self._head), "status": self._status, "output": self._closed + still, **self._ending}

    def opening(self) -> list[Event]:
        """Return the events that precede the log's."""
        kinds = ("response.created", "response.queued") if self._head.background else ("response.created",)
        return self._numbered({"type": kind, "response": self.response} for kind in kinds)

    def add(self, event: wire.Event) -> list[Event]:
        """Return the events for the next event of the log."""
        match event:
            case wire.Restarted() if self._closed or self._open:
                return self._numbered(self._restart())
            case wire.Started():
                return self._numbered(self._start())
            case wire.Delta():
                return self._numbered(self._write(event))
            case wire.Finished():
                return self._numbered(self._finish(event))
            case wire.Failed(error=error, usage=usage):
                return self._numbered(self._fail(error, usage))
            case wire.Cancelled(usage=usage):
                return self._numbered(self._break_off("cancelled", "response.incomplete", usage))
        return []

    def _numbered(self, events: Iterable[Event]) -> list[Event]:
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(events, self._next)]
        self._next += len(numbered)
        return numbered

    def _start(self) -> Iterator[Event]:
        self._status = "in_progress"
        if not self._started:
            self._started = True
            yield {"type": "response.in_progress", "response": self.response}

    def _restart(self) -> Iterator[Event]:
        self._closed = []
        self._open = None
        self._call = None
        reason = {"code": "restarted", "message": _RESTARTED, "param": None}
        yield {"type": "error", **reason, "error": {**reason, "type": "server_error"}}

    def _write(self, event: wire.Delta) -> Iterator[Event]:
        if event.reasoning:
            yield from self._append(ReasoningItem, event.reasoning)
        if event.content or (event.logprobs and isinstance(self._open, MessageItem)):
            yield from self._append(MessageItem, event.content or "", event.logprobs or ())
        for delta in event.tool_calls or ():
            yield from self._append_call(delta)

    def _append(
        self, kind: type[ReasoningItem | MessageItem], text: str, logprobs: tuple[dict[str, Any], ...] = ()
    ) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self._replace(kind(self._head, self._next_index()))
        assert self._open is not None
        yield from self._open.append(text, logprobs)

    def _append_call(self, delta: dict[str, Any]) -> Iterator[Event]:
        function = delta["function"]
        if self._call != delta["index"] or not isinstance(self._open, FunctionCallItem | CustomCallItem):
            target = self._targets.target(function.get("name", ""))
            kind = CustomCallItem if target.is_custom else FunctionCallItem
            yield from self._replace(kind(self._head, self._next_index(), delta.get("id", ""), target))
            self._call = delta["index"]
        assert self._open is not None
        if arguments := function.get("arguments"):
            yield from self._open.append(arguments)

    def _next_index(self) -> int:
        return len(self._closed) + (self._open is not None)

    def _replace(self, item: OutputItem) -> Iterator[Event]:
        yield from self._close("completed")
        self._open = item
        yield from item.opening()

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.closing(status)
            self._closed.append(self._open.item(status))
        self._open, self._call = None, None

    def _finish(self, event: wire.Finished) -> Iterator[Event]:
        is_cut = event.finish_reason == "length"
        yield from self._close("incomplete" if is_cut else "completed")
        self._status = "incomplete" if is_cut else "completed"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        ended_at = {} if is_cut else {"completed_at": int(event.ts)}
        self._ending = {**ended_at, **details, "usage": as_usage(event.usage)}
        yield {"type": f"response.{self._status}", "response": self.response}

    def _fail(self, error: wire.JobError, usage: wire.Usage) -> Iterator[Event]:
        """End with the failure. Before one of a prompt that is too long, OpenAI's API sends the event `error`, by which
        its libraries know it; Codex knows it by the final event."""
        code = _CODES.get(error.type, _OUR_FAULT)
        if exceeds_context(error):
            code = CONTEXT_EXCEEDED
            reason = {"code": code, "message": error.message, "param": "input"}
            yield {"type": "error", **reason, "error": {**reason, "type": "invalid_request_error"}}
        yield from self._break_off("failed", "response.failed", usage, error={"code": code, "message": error.message})

    def _break_off(self, status: str, kind: str, usage: wire.Usage, **ending: Any) -> Iterator[Event]:
        """End without closing the open item: clients must not act upon half a call."""
        if self._open is not None:
            self._closed.append(self._open.item("incomplete"))
            self._open = None
        self._status = status
        self._ending = {**ending, "usage": as_usage(usage)}
        yield {"type": kind, "response": self.response}
