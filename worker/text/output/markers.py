"""Splits an answer's text into content, reasoning and tool calls at the model's markers."""

from collections.abc import Callable
from typing import Literal, Protocol

from worker.text.tokenizer import Splitter

# "begins" and "ends" are a tool call's markers as the model wrote them, and "call" is the text between them. "cut"
# replaces "ends" if the answer ends within a call, and holds the beginning of the end marker. Empty content or
# reasoning is an event too: a marker that switches to this kind.
Kind = Literal["content", "reasoning", "begins", "call", "ends", "cut"]
ParseEvent = tuple[Kind, str]


class OutputParser(Protocol):
    """Parses one answer's text. Text that may be the start of a marker is held back."""

    def feed(self, text: str) -> list[ParseEvent]:
        """Return the events of the next text."""

    def reopen(self) -> str:
        """Continue the last call: its end marker was text within it.

        Returns the part of the marker that the event "ends" did not hold.
        """

    def flush(self) -> list[ParseEvent]:
        """Return the events of the text that was held back, at the end of the answer. A second call returns nothing."""


class PlainParser:
    """Parses a text that is all content."""

    def feed(self, text: str) -> list[ParseEvent]:
        """Return the text as content."""
        return [("content", text)]

    def reopen(self) -> str:
        """Do nothing: there are no calls."""
        return ""

    def flush(self) -> list[ParseEvent]:
        """Return nothing: no text is held back."""
        return []


# All other states of a splitter are content. Text in a header, which muse_spark has, is dropped.
_CHANNELS: dict[str, Kind | None] = {"reasoning": "reasoning", "tool": "call", "header": None}


class MarkerParser:
    """Parses text with think and tool markers, using mlx-lm's state machine."""

    def __init__(self, splitter: Callable[[str], Splitter], state: str, tool: tuple[str, str], *, calls: bool) -> None:
        """`splitter` makes a splitter for an initial state. `state`: the initial state.
        `tool`: the markers around a call. `calls`: parse tool calls; else they are content, markers included.
        """
        self._begin, self._splitter, self._tool, self._calls = splitter, splitter(state), tool, calls

    def feed(self, text: str) -> list[ParseEvent]:
        """Return the events of the next text."""
        (state, text), *more = self._splitter.feed(text)
        pieces = self._text_events(state, text)
        for entered, text in more:
            pieces += [*self._marker_events(state, entered), *self._text_events(entered, text)]
            state = entered
        return pieces

    def reopen(self) -> str:
        """Continue the last call. The event "ends" held its whole end marker, so there is no rest to return."""
        self._splitter = self._begin("tool")
        return ""

    def flush(self) -> list[ParseEvent]:
        """Return the events of the text that was held back, at the end of the answer."""
        state, held = self._splitter.flush()
        return [("cut", held)] if state == "tool" and self._calls else self._text_events(state, held)

    def _text_events(self, state: str, text: str) -> list[ParseEvent]:
        channel = _CHANNELS.get(state, "content")
        if not text or channel is None:
            return []
        return [("content" if channel == "call" and not self._calls else channel, text)]

    def _marker_events(self, left: str, entered: str) -> list[ParseEvent]:
        """Return the events of the marker between the two states."""
        start, end = self._tool
        if not self._calls and "tool" in (left, entered):
            return [("content", start if entered == "tool" else end)]
        pieces: list[ParseEvent] = []
        if left == "tool":
            pieces.append(("ends", end if entered != "tool" else ""))
        if entered == "tool":
            pieces.append(("begins", start))
        elif left != "tool" and (channel := _CHANNELS.get(entered, "content")):
            pieces.append((channel, ""))
        return pieces
