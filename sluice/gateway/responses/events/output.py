"""The items of an answer, each as a run of stream events: added, deltas, done."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from sluice.gateway.responses.events.custom_input import InputText, whole_input
from sluice.gateway.responses.events.head import Head
from sluice.gateway.responses.request.reasoning import enclosed
from sluice.gateway.responses.request.tools import Target

Event = dict[str, Any]  # a stream event, not yet numbered
Item = dict[str, Any]


class OutputItem(Protocol):
    """An item that is being written."""

    @abstractmethod
    def opening(self) -> list[Event]:
        """Return the events that begin the item."""

    @abstractmethod
    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Add text, and return its events."""

    @abstractmethod
    def closing(self, status: str) -> list[Event]:
        """Return the events that end the item."""

    @abstractmethod
    def item(self, status: str) -> Item:
        """Return the item with what has been written of it."""


def _added(index: int, item: Item) -> Event:
    return {"type": "response.output_item.added", "output_index": index, "item": item}


def _done(index: int, item: Item) -> Event:
    return {"type": "response.output_item.done", "output_index": index, "item": item}


class MessageItem(OutputItem):
    """Text of the answer."""

    def __init__(self, head: Head, index: int) -> None:
        self._head = head
        self._index = index
        self._id = f"msg_{head.suffix}_{index}"
        self._text = list[str]()
        self._logprobs = list[dict[str, Any]]()

    def opening(self) -> list[Event]:
        item = {**self.item("in_progress"), "content": []}
        return [_added(self._index, item), self._event("response.content_part.added", part=self._part())]

    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        entries = [_logprob(each) for each in logprobs] if self._head.logprobs else []
        self._text.append(text)
        self._logprobs += entries
        return [self._event("response.output_text.delta", delta=text, logprobs=entries)]

    def closing(self, status: str) -> list[Event]:
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

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self._id, "output_index": self._index, "content_index": 0, **more}


def _logprob(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of a chat completion's logprobs in the form of this interface."""
    top = [{name: each[name] for name in ("token", "bytes", "logprob")} for each in entry.get("top_logprobs") or ()]
    return {"token": entry["token"], "bytes": entry["bytes"] or [], "logprob": entry["logprob"], "top_logprobs": top}


class ReasoningItem(OutputItem):
    """Reasoning before the answer: in `summary` if the request asked for a summary, else in `content`."""

    def __init__(self, head: Head, index: int) -> None:
        self._head = head
        self._index = index
        self._id = f"rs_{head.suffix}_{index}"
        self._text = list[str]()

    def opening(self) -> list[Event]:
        item = {**self._item([], "in_progress"), "encrypted_content": None}
        part = self._part("")
        return [_added(self._index, item), self._event(f"{self._part_events}.added", part=part)]

    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self._text.append(text)
        return [self._event(f"{self._text_events}.delta", delta=text)]

    def closing(self, status: str) -> list[Event]:
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

    def _event(self, kind: str, **more: Any) -> Event:
        place = "summary_index" if self._head.summary else "content_index"
        return {"type": kind, "item_id": self._id, "output_index": self._index, place: 0, **more}


class FunctionCallItem(OutputItem):
    """A call of a function."""

    def __init__(self, head: Head, index: int, call_id: str, target: Target) -> None:
        self._index = index
        self._id = f"fc_{head.suffix}_{index}"
        self._call_id = call_id
        self._target = target
        self._arguments = list[str]()

    def opening(self) -> list[Event]:
        return [_added(self._index, self.item("in_progress"))]

    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self._arguments.append(text)
        return [self._event("delta", delta=text)]

    def closing(self, status: str) -> list[Event]:
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

    def _event(self, kind: str, **more: Any) -> Event:
        return _call_event("response.function_call_arguments", kind, self._id, self._index, more)


class CustomCallItem(OutputItem):
    """A call of a custom tool, whose function has its input as the one argument."""

    def __init__(self, head: Head, index: int, call_id: str, target: Target) -> None:
        self._index = index
        self._id = f"ctc_{head.suffix}_{index}"
        self._call_id = call_id
        self._target = target
        self._arguments = list[str]()
        self._input = InputText()

    def opening(self) -> list[Event]:
        return [_added(self._index, {**self.item("in_progress"), "input": ""})]

    def append(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self._arguments.append(text)
        more = self._input.feed(text)
        return [self._event("delta", delta=more)] if more else []

    def closing(self, status: str) -> list[Event]:
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

    def _event(self, kind: str, **more: Any) -> Event:
        return _call_event("response.custom_tool_call_input", kind, self._id, self._index, more)


def _call_event(prefix: str, kind: str, id: str, index: int, more: dict[str, Any]) -> Event:
    return {"type": f"{prefix}.{kind}", "item_id": id, "output_index": index, **more}


def _namespace(target: Target) -> dict[str, str]:
    return {} if target.namespace is None else {"namespace": target.namespace}


def _status(status: str, arguments: str) -> str:
    """Return the status of a call, which is incomplete unless its arguments are an object."""
    if status != "completed":
        return status
    try:
        return status if isinstance(json.loads(arguments), dict) else "incomplete"
    except (ValueError, RecursionError):
        return "incomplete"
