"""Splits an answer's text into content, reasoning and tool calls at the model's markers."""

from collections.abc import Callable

from worker.text.output.events import (
    CallClosed,
    CallCutOff,
    CallOpened,
    CallText,
    Content,
    ParseEvent,
    Reasoning,
)
from worker.text.tokenizer import Splitter


class PlainParser:
    """Parses a text that is all content."""

    def feed(self, text: str) -> list[ParseEvent]:
        """Return the text as content."""
        return [Content(text)]

    def reopen(self) -> str:
        """Do nothing: there are no calls."""
        return ""

    def flush(self) -> list[ParseEvent]:
        """Return nothing: no text is held back."""
        return []


# The event for a text in each state of a splitter; `Content` in all others. Text in a header, which muse_spark has, is
# dropped.
_EVENTS: dict[str, type[Content | Reasoning | CallText] | None] = {
    "reasoning": Reasoning,
    "tool": CallText,
    "header": None,
}


class MarkerParser:
    """Parses text with think and tool markers, using mlx-lm's state machine."""

    def __init__(self, splitter: Callable[[str], Splitter], state: str, tool: tuple[str, str], *, calls: bool) -> None:
        """`splitter` makes a splitter for an initial state. `state`: the initial state.
        `tool`: the markers around a call. `calls`: parse tool calls; else they are content, markers included.
        """
        self._begin = splitter
        self._splitter = splitter(state)
        self._tool = tool
        self._calls = calls

    def feed(self, text: str) -> list[ParseEvent]:
        """Return the events of the next text."""
        (state, text), *more = self._splitter.feed(text)
        events = self._text_events(state, text)
        for entered, text in more:
            events += [*self._marker_events(state, entered), *self._text_events(entered, text)]
            state = entered
        return events

    def reopen(self) -> str:
        """Continue the last call. The event `CallClosed` held its whole end marker, so there is no rest to return."""
        self._splitter = self._begin("tool")
        return ""

    def flush(self) -> list[ParseEvent]:
        """Return the events of the text that was held back, at the end of the answer."""
        state, held = self._splitter.flush()
        return [CallCutOff(held)] if state == "tool" and self._calls else self._text_events(state, held)

    def _text_events(self, state: str, text: str) -> list[ParseEvent]:
        event = _EVENTS.get(state, Content)
        if not text or event is None:
            return []
        return [Content(text) if event is CallText and not self._calls else event(text)]

    def _marker_events(self, left: str, entered: str) -> list[ParseEvent]:
        """Return the events of the marker between the two states."""
        start, end = self._tool
        if not self._calls and "tool" in (left, entered):
            return [Content(start if entered == "tool" else end)]
        events: list[ParseEvent] = []
        if left == "tool":
            events.append(CallClosed(end if entered != "tool" else ""))
        if entered == "tool":
            events.append(CallOpened(start))
        elif left != "tool" and (event := _EVENTS.get(entered, Content)):
            events.append(event(""))
        return events
