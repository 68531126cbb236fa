"""Calls whose arguments are JSON.

In an object with the function's name: {"name": "weather", "arguments": {"city": "Oslo"}}, alone or in a list.
After a header with it: [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}
"""

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from worker.text.dialects.cursor import LONGEST_HEADER, Cursor, Markers, NotACall, Waiting
from worker.text.dialects.dialect import (
    CallArguments,
    CallBegan,
    CallEnded,
    CallEvent,
    Calls,
    Functions,
    Repaired,
    Written,
    collected,
    function_name,
    read_arguments,
    repaired,
)
from worker.text.dialects.json_text import BrokenJson, JsonText, Repair, whole

_NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters", "input")  # that models call all of a call's arguments


@dataclass(frozen=True)
class JsonCalls:
    """Calls that are JSON objects, between markers or without."""

    name: str
    openings: tuple[str, ...]
    closing: str = ""
    bare: str = ""
    keys: tuple[str, str] = ("name", "arguments")  # of the function and its arguments, in what is written
    ids: tuple[str, str] = ("", "")  # keys of an id that some models write before the function, or after its arguments,
    # where it comes too late to be the call's
    named_by_key: bool = False  # {"weather": {"city": "Oslo"}}
    is_list: bool = False  # calls are written as a list
    line: str = ""  # is written before and after the objects
    between: str = "; "  # is written between objects without markers

    @property
    def signs(self) -> tuple[str, ...]:
        """Texts by which instructions show the dialect."""
        return (self.openings[0], self.closing)

    def write(self, calls: Written) -> str:
        """Return the calls as a list, or as objects with markers around each."""
        objects = [json.dumps(self._object(*call), ensure_ascii=False) for call in calls]
        opening = "" if self.bare and not self.closing else self.openings[0]
        if self.is_list:
            objects = [f"[{', '.join(objects)}]"]
        each = [f"{opening}{self.line}{written}{self.line}{self.closing}" for written in objects]
        return ("\n" if opening else self.between).join(each)

    def _object(self, function: str, arguments: dict[str, Any]) -> dict[str, Any]:
        if self.named_by_key:
            return {function: arguments}
        return dict(zip(self.keys, (function, arguments), strict=True))

    def read(self, opening: str, cursor: Cursor, functions: Functions) -> Calls:
        """Read one object, or several: in a list, or after commas, semicolons or line ends."""
        closing, ends = Markers((self.closing,)), Markers((self.closing, *self.openings))
        found = is_list = False
        while True:
            char = yield from cursor.skip_blank()
            if char == "{":
                yield from self.read_object(cursor, ends, functions, known=not opening)
                found = True
            elif char == "[" and not found and not is_list:
                cursor.take(1)
                is_list = True
            elif char and char in ",;" and found:
                cursor.take(1)
            else:
                break
        if not found:
            raise NotACall
        if is_list and char == "]":
            cursor.take(1)
        closed = self.closing and (yield from cursor.accept(closing, after_blank=True))
        if opening and self.closing and not closed:
            yield Repaired(Repair.CLOSING)
        elif closed and not opening:
            yield Repaired(Repair.OPENING)

    def read_object(self, cursor: Cursor, ends: Markers, functions: Functions, *, known: bool = False) -> Calls:
        """Read one call. `ends`: markers that may follow. `known`: only of an offered function. Raises `NotACall`."""
        call = _Object(self, cursor, ends, functions, known=known)
        try:
            yield from call.read()
        except BrokenJson:
            if not call.begun:
                raise NotACall from None
            yield CallEnded(complete=not cursor.cut_off)


