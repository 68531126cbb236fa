"""Tool calls, as OpenAI's deltas."""

import json
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from worker.text.partial_json import PartialJson

Tools = list[dict[str, Any]]
Delta = dict[str, Any]

# What mlx-lm's parsers raise on text that is no call, and on JSON schemas that they do not expect.
_NO_CALL = (
    ValueError, TypeError, AttributeError, LookupError, SyntaxError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True)
class Format:
    """How a model writes its calls. An opening is all that stands before a call's text, the marker included."""

    parse: Callable[[str, str, Tools], list[dict[str, Any]]]  # of an opening, a text and tools; raises `_NO_CALL`
    # An opening, and a text so far, as the beginning of one object with name and arguments: None where one cannot
    # tell yet, ValueError where it is none. Such a text says by itself where it ends. Without it a call is made
    # when its end marker comes.
    as_json: Callable[[str, str], str | None] | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """A call that is over."""

    deltas: list[Delta]  # what is new of it
    text: str = ""  # all of it, where it was none


class Calls:
    """Of one answer. A call that is JSON is announced when its function is known and its arguments have begun, and
    they follow as they are written; any other comes in one piece.

    The format's parser has the last word. If it does not agree with what was announced, that call is void: the
    client has seen its beginning, but it is none, and its text is content.
    """

    def __init__(self, format: Format, tools: Tools, job_id: str, *, parallel: bool) -> None:
        self._format, self._tools, self._job_id, self._parallel = format, tools, job_id, parallel
        self._functions = {tool["function"]["name"] for tool in tools}
        self._open: _Written | None = None
        self._announced: int | None = None  # the index of the open call
        self._ids = list[str]()  # of all that were announced, by index
        self.made = 0
        self.voided = set[int]()

    @property
    def enough(self) -> bool:
        return self.made > 0 and not self._parallel

    @property
    def open(self) -> bool:
        return self._open is not None

    @property
    def quoting(self) -> bool:
        """Whether what comes next is the open call's, even if it looks like a marker."""
        return self._open is not None and self._open.quoting

    def begin(self, opening: str) -> None:
        self._open = _Written(opening, self._format.as_json)

    def feed(self, text: str) -> list[Delta]:
        assert self._open is not None
        more = self._open.feed(text)
        if self._announced is not None:
            return [{"index": self._announced, "function": {"arguments": more}}] if more else []
        if not self._open.begun or self._open.function not in self._functions:
            return []
        self._announced = len(self._ids)
        return [self._new(self._open.function, self._open.arguments, None)]

    def end(self, closing: str) -> Settled:
        """The open call's marker has come."""
        assert self._open is not None
        return self._settle(self._open, self._meant(self._open), closing)

    def cut_off(self, closing: str, *, keep: bool) -> Settled | None:
        """The answer has ended within the open call. None where it stays as far as it came: one to `keep`, if it was
        announced and is sound."""
        call = self._open
        assert call is not None
        # Some parsers make a call of the first half of one, so only a format that says where it ends is asked.
        meant = self._meant(call) if self._format.as_json else []
        if keep and not meant and self._announced is not None and call.sound:
            return None
        return self._settle(call, meant, closing)

    def _settle(self, call: "_Written", meant: list["_Meant"], closing: str) -> Settled:
        announced, self._announced, self._open = self._announced, None, None
        if announced is None and meant:
            return Settled(self._make(meant if self._parallel else meant[:1]))
        if announced is not None and meant and call.says(meant[0]):
            self.made += 1
            return Settled(self._make(meant[1:] if self._parallel else []))
        if announced is not None:
            self.voided.add(announced)
        return Settled([], f"{call.opening}{call.text}{closing}")

    def _make(self, meant: list["_Meant"]) -> list[Delta]:
        self.made += len(meant)
        return [self._new(call.function, call.written, call.id) for call in meant]

    def _meant(self, call: "_Written") -> list["_Meant"]:
        """By the format's parser. Empty where the text is no call, or one of an unknown function."""
        try:
            meant = [_read(entry) for entry in self._format.parse(call.opening, call.text, self._tools)]
        except _NO_CALL:
            return []
        return meant if self._functions.issuperset(each.function for each in meant) else []

    def _new(self, function: str, arguments: str, id: str | None) -> Delta:
        index = len(self._ids)
        if id is None or id in self._ids:  # ours is the same on every attempt
            id = "call_" + blake2b(f"{self._job_id}/{index}".encode(), digest_size=12).hexdigest()
        self._ids.append(id)
        return {
            "index": index,
            "id": id,
            "type": "function",
            "function": {"name": function, "arguments": arguments},
        }


