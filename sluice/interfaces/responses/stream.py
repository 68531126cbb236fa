"""The events of a response's stream: a pure function of its head and of the job's log, from the log's first event.

So every gateway numbers them alike, and a stream continues after any `sequence_number` on any gateway. Progress and
resumption of a job make no event, and heartbeats are comments outside of the numbering.
"""

import json
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from sluice.contract import events
from sluice.contract.events import Cancelled, Delta, Failed, Finished, JobError, Restarted, Started, Usage
from sluice.errors import JobFailed
from sluice.http_errors import SERVER, ErrorForm
from sluice.interfaces.completion import events_of
from sluice.interfaces.responses.conversation import enclosed
from sluice.interfaces.responses.record import Response, ResponseHead, skeleton
from sluice.interfaces.tools import CalledTool, InputText, whole_input
from sluice.openai import error_reply

StreamEvent = dict[str, Any]  # a stream event, not yet numbered
Item = dict[str, Any]


class _OutputItem(Protocol):
    """An item that is being written."""

    @abstractmethod
    def opening(self) -> list[StreamEvent]:
        """Return the events that begin the item."""

    @abstractmethod
    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[StreamEvent]:
        """Add text, and return its events."""

    @abstractmethod
    def closing(self, status: str) -> list[StreamEvent]:
        """Return the events that end the item."""

    @abstractmethod
    def item(self, status: str) -> Item:
        """Return the item with what has been written of it."""


def _added(index: int, item: Item) -> StreamEvent:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int, item: Item) -> StreamEvent:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


class _MessageItem(_OutputItem):
    """Text of the answer."""

    def __init__(self, head: ResponseHead, index: int) -> None:
        self._head = head
        self._index = index
        self._id = f"msg_{head.suffix}_{index}"
        self._text = list[str]()
        self._logprobs = list[dict[str, Any]]()

    def opening(self) -> list[StreamEvent]:
        item = {**self.item("in_progress"), "content": []}
        return [_added(self._index, item), self._event("response.content_part.added", part=self._part())]

    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[StreamEvent]:
        entries = [_logprob(each) for each in logprobs] if self._head.logprobs else []
        self._text.append(text)
        self._logprobs += entries
        return [self._event("response.output_text.delta", delta=text, logprobs=entries)]

    def closing(self, status: str) -> list[StreamEvent]:
        whole, part = "".join(self._text), self._part()
        return [
            self._event("response.output_text.done", text=whole, logprobs=self._logprobs),
            self._event("response.content_part.done", part=part),
            _done(self._index, self.item(status)),
        ]

    def item(self, status: str) -> Item:
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": [self._part()]}

    def _part(self) -> dict[str, Any]:
        logprobs = list(self._logprobs)
        return {"type": "output_text", "text": "".join(self._text), "annotations": [], "logprobs": logprobs}

    def _event(self, kind: str, **more: Any) -> StreamEvent:
        return {"type": kind, "item_id": self._id, "output_index": self._index, "content_index": 0, **more}


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of a chat completion's logprobs in the form of this interface."""
    top = [{name: each[name] for name in ("token", "bytes", "logprob")} for each in entry.get("top_logprobs") or ()]
    return {"token": entry["token"], "bytes": entry["bytes"] or [], "logprob": entry["logprob"], "top_logprobs": top}


class _ReasoningItem(_OutputItem):
    """Reasoning before the answer: in `summary` if the request asked for a summary, else in `content`."""

    def __init__(self, head: ResponseHead, index: int) -> None:
        self._head = head
        self._index = index
        self._id = f"rs_{head.suffix}_{index}"
        self._text = list[str]()

    def opening(self) -> list[StreamEvent]:
        item = {**self._item([], "in_progress"), "encrypted_content": None}
        part = self._part("")
        return [_added(self._index, item), self._event(f"{self._part_events}.added", part=part)]

    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[StreamEvent]:
        self._text.append(text)
        return [self._event(f"{self._text_events}.delta", delta=text)]

    def closing(self, status: str) -> list[StreamEvent]:
        whole = "".join(self._text)
        return [
            self._event(f"{self._text_events}.done", text=whole),
            self._event(f"{self._part_events}.done", part=self._part(whole)),
            _done(self._index, self.item(status)),
        ]

    def item(self, status: str) -> Item:
        whole = "".join(self._text)
        sealed = enclosed(whole) if self._head.enclosed else None
        return {**self._item([self._part(whole)], status), "encrypted_content": sealed}

    @property
    def _text_events(self) -> str:
        return "response.reasoning_summary_text" if self._head.summary else "response.reasoning_text"

    @property
    def _part_events(self) -> str:
        return "response.reasoning_summary_part" if self._head.summary else "response.content_part"

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": "summary_text" if self._head.summary else "reasoning_text", "text": text}

    def _item(self, parts: list[dict[str, Any]], status: str) -> Item:
        written = {"summary": parts} if self._head.summary else {"summary": [], "content": parts}
        return {"id": self._id, "type": "reasoning", "status": status, **written}

    def _event(self, kind: str, **more: Any) -> StreamEvent:
        place = "summary_index" if self._head.summary else "content_index"
        return {"type": kind, "item_id": self._id, "output_index": self._index, place: 0, **more}


