"""Events of an answer, as its reader returns them and as the client receives them."""

from collections.abc import Generator
from dataclasses import dataclass

from worker.text.dialects.dialect import CallEvent


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer itself. Empty for a marker after which content follows."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the reasoning. Empty for a marker after which reasoning follows."""

    text: str


Event = Content | Reasoning | CallEvent
Events = Generator[Event | None, None, None]  # None when more text is needed


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
