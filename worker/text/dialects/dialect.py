"""A dialect: how a family of models writes its tool calls, and what reading one returns.

The way of an answer, token by token:

- `output.output.Output` adds the text of each token to a `Cursor` and takes the events that it leads to.
- `output.answer.AnswerReader` looks for the model's markers. At one that opens calls it lets the dialect `read`.
- The dialect, a row of `table` of one of five classes, yields the events of calls: their beginning, pieces of their
  arguments as JSON (`json_text` repairs them, `values` makes them of texts by the schema), their end. If the text is no
  call it raises `NotACall`, and the reader gives the text back as it was written.
- `output.events` turns these events into OpenAI's deltas.

Readers are generators that wait for more text by yielding None, so how the text is cut changes nothing.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from worker.text.dialects.cursor import Cursor, Markers, NotACall, Waiting
from worker.text.dialects.json_text import BrokenJson, JsonText, Pieces, Repair
from worker.text.dialects.values import Parameters

Functions = Mapping[str, Parameters]  # the functions that a request offers, with their parameters
LONGEST_NAME = 128  # characters
CALL_ID = "[A-Za-z0-9_.:-]{1,64}"  # ids of calls that clients receive as the model wrote them


@dataclass(frozen=True, slots=True)
class CallBegan:
    """The beginning of a call."""

    function: str
    id: str | None = None  # the model's own


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the call that began last. They are JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The end of the call that began last. It may be incomplete if the answer was cut off."""

    complete: bool = True


@dataclass(frozen=True, slots=True)
class Repaired:
    """A mistake of the model was put right."""

    repair: Repair


CallEvent = CallBegan | CallArguments | CallEnded | Repaired
Calls = Generator[CallEvent | None, None, None]  # None when more text is needed


Written = Sequence[tuple[str, dict[str, Any]]]  # calls to write: functions with their arguments


class Dialect(Protocol):
    """How a family of models writes its calls. All are frozen values: rows of `worker.text.dialects.table`."""

    @property
    def name(self) -> str:
        """The name in documents and logs."""

    @property
    def openings(self) -> Sequence[str]:
        """Markers that begin calls anywhere in an answer; the first is the one that is written."""

    @property
    def closing(self) -> str:
        """The marker that ends calls; empty if there is none."""

    @property
    def signs(self) -> Sequence[str]:
        """Texts by which instructions about calls show this dialect: all of them are there."""

    @property
    def bare(self) -> str:
        """Characters with which calls without a marker may begin an answer; then only offered functions are called."""

    def write(self, calls: Written) -> str:
        """Return the text of calls in one of the forms that the models write."""

    def read(self, opening: str, cursor: Cursor, functions: Functions) -> Calls:
        """Read calls from behind an opening, or behind nothing if they are bare, up to the marker that ends them.

        Raises `NotACall` for a text that is none. What follows the last `CallEnded` is then no call either.
        """


def repaired(repairs: set[Repair]) -> Calls:
    """Yield the repairs, in a fixed order."""
    for repair in Repair:
        if repair in repairs:
            yield Repaired(repair)
    repairs.clear()


def collected(pieces: Pieces) -> Waiting[str]:
    """Return all pieces of a value."""
    parts = list[str]()
    for piece in pieces:
        if piece is None:
            yield None
        else:
            parts.append(piece)
    return "".join(parts)


def pieces_of(json_text: JsonText) -> Calls:
    """Yield the next value as arguments. Raises `BrokenJson`."""
    for piece in json_text.value():
        if piece is None:
            yield None
        elif piece:
            yield CallArguments(piece)


def read_arguments(cursor: Cursor, json_text: JsonText, ends: Markers) -> Generator[CallEvent | None, None, bool]:
    """Read the arguments of a call that has begun. What is no JSON is delivered as it is, up to a marker of `ends`: a
    client can answer that with an error, which models understand. Returns False if the answer was cut off in them."""
    char = yield from cursor.skip_blank()
    if not cursor.ended and (yield from cursor.starts(ends)):
        yield CallArguments("{}")  # a function without parameters
        return True
    try:
        if char not in ("{", "["):
            raise BrokenJson
        yield from pieces_of(json_text)
    except BrokenJson:
        if not cursor.ended or not cursor.cut_off:
            yield Repaired(Repair.BROKEN)
        yield from verbatim(cursor, ends)
        return not cursor.cut_off
    return True


def verbatim(cursor: Cursor, ends: Markers) -> Calls:
    """Deliver the text up to a marker of `ends`, or to the end of the answer, as arguments."""
    while (yield from cursor.next()) and not (yield from cursor.starts(ends)):
        text = cursor.until_start(ends)
        yield CallArguments(text)


def function_name(text: str) -> str:
    """Return a function's name. Raises `NotACall` for a text that can be none."""
    name = text.strip()
    if not name or len(name) > LONGEST_NAME or any(char.isspace() or char in "<>{}[]()\"'`" for char in name):
        raise NotACall
    return name