class _FunctionCallItem(_OutputItem):
    """A call of a function."""

    def __init__(self, head: ResponseHead, index: int, call_id: str, target: CalledTool) -> None:
        self._index = index
        self._id = f"fc_{head.suffix}_{index}"
        self._call_id = call_id
        self._target = target
        self._arguments = list[str]()

    def opening(self) -> list[StreamEvent]:
        return [_added(self._index, self.item("in_progress"))]

    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[StreamEvent]:
        self._arguments.append(text)
        return [self._event("delta", delta=text)]

    def closing(self, status: str) -> list[StreamEvent]:
        item = self.item(status)
        return [self._event("done", name=self._target.name, arguments=item["arguments"]), _done(self._index, item)]

    def item(self, status: str) -> Item:
        arguments = "".join(self._arguments)
        return {
            "id": self._id,
            "type": "function_call",
            "status": _status(status, arguments),
            "call_id": self._call_id,
            "name": self._target.name,
            "arguments": arguments,
            **_namespace(self._target),
        }

    def _event(self, kind: str, **more: Any) -> StreamEvent:
        return _call_event("response.function_call_arguments", kind, self._id, self._index, more)


class _CustomCallItem(_OutputItem):
    """A call of a custom tool, whose function has its input as the one argument."""

    def __init__(self, head: ResponseHead, index: int, call_id: str, target: CalledTool) -> None:
        self._index = index
        self._id = f"ctc_{head.suffix}_{index}"
        self._call_id = call_id
        self._target = target
        self._arguments = list[str]()
        self._input = InputText()

    def opening(self) -> list[StreamEvent]:
        return [_added(self._index, {**self.item("in_progress"), "input": ""})]

    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[StreamEvent]:
        self._arguments.append(text)
        more = self._input.feed(text)
        return [self._event("delta", delta=more)] if more else []

    def closing(self, status: str) -> list[StreamEvent]:
        item = self.item(status)
        return [self._event("done", input=item["input"]), _done(self._index, item)]

    def item(self, status: str) -> Item:
        arguments = "".join(self._arguments)
        return {
            "id": self._id,
            "type": "custom_tool_call",
            "status": _status(status, arguments),
            "call_id": self._call_id,
            "name": self._target.name,
            "input": whole_input(arguments, self._input.text),
            **_namespace(self._target),
        }

    def _event(self, kind: str, **more: Any) -> StreamEvent:
        return _call_event("response.custom_tool_call_input", kind, self._id, self._index, more)


def _call_event(prefix: str, kind: str, id: str, index: int, more: dict[str, Any]) -> StreamEvent:
    return {"type": f"{prefix}.{kind}", "item_id": id, "output_index": index, **more}


def _namespace(target: CalledTool) -> dict[str, str]:
    return {} if target.namespace is None else {"namespace": target.namespace}


def _status(status: str, arguments: str) -> str:
    """Return the status of a call, which is incomplete unless its arguments are an object."""
    if status != "completed":
        return status
    try:
        return status if isinstance(json.loads(arguments), dict) else "incomplete"
    except (ValueError, RecursionError):
        return "incomplete"


_RESTARTED = (
    "The job starts over on another worker, and the output so far is not valid. Drop it, and retrieve the response or "
    "its events after this one."
)


