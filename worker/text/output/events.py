"""Events of an answer, the parsers that return them, and the formats of tool calls."""

from dataclasses import dataclass
from typing import Any, Protocol

Tools = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself. Empty for a marker after which content follows."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning. Empty for a marker after which reasoning follows."""

    text: str


@dataclass(frozen=True, slots=True)
class CallOpened:
    """The start marker of a tool call, as the model wrote it, with its header."""

    marker: str


@dataclass(frozen=True, slots=True)
class CallText:
    """Text between the markers of a tool call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallClosed:
    """The end marker of a tool call, as the model wrote it. Empty if the marker of the next part ended the call."""

    marker: str


@dataclass(frozen=True, slots=True)
class CallCutOff:
    """The end of the answer within a tool call, with the beginning of its end marker if there is one."""

    marker: str


ParseEvent = Content | Reasoning | CallOpened | CallText | CallClosed | CallCutOff


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


class OutputParser(Protocol):
    """Parses one answer's text. Text that may be the start of a marker is held back."""

    def feed(self, text: str) -> list[ParseEvent]:
        """Return the events of the next text."""

    def reopen(self) -> str:
        """Continue the last call: its end marker was text within it.

        Returns the part of the marker that the event `CallClosed` did not hold.
        """

    def flush(self) -> list[ParseEvent]:
        """Return the events of the text that was held back, at the end of the answer. A second call returns nothing."""


class CallFormat(Protocol):
    """How a model writes its tool calls. An opening is all that precedes a call's text, the marker included."""

    @property
    def is_json(self) -> bool:
        """True if a call may be JSON, whose end is unambiguous: then its arguments are streamed, and it needs no end
        marker. Any other call is emitted when its end marker arrives."""

    def as_json(self, opening: str, text: str) -> str | None:
        """Return the beginning of one JSON object with name and arguments; None if it cannot be decided yet.

        Raises ValueError if the call is not such an object.
        """

    def parse(self, opening: str, text: str, tools: Tools) -> list[dict[str, Any]]:
        """Parse a complete call, to [{name, arguments, maybe id}].

        Raises several types of errors for a text that is not a call: see `worker.text.output.tool_calls`.
        """
