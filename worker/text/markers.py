"""What an answer's text is, by the markers that stand in it."""

from collections.abc import Callable
from typing import Literal, Protocol

from worker.text.tokenizer import Splitter

# "begins" and "ends" are a tool call's markers as the model wrote them, and "call" is what stands between. "cut", in
# the place of "ends", is what there is of the marker at the end of the answer. Content or reasoning that is empty
# says that another marker stood here.
Kind = Literal["content", "reasoning", "begins", "call", "ends", "cut"]
Piece = tuple[Kind, str]


class Reader(Protocol):
    """Of one answer's text. What may yet turn out to be a marker is held back."""

    def feed(self, text: str) -> list[Piece]: ...

    def reopen(self) -> str:
        """The marker that was fed last ends no call, but stands within one. Returns what "ends" did not hold of it."""

    def flush(self) -> list[Piece]:
        """No more text comes: what was held back. The next time there is nothing."""


class Unmarked:
    """Of text that is an answer whatever stands in it."""

    def feed(self, text: str) -> list[Piece]:
        return [("content", text)]

    def reopen(self) -> str:
        return ""

    def flush(self) -> list[Piece]:
        return []


# Any other state of a splitter's is content; a header is muse_spark's, and nobody's text.
_CHANNELS: dict[str, Kind | None] = {"reasoning": "reasoning", "tool": "call", "header": None}


class Marked:
    """Think and tool markers, by mlx-lm's state machine."""

    def __init__(self, splitter: Callable[[str], Splitter], state: str, tool: tuple[str, str], *, calls: bool) -> None:
        """`splitter` begins in a state. `calls`: whether a tool call is one; else it is content, with its markers."""
        self._begin, self._splitter, self._tool, self._calls = splitter, splitter(state), tool, calls

    def feed(self, text: str) -> list[Piece]:
        (state, text), *more = self._splitter.feed(text)
        pieces = self._said(state, text)
        for entered, text in more:
            pieces += [*self._crossed(state, entered), *self._said(entered, text)]
            state = entered
        return pieces

    def reopen(self) -> str:
        self._splitter = self._begin("tool")
        return ""

    def flush(self) -> list[Piece]:
        state, held = self._splitter.flush()
        return [("cut", held)] if state == "tool" and self._calls else self._said(state, held)

    def _said(self, state: str, text: str) -> list[Piece]:
        channel = _CHANNELS.get(state, "content")
        if not text or channel is None:
            return []
        return [("content" if channel == "call" and not self._calls else channel, text)]

    def _crossed(self, left: str, entered: str) -> list[Piece]:
        """A marker stood between the two states."""
        start, end = self._tool
        if not self._calls and "tool" in (left, entered):
            return [("content", start if entered == "tool" else end)]
        pieces: list[Piece] = []
        if left == "tool":
            pieces.append(("ends", end if entered != "tool" else ""))
        if entered == "tool":
            pieces.append(("begins", start))
        elif left != "tool" and (channel := _CHANNELS.get(entered, "content")):
            pieces.append((channel, ""))
        return pieces