class ResponseState:
    """The state of a response after some of the log's events."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._targets = head.tools()
        self._status = "queued" if head.background else "in_progress"
        self._next = 0
        self._started = False
        self._ending: dict[str, Any] = {}  # fields that the final event sets
        self._closed = list[Item]()
        self._open: _OutputItem | None = None
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

    def opening(self) -> list[StreamEvent]:
        """Return the events that precede the log's."""
        kinds = ("response.created", "response.queued") if self._head.background else ("response.created",)
        return self._numbered({"type": kind, "response": self.response} for kind in kinds)

    def add(self, event: events.Event) -> list[StreamEvent]:
        """Return the events for the next event of the log."""
        match event:
            case Restarted() if self._closed or self._open:
                return self._numbered(self._restart())
            case Started():
                return self._numbered(self._start())
            case Delta():
                return self._numbered(self._write(event))
            case Finished():
                return self._numbered(self._finish(event))
            case Failed(error=error, usage=usage):
                return self._numbered(self._fail(error, usage))
            case Cancelled(usage=usage):
                return self._numbered(self._break_off("cancelled", "response.incomplete", usage))
        return []

    def _numbered(self, events: Iterable[StreamEvent]) -> list[StreamEvent]:
        numbered = [{**event, "sequence_number": number} for number, event in enumerate(events, self._next)]
        self._next += len(numbered)
        return numbered

    def _start(self) -> Iterator[StreamEvent]:
        self._status = "in_progress"
        if not self._started:
            self._started = True
            yield {"type": "response.in_progress", "response": self.response}

    def _restart(self) -> Iterator[StreamEvent]:
        self._closed = []
        self._open = None
        self._call = None
        reason = {"code": "restarted", "message": _RESTARTED, "param": None}
        yield {"type": "error", **reason, "error": {**reason, "type": SERVER}}

    def _write(self, event: Delta) -> Iterator[StreamEvent]:
        if event.reasoning:
            yield from self._append(_ReasoningItem, event.reasoning)
        if event.content or (event.logprobs and isinstance(self._open, _MessageItem)):
            yield from self._append(_MessageItem, event.content or "", event.logprobs or ())
        for delta in event.tool_calls or ():
            yield from self._append_call(delta)

    def _append(
        self, kind: type[_ReasoningItem | _MessageItem], text: str, logprobs: tuple[dict[str, Any], ...] = ()
    ) -> Iterator[StreamEvent]:
        if not isinstance(self._open, kind):
            yield from self._replace(kind(self._head, self._next_index()))
        assert self._open is not None
        yield from self._open.append(text, logprobs)

    def _append_call(self, delta: dict[str, Any]) -> Iterator[StreamEvent]:
        function = delta["function"]
        if self._call != delta["index"] or not isinstance(self._open, _FunctionCallItem | _CustomCallItem):
            target = self._targets.target(function.get("name", ""))
            kind = _CustomCallItem if target.is_custom else _FunctionCallItem
            yield from self._replace(kind(self._head, self._next_index(), delta.get("id", ""), target))
            self._call = delta["index"]
        assert self._open is not None
        if arguments := function.get("arguments"):
            yield from self._open.append(arguments)

    def _next_index(self) -> int:
        return len(self._closed) + (self._open is not None)

    def _replace(self, item: _OutputItem) -> Iterator[StreamEvent]:
        yield from self._close("completed")
        self._open = item
        yield from item.opening()

    def _close(self, status: str) -> Iterator[StreamEvent]:
        if self._open is not None:
            yield from self._open.closing(status)
            self._closed.append(self._open.item(status))
        self._open, self._call = None, None

    def _finish(self, event: Finished) -> Iterator[StreamEvent]:
        is_cut = event.finish_reason == "length"
        yield from self._close("incomplete" if is_cut else "completed")
        self._status = "incomplete" if is_cut else "completed"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
        ended_at = {} if is_cut else {"completed_at": int(event.ts)}
        self._ending = {**ended_at, **details, "usage": as_usage(event.usage)}
        yield {"type": f"response.{self._status}", "response": self.response}

    def _fail(self, error: JobError, usage: Usage) -> Iterator[StreamEvent]:
        """End with the failure. Before one of a prompt that is too long, OpenAI's API sends the event `error`, by which
        its libraries know it; Codex knows it by the final event."""
        form = error_reply(JobFailed(error)).form
        code = form.response_code
        if form is ErrorForm.CONTEXT_EXCEEDED:
            reason = {"code": code, "message": error.message, "param": "input"}
            yield {"type": "error", **reason, "error": {**reason, "type": form.type}}
        yield from self._break_off("failed", "response.failed", usage, error={"code": code, "message": error.message})

    def _break_off(self, status: str, kind: str, usage: Usage, **ending: Any) -> Iterator[StreamEvent]:
        """End without closing the open item: clients must not act upon half a call."""
        if self._open is not None:
            self._closed.append(self._open.item("incomplete"))
            self._open = None
        self._status = status
        self._ending = {**ending, "usage": as_usage(usage)}
        yield {"type": kind, "response": self.response}


def from_completion(head: ResponseHead, completion: Mapping[str, Any]) -> ResponseState:
    """Return the response of a job's stored result, for a job whose log has expired.

    It is that of the log, but for output that the model interleaved: the result has all text in one piece. The tokens
    of its reasoning are not counted.
    """
    state = ResponseState(head)
    for event in events_of(completion):
        state.add(event)
    return state


def as_usage(usage: Usage) -> dict[str, Any]:
    """Return a job's usage in the form of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
