"""Turns tool calls, as a model writes them, into events and OpenAI's deltas."""

import json
import re
import sys
from collections.abc import Container, Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from worker.text.output.events import CallFormat, ToolArguments, ToolCallBegan, ToolCallEvent, Tools
from worker.text.output.partial_json import PartialJson

Delta = dict[str, Any]

# Raised by mlx-lm's parsers for text that is not a call, and for JSON schemas that they do not expect.
_NO_CALL = (
    ValueError, TypeError, AttributeError, LookupError, SyntaxError, OverflowError, RecursionError, MemoryError,
)  # fmt: skip
# A string, which may be cut off, or a number. It matches all digits in a row, so that none is searched from twice.
_STRING_OR_NUMBER = re.compile(
    r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|-?[0-9]++((?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)', re.DOTALL
)
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


@dataclass(frozen=True, slots=True)
class InvalidCall:
    """The whole text of a call that is not valid, markers included. It is content."""

    text: str


class Calls:
    """The tool calls of one answer.

    A call in JSON is announced when its function is known and its arguments have begun, and its arguments are
    streamed; any other call is emitted in one piece. The format's parser decides at the end. If it disagrees with what
    was announced, the call is retracted: the client has received its beginning, but its text becomes content.
    """

    def __init__(self, format: CallFormat, tools: Tools, job_id: str, *, parallel: bool) -> None:
        self._format = format
        self._tools = tools
        self._job_id = job_id
        self._parallel = parallel
        self._functions = {tool["function"]["name"] for tool in tools}
        self._open: _StreamingCall | None = None
        self._announced: int | None = None  # the index of the open call
        self._ids = list[str]()  # of all calls emitted so far, by index
        self.num_made = 0
        self.retracted = set[int]()

    @property
    def is_complete(self) -> bool:
        """True if the one call that the request allows has been made."""
        return self.num_made > 0 and not self._parallel

    @property
    def open(self) -> bool:
        """True between a call's opening and its end."""
        return self._open is not None

    @property
    def in_string(self) -> bool:
        """True if the open call is within a JSON string, so that even text that looks like a marker belongs to it."""
        return self._open is not None and self._open.in_string

    def begin(self, opening: str) -> None:
        """Open a call with the text before it, its marker included."""
        self._open = _StreamingCall(opening, self._format)

    def feed(self, text: str) -> list[ToolCallEvent]:
        """Add text to the open call. Returns its events so far not emitted."""
        assert self._open is not None
        more = self._open.feed(text)
        if self._announced is not None:
            return [ToolArguments(self._announced, more)] if more else []
        if not self._open.begun or self._open.function not in self._functions:
            return []
        self._announced = len(self._ids)
        return self._new(self._open.function, self._open.arguments, None)

    def end(self, closing: str) -> list[ToolCallEvent] | InvalidCall:
        """Close the open call at its end marker, `closing`. Returns its events so far not emitted."""
        assert self._open is not None
        return self._close(self._open, self._parse(self._open), closing)

    def cut_off(self, closing: str, *, keep: bool) -> list[ToolCallEvent] | InvalidCall:
        """Close the open call because the answer has ended, with `closing`, the beginning of its end marker.

        With `keep`, a call that was announced and is valid so far stays in the result, incomplete.
        """
        call = self._open
        assert call is not None
        # Some parsers accept the first half of a call, so only calls in JSON are parsed here.
        parsed = self._parse(call) if self._format.is_json else []
        if keep and not parsed and self._announced is not None and call.is_valid:
            return []
        return self._close(call, parsed, closing)

    def _close(
        self, call: "_StreamingCall", parsed: list["_ParsedCall"], closing: str
    ) -> list[ToolCallEvent] | InvalidCall:
        announced, self._announced = self._announced, None
        self._open = None
        if announced is None and parsed:
            return self._make(parsed if self._parallel else parsed[:1])
        if announced is not None and parsed and call.equals(parsed[0]):
            self.num_made += 1
            return self._make(parsed[1:] if self._parallel else [])
        if announced is not None:
            self.retracted.add(announced)
        return InvalidCall(f"{call.opening}{call.text}{closing}")

    def _make(self, parsed: list["_ParsedCall"]) -> list[ToolCallEvent]:
        self.num_made += len(parsed)
        return [event for call in parsed for event in self._new(call.function, call.written, call.id)]

    def _parse(self, call: "_StreamingCall") -> list["_ParsedCall"]:
        """Parse the call. Empty if the text is not a call, or if it names an unknown function."""
        try:
            parsed = self._parse_text(call, call.text)
        except _NO_CALL:
            finite = _with_finite_numbers(call.text) if self._format.is_json else call.text
            if finite == call.text:
                return []
            try:
                parsed = self._parse_text(call, finite)
            except _NO_CALL:
                return []
        return parsed if self._functions.issuperset(each.function for each in parsed) else []

    def _parse_text(self, call: "_StreamingCall", text: str) -> list["_ParsedCall"]:
        return [_read(entry) for entry in self._format.parse(call.opening, text, self._tools)]

    def _new(self, function: str, arguments: str, id: str | None) -> list[ToolCallEvent]:
        index = len(self._ids)
        if id is None or id in self._ids:  # derived from the job's id, so it is the same in every attempt
            id = "call_" + blake2b(f"{self._job_id}/{index}".encode(), digest_size=12).hexdigest()
        self._ids.append(id)
        return [ToolCallBegan(index, id, function), ToolArguments(index, arguments)]


@dataclass(frozen=True, slots=True)
class _ParsedCall:
    """A call as the format's parser returns it."""

    function: str
    arguments: dict[str, Any]
    written: str  # the arguments as JSON
    id: str | None


def _read(entry: dict[str, Any]) -> _ParsedCall:
    """Validate a call of the parser. Raises one of `_NO_CALL`."""
    function, id = entry["name"], entry.get("id")
    arguments = entry.get("arguments")
    if isinstance(arguments, str):  # JSON within JSON
        arguments = json.loads(arguments)
    arguments = {} if arguments is None else arguments
    if not isinstance(function, str) or not isinstance(arguments, dict):
        raise ValueError("The text is not a tool call.")
    known = id if isinstance(id, str) and _ID.fullmatch(id) else None
    return _ParsedCall(function, arguments, _dumps(arguments), known)


def _with_finite_numbers(text: str) -> str:
    """Return JSON with the largest double for numbers beyond it, which the grammar of a forced call allows."""
    return _STRING_OR_NUMBER.sub(lambda found: repr(_finite(found[0])) if found[1] else found[0], text)


def _finite(digits: str) -> float:
    return min(max(float(digits), -sys.float_info.max), sys.float_info.max)


def _dumps(arguments: dict[str, Any]) -> str:
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        written.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be sent as an escape
        return json.dumps(arguments)
    return written


class _StreamingCall:
    """A call that is being generated."""

    def __init__(self, opening: str, format: CallFormat) -> None:
        self.opening = opening
        self._format = format
        self._may_be_json = format.is_json
        self._text = list[str]()
        self._json: PartialJson | None = None
        self._name, self._arguments = list[str](), list[str]()
        self._function: str | None = None

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def arguments(self) -> str:
        return "".join(self._arguments)

    @property
    def _is_complete(self) -> bool:
        return self._json is not None and self._json.complete_members >= {"name", "arguments"}

    @property
    def in_string(self) -> bool:
        """True if the JSON is within a string."""
        return self._json is not None and self._json.in_string

    @property
    def is_valid(self) -> bool:
        """True if the call is complete, or is valid JSON so far."""
        return self._is_complete or (self._json is not None and not self._json.broken)

    @property
    def begun(self) -> bool:
        """True if the name is complete and the arguments have begun."""
        if self._json is None or "name" not in self._json.complete_members or not self._name or not self._arguments:
            return False
        return self._name[0].startswith('"') and self._arguments[0].startswith("{")

    @property
    def function(self) -> str:
        """Name of the function; valid only if `begun`."""
        if self._function is None:  # parsed once: it may be long, and is read at each token
            self._function = str(json.loads("".join(self._name)))
        return self._function

    def equals(self, parsed: _ParsedCall) -> bool:
        """True if it is complete and equals the parsed call; valid only if `begun`."""
        if not self._is_complete or self.function != parsed.function:
            return False
        return bool(json.loads(self.arguments, parse_float=_finite) == parsed.arguments)

    def feed(self, text: str) -> str:
        """Add text. Returns what it adds to the arguments."""
        self._text.append(text)
        if self._json is None:
            text = self._beginning()
        if self._json is None or self._is_complete:
            return ""
        before = len(self._arguments)
        for member in self._json.feed(text):
            match member.key:
                case "name":
                    self._name.append(member.text)
                case "arguments":
                    self._arguments.append(member.text)
        return "".join(self._arguments[before:])

    def _beginning(self) -> str:
        """Return the text for the JSON parser as soon as it is known to be JSON; empty before."""
        if not self._may_be_json:
            return ""
        try:
            beginning = self._format.as_json(self.opening, self.text)
        except ValueError:
            self._may_be_json = False
            return ""
        if beginning is not None:
            self._json = PartialJson()
        return beginning or ""


def as_deltas(events: Iterable[ToolCallEvent]) -> tuple[Delta, ...]:
    """Return the events as OpenAI's deltas, one for each call."""
    deltas = tuple(map(_as_delta, events))
    return merge_deltas(deltas) if len(deltas) > 1 else deltas


def _as_delta(event: ToolCallEvent) -> Delta:
    match event:
        case ToolCallBegan(index, id, function):
            return {"index": index, "id": id, "type": "function", "function": {"name": function, "arguments": ""}}
        case ToolArguments(index, text):
            return {"index": index, "function": {"arguments": text}}


def merge_deltas(deltas: Iterable[Delta]) -> tuple[Delta, ...]:
    """Merge consecutive deltas of a call: one for each call, with its fragments of arguments joined."""
    calls = list[tuple[Delta, list[str]]]()
    for delta in deltas:
        if not calls or calls[-1][0]["index"] != delta["index"]:
            calls.append((delta, []))
        calls[-1][1].append(delta["function"]["arguments"])
    return tuple(_with_arguments(first, "".join(written)) for first, written in calls)


def _with_arguments(delta: Delta, arguments: str) -> Delta:
    return {**delta, "function": {**delta["function"], "arguments": arguments}}


def message_tool_calls(deltas: Iterable[Delta], retracted: Container[int] = ()) -> list[dict[str, Any]]:
    """Return a message's `tool_calls`, without the retracted ones. A call that was cut off is included, incomplete."""
    calls = [delta for delta in merge_deltas(deltas) if delta["index"] not in retracted]
    return [{"id": call["id"], "type": call["type"], "function": call["function"]} for call in calls]