class _Object:
    """One call while it is read."""

    def __init__(self, dialect: JsonCalls, cursor: Cursor, ends: Markers, functions: Functions, *, known: bool) -> None:
        self._dialect = dialect
        self._cursor, self._ends = cursor, ends
        self._functions, self._known = functions, known
        self._repairs = set[Repair]()
        self._json = JsonText(cursor, self._repairs, stops=ends)
        self._function, self._id = "", None
        self._held: str | None = None  # arguments before the function's name
        self._others = list[str]()  # members that are neither: arguments of a call that has no others
        self._complete = True
        self.begun = False

    def read(self) -> Calls:
        """Read the object at the cursor."""
        yield from self._members()
        if not self.begun:
            if self._known and self._held is None:
                raise NotACall
            yield from self._begin(self._held or "{" + ", ".join(self._others) + "}")
        yield from repaired(self._repairs)
        yield CallEnded(self._complete)

    def _members(self, *, inner: bool = False) -> Calls:
        """Read the members of the object; `inner`: of one that is a member of it."""
        self._cursor.take(1)
        while (char := (yield from self._cursor.skip_blank())) != "}":
            if not char or (yield from self._cursor.starts(self._ends)):
                if not self.begun and (self._cursor.cut_off or self._held is None):
                    raise NotACall
                self._complete = self._complete and not self._cursor.cut_off
                self._repairs.add(Repair.BRACKETS)
                return
            if char == ",":
                self._cursor.take(1)
                continue
            if char not in "\"'":
                raise BrokenJson
            key = json.loads((yield from collected(self._json.value())))
            if (yield from self._cursor.skip_blank()) != ":":
                raise BrokenJson
            self._cursor.take(1)
            yield from self._member(key, (yield from self._cursor.skip_blank()), inner)
        self._cursor.take(1)

    def _member(self, key: str, char: str, inner: bool) -> Calls:
        if key == "function" and char == "{" and not (self._function or inner):  # OpenAI's form
            yield from self._members(inner=True)
        elif key in (*_NAMES, self._dialect.keys[0]) and not self._function:
            self._name((yield from collected(self._json.value())))
            if self._held is not None:
                yield from self._begin(self._held)
        elif key in (*ARGUMENTS, self._dialect.keys[1]) and not self.begun and self._held is None:
            yield from self._arguments(char)
        elif self._is_name(key, char):
            self._function = function_name(key)
            yield from self._arguments(char)
        else:
            value = yield from collected(self._json.value())
            if key == "id" and value.startswith('"'):
                self._id = json.loads(value)
            elif not self.begun and key not in ("type", *self._dialect.ids):
                self._others.append(f"{json.dumps(key, ensure_ascii=False)}: {value}")
                self._check()

    def _is_name(self, key: str, char: str) -> bool:
        first = not (self._function or self._others or self._held or self.begun)
        return first and char == "{" and (self._dialect.named_by_key or key in self._functions)

    def _name(self, value: str) -> None:
        if not value.startswith('"'):
            raise NotACall
        self._function = function_name(json.loads(value))
        if self._known and self._function not in self._functions:
            raise NotACall

    def _check(self) -> None:
        """Without a marker an object with other members is an answer in JSON, and no call."""
        if self._known:
            raise NotACall

    def _arguments(self, char: str) -> Calls:
        if not self._function:
            self._held = object_of((yield from collected(self._json.value())), self._repairs)
        elif char and char in "{[":
            self.begun = True
            yield CallBegan(self._function, self._id)
            self._complete = yield from read_arguments(self._cursor, self._json, self._ends)
        else:
            yield from self._begin(object_of((yield from collected(self._json.value())), self._repairs))

    def _begin(self, arguments: str) -> Generator[CallEvent | None, None, None]:
        if not self._function:
            raise NotACall
        self.begun = True
        yield CallBegan(self._function, self._id)
        yield CallArguments(arguments)


def object_of(value: str, repairs: set[Repair]) -> str:
    """Return arguments that may be JSON within a string, or null, as the object that they mean."""
    if value == "null":
        return "{}"
    if value.startswith('"'):
        found = set[Repair]()
        inner = whole(json.loads(value), found)
        if inner is not None and inner.startswith("{"):
            repairs |= found
            return inner
    return value


