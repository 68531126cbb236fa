"""Events of an answer, as its reader returns them and as the client receives them: calls as OpenAI's deltas."""

import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from worker.text.dialects.dialect import CALL_ID, CallArguments, CallBegan, CallEnded, CallEvent


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


DeltaFields = dict[str, Any]


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

    def read(self, event: CallBegan | CallArguments | CallEnded) -> tuple[DeltaFields, ...]:
        """Return what the client receives for an event: at most one of OpenAI's deltas, whose `index` counts the calls
        of the answer."""
        match event:
            case CallBegan(name, id):
                index = len(self._ids)
                self._ids.append(self._usable(id, index))
                function = {"name": name, "arguments": ""}
                return ({"index": index, "id": self._ids[index], "type": "function", "function": function},)
            case CallArguments(text) if text:
                return ({"index": len(self._ids) - 1, "function": {"arguments": text}},)
            case CallEnded(complete):
                self.num_made += complete
        return ()

    def _usable(self, id: str | None, index: int) -> str:
        """Return the model's own id, or one derived from the job's id, so that it is the same in every attempt."""
        if id is not None and id not in self._ids and re.fullmatch(CALL_ID, id):
            return id
        return "call_" + blake2b(f"{self._job_id}/{index}".encode(), digest_size=12).hexdigest()


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
