"""Events of an answer, as its reader returns them and as the client receives them: calls as OpenAI's deltas."""

import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from worker.text.dialects.dialect import CallArguments, CallBegan, CallEnded, CallEvent


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself. Empty for a marker after which content follows."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning. Empty for a marker after which reasoning follows."""

    text: str


OutputEvent = Content | Reasoning | CallEvent
OutputEvents = Generator[OutputEvent | None, None, None]  # None when more text is needed


@dataclass(frozen=True, slots=True)
class ToolCallBegan:
    """The first event of a tool call that the client receives. `index` counts the calls of the answer."""

    index: int
    id: str
    function: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A piece of a tool call's arguments, which are JSON."""

    index: int
    text: str


ToolCallEvent = ToolCallBegan | ToolArguments


DeltaFields = dict[str, Any]

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class ToolCalls:
    """The tool calls of one answer. A call that has begun is never taken back."""

    def __init__(self, job_id: str, *, parallel: bool) -> None:
        self._job_id = job_id
        self._parallel = parallel
        self._ids = list[str]()  # of all calls so far, by index
        self.num_made = 0

    @property
    def is_complete(self) -> bool:
        """True if the one call that the request allows has been made."""
        return self.num_made > 0 and not self._parallel

    def read(self, event: CallBegan | CallArguments | CallEnded) -> list[ToolCallEvent]:
        """Return what the client receives for an event."""
        match event:
            case CallBegan(function, id):
                index = len(self._ids)
                self._ids.append(self._usable(id, index))
                return [ToolCallBegan(index, self._ids[index], function)]
            case CallArguments(text):
                return [ToolArguments(len(self._ids) - 1, text)] if text else []
            case CallEnded(complete):
                self.num_made += complete
        return []

    def _usable(self, id: str | None, index: int) -> str:
        """Return the model's own id, or one derived from the job's id, so that it is the same in every attempt."""
        if id is not None and id not in self._ids and _ID.fullmatch(id):
            return id
        return "call_" + blake2b(f"{self._job_id}/{index}".encode(), digest_size=12).hexdigest()


def as_deltas(events: Iterable[ToolCallEvent]) -> tuple[DeltaFields, ...]:
    """Return the events as OpenAI's deltas, one for each call."""
    deltas = tuple(map(_as_delta, events))
    return merge_deltas(deltas) if len(deltas) > 1 else deltas


def _as_delta(event: ToolCallEvent) -> DeltaFields:
    match event:
        case ToolCallBegan(index, id, function):
            return {"index": index, "id": id, "type": "function", "function": {"name": function, "arguments": ""}}
        case ToolArguments(index, text):
            return {"index": index, "function": {"arguments": text}}


def merge_deltas(deltas: Iterable[DeltaFields]) -> tuple[DeltaFields, ...]:
    """Merge consecutive deltas of a call: one for each call, with its fragments of arguments joined."""
    calls = list[tuple[DeltaFields, list[str]]]()
    for delta in deltas:
        if not calls or calls[-1][0]["index"] != delta["index"]:
            calls.append((delta, []))
        calls[-1][1].append(delta["function"]["arguments"])
    return tuple(_with_arguments(first, "".join(written)) for first, written in calls)


def _with_arguments(delta: DeltaFields, arguments: str) -> DeltaFields:
    return {**delta, "function": {**delta["function"], "arguments": arguments}}


def message_tool_calls(deltas: Iterable[DeltaFields]) -> list[dict[str, Any]]:
    """Return a message's `tool_calls`. A call that was cut off is included, incomplete."""
    calls = merge_deltas(deltas)
    return [{"id": call["id"], "type": call["type"], "function": call["function"]} for call in calls]