@dataclass(frozen=True, slots=True)
class _Meant:
    """A call as the parser reads it."""

    function: str
    arguments: dict[str, Any]
    written: str  # the arguments
    id: str | None


def _read(entry: dict[str, Any]) -> _Meant:
    """Raises `_NO_CALL`."""
    function, arguments, id = entry["name"], entry.get("arguments"), entry.get("id")
    if isinstance(arguments, str):  # JSON within JSON
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(function, str) or not isinstance(arguments, dict):
        raise ValueError("This is no call.")
    known = id if isinstance(id, str) and _ID.fullmatch(id) else None
    return _Meant(function, arguments, _dumps(arguments), known)


def _dumps(arguments: dict[str, Any]) -> str:
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        written.encode()
    except UnicodeEncodeError:  # half of a surrogate pair can only be sent as an escape
        return json.dumps(arguments)
    return written


class _Written:
    """A call as it is being written."""

    def __init__(self, opening: str, as_json: Callable[[str, str], str | None] | None) -> None:
        self.opening, self._as_json = opening, as_json
        self._text = list[str]()
        self._json: PartialJson | None = None
        self._name, self._arguments = list[str](), list[str]()

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    @property
    def _whole(self) -> bool:
        return self._json is not None and self._json.whole >= {"name", "arguments"}

    @property
    def quoting(self) -> bool:
        """Whether it stands within a string."""
        return self._json is not None and self._json.quoting

    @property
    def sound(self) -> bool:
        """As far as it came."""
        return self._whole or (self._json is not None and not self._json.broken)

    @property
    def begun(self) -> bool:
        """Whether the name is there, and the beginning of the arguments."""
        if self._json is None or "name" not in self._json.whole or not self._name or not self._arguments:
            return False
        return self._name[0].startswith('"') and self._arguments[0].startswith("{")

    @property
    def function(self) -> str:
        """Once it has `begun`."""
        return str(json.loads("".join(self._name)))

    def says(self, meant: _Meant) -> bool:
        """Once it has `begun`."""
        return self._whole and (self.function, json.loads(self.arguments)) == (meant.function, meant.arguments)

    def feed(self, text: str) -> str:
        """More of the arguments."""
        self._text.append(text)
        if self._json is None:
            text = self._beginning()
        if self._json is None or self._whole:
            return ""
        before = len(self._arguments)
        for key, piece in self._json.feed(text):
            if key == "name":
                self._name.append(piece)
            elif key == "arguments":
                self._arguments.append(piece)
        return "".join(self._arguments[before:])

    def _beginning(self) -> str:
        """What there is for JSON, once there is."""
        try:
            beginning = None if self._as_json is None else self._as_json(self.opening, self.text)
        except ValueError:
            beginning, self._as_json = None, None
        if beginning is not None:
            self._json = PartialJson()
        return beginning or ""


def gathered(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    """One for each call: the fragments of its arguments put together."""
    calls = list[tuple[Delta, list[str]]]()
    for delta in deltas:
        if not calls or calls[-1][0]["index"] != delta["index"]:
            calls.append((delta, []))
        calls[-1][1].append(delta["function"]["arguments"])
    return tuple(_with_arguments(first, "".join(written)) for first, written in calls)


def _with_arguments(delta: Delta, arguments: str) -> Delta:
    return {**delta, "function": {**delta["function"], "arguments": arguments}}


def whole(deltas: Iterable[Delta], voided: Container[int] = ()) -> list[dict[str, Any]]:
    """A message's `tool_calls`. One that the answer's end cut off is among them as far as it came."""
    calls = [delta for delta in gathered(deltas) if delta["index"] not in voided]
    return [{"id": call["id"], "type": call["type"], "function": call["function"]} for call in calls]