@dataclass(frozen=True)
class HeaderCalls:
    """Calls with a header and JSON, alone or within a section."""

    name: str
    openings: tuple[str, ...]
    header: str  # a regular expression with the groups `name` and perhaps `id`, for all up to `separator`
    separator: str  # the marker between header and arguments
    form: str  # a whole call, with {name}, {index} and {arguments} in it
    each: str = ""  # the marker before each call of a section; it may open calls without the section too
    end: str = ""  # the marker after each call
    short_end: str = ""  # what some models write instead
    closing: str = ""  # the marker after the section
    more_forms: tuple[str, ...] = ()  # what models write instead, with {id} in it
    as_list: JsonCalls | None = None  # the other form of the dialect: a list of objects after the same opening
    only_objects: bool = False  # an opening stands in prose too: without an object, only an offered function is called
    unmarked: bool = False  # calls of offered functions may follow each other without another opening
    bare: str = ""

    @property
    def signs(self) -> tuple[str, ...]:
        """Texts by which instructions show the dialect."""
        return (self.openings[0], self.each, self.separator, self.closing)

    def write(self, calls: Written) -> str:
        """Return the calls, in a section if there is one."""
        each = [
            self.form.format(name=name, index=index, arguments=json.dumps(arguments, ensure_ascii=False))
            for index, (name, arguments) in enumerate(calls)
        ]
        return (self.openings[0] if self.each else "") + "".join(each) + self.closing

    def read(self, opening: str, cursor: Cursor, functions: Functions) -> Calls:
        """Read one call, or all calls of a section."""
        if self.as_list and (yield from cursor.skip_blank()) in ("[", "{"):
            yield from self.as_list.read(opening, cursor, functions)
            return
        each, closing = Markers((self.each,)), Markers((self.closing,))
        if not self.each or opening == self.each:
            yield from self._call(cursor, functions)
            while self.unmarked and (yield from self._follows(cursor, functions)):
                yield from self._call(cursor, functions)
        elif not (yield from cursor.starts(each, after_blank=True)):
            raise NotACall
        while self.each and (yield from cursor.accept(each, after_blank=True)):
            yield from self._call(cursor, functions)
        if self.closing and not (yield from cursor.accept(closing, after_blank=True)):
            yield Repaired(Repair.CLOSING)

    def _follows(self, cursor: Cursor, functions: Functions) -> Waiting[bool]:
        """Return True if a call of an offered function comes next, without its opening. Reads nothing."""
        recording, ends = cursor.record(), Markers((self.separator, *self.openings))
        try:
            header, marker = yield from cursor.until(ends, LONGEST_HEADER)
            found = re.fullmatch(self.header, header.strip()) if marker == self.separator else None
        except NotACall:
            found = None
        cursor.put_back(cursor.recorded(recording))
        return found is not None and found["name"] in functions

    def _call(self, cursor: Cursor, functions: Functions) -> Calls:
        header, marker = yield from cursor.until(Markers((self.separator, "{")), LONGEST_HEADER)
        if marker == "{":  # some models leave the marker before the arguments out
            cursor.put_back(marker)
        found = re.fullmatch(self.header, header if self.only_objects else header.strip())
        if not found:
            raise NotACall
        function = function_name(found["name"])
        if self.only_objects and (yield from cursor.skip_blank()) != "{" and function not in functions:
            raise NotACall
        yield CallBegan(function, found.groupdict().get("id"))
        call_ends = Markers((self.end, self.short_end))
        ends = Markers((*call_ends.texts, self.each, self.closing, *self.openings))
        repairs = {Repair.ARGUMENTS} if marker == "{" else set[Repair]()
        complete = yield from read_arguments(cursor, JsonText(cursor, repairs, stops=ends), ends)
        if self.end and (yield from cursor.accept(call_ends, after_blank=True)) != self.end:
            repairs.add(Repair.CLOSING)
        yield from repaired(repairs)
        yield CallEnded(complete)
