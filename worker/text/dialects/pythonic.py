"""Calls that are written as in Python, [weather(city="Oslo", days=2)], or as Gemma does, call:weather{city:"Oslo"}."""

import json
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from worker.text.dialects.cursor import Cursor, Markers, NotACall, Waiting
from worker.text.dialects.dialect import (
    LONGEST_NAME,
    CallArguments,
    CallBegan,
    CallEnded,
    CallEvent,
    Calls,
    Functions,
    Repaired,
    Written,
    function_name,
    pieces_of,
    read_arguments,
    repaired,
    verbatim,
)
from worker.text.dialects.json_calls import JsonCalls
from worker.text.dialects.json_text import BrokenJson, JsonText, Repair
from worker.text.dialects.values import Parameters

_PARENTHESIS, _EQUALS = Markers(("(",)), Markers(("=",))


@dataclass(frozen=True)
class PythonicCalls:
    """Calls as in Python, in a list or on lines of their own."""

    name: str
    openings: tuple[str, ...]
    closing: str = ""
    bare: str = ""
    as_json: JsonCalls = field(default_factory=lambda: JsonCalls("", ()))  # what some models write instead

    @property
    def signs(self) -> tuple[str, ...]:
        """Texts by which instructions show the dialect."""
        return (self.openings[0], self.closing)

    def write(self, calls: Written) -> str:
        """Return the calls as a list."""
        each = (
            f"{name}({', '.join(f'{key}={_python(value)}' for key, value in given.items())})" for name, given in calls
        )
        return f"{'' if self.bare else self.openings[0]}[{', '.join(each)}]{'' if self.bare else self.closing}"

    def read(self, opening: str, cursor: Cursor, functions: Functions) -> Calls:
        """Read the calls. Arguments without a name have those of the function's parameters, in their order."""
        recording = cursor.record()
        try:
            yield from self._calls(opening, cursor, functions)
        finally:
            written = cursor.recorded(recording)
        if opening and self.closing and written.endswith(self.closing) and (yield from cursor.skip(written)):
            yield Repaired(Repair.TWICE)

    def _calls(self, opening: str, cursor: Cursor, functions: Functions) -> Calls:
        closing = Markers((self.closing,))
        is_list = found = False
        if (yield from cursor.skip_blank()) == "[":
            cursor.take(1)
            is_list = True
        if (yield from cursor.skip_blank()) == "{":
            yield from self.as_json.read(opening, cursor, functions)
            found = True
        while True:
            char = yield from cursor.skip_blank()
            if found and char and char in ",;":
                cursor.take(1)
            elif (
                char == "]"
                or not char
                or (yield from cursor.starts(closing))
                or (found and not is_list and not opening)
            ):
                break
            else:
                yield from self._call(cursor, functions, known=not opening, is_list=is_list, is_first=not found)
                found = True
        if not found:
            raise NotACall
        if is_list and char == "]":
            cursor.take(1)
        closed = self.closing and (yield from cursor.accept(closing, after_blank=True))
        if opening and self.closing and not closed:
            yield Repaired(Repair.CLOSING)

    def _call(self, cursor: Cursor, functions: Functions, *, known: bool, is_list: bool, is_first: bool) -> Calls:
        """Read one call. `known`: only of an offered function. `is_list`: it stands in a list; else prose may follow
        the first."""
        name, _ = yield from cursor.until(_PARENTHESIS, LONGEST_NAME)
        function, repairs = function_name(name), set[Repair]()
        if function not in functions and (known or (name[-1].isspace() and not (is_list or is_first))):
            raise NotACall
        yield CallBegan(function)
        ends = Markers((self.closing, *self.openings))
        yield CallArguments("{")
        complete = True
        try:
            parameters = functions.get(function) or Parameters({})
            yield from self._arguments(cursor, parameters, ends, repairs, is_list=is_list)
        except (BrokenJson, NotACall):
            complete = not cursor.cut_off
            repairs.add(Repair.BROKEN)
            yield from verbatim(cursor, ends)
        yield from repaired(repairs)
        yield CallEnded(complete)

    def _arguments(
        self, cursor: Cursor, parameters: Parameters, ends: Markers, repairs: set[Repair], *, is_list: bool
    ) -> Generator[CallEvent | None, None, None]:
        unnamed, given = iter(parameters.names), list[str]()
        has_names = after_comma = False
        while (char := (yield from cursor.skip_blank())) != ")":
            if not char or (yield from cursor.starts(ends)):
                if cursor.cut_off:
                    raise BrokenJson
                repairs.add(Repair.BRACKETS)
                break
            if char == ",":
                cursor.take(1)
                after_comma = True
                continue
            if char == "*" or (given and not after_comma):
                raise BrokenJson
            name = yield from _keyword(cursor)
            has_names = has_names or bool(name)
            name = name or ("" if has_names else next(unnamed, ""))
            if not name or name in given:
                raise BrokenJson
            yield CallArguments(f"{', ' if given else ''}{json.dumps(name, ensure_ascii=False)}: ")
            string_ends = partial(_string_ends, cursor, ends, is_list=is_list, has_names=has_names)
            zeros = not parameters.is_string(name)
            yield from pieces_of(
                JsonText(cursor, repairs, stops=ends, python=True, zeros=zeros, string_ends=string_ends)
            )
            given.append(name)
            after_comma = False
        else:
            cursor.take(1)
        yield CallArguments("}")


def _string_ends(cursor: Cursor, ends: Markers, *, is_list: bool, has_names: bool) -> Waiting[bool]:
    """Return True if an argument may end here, behind a quote: another argument follows, or the end of the call with
    another call, the end of the list or the end of all calls behind it."""
    char = yield from cursor.skip_blank()
    if not char or (yield from cursor.starts(ends)):
        return True
    if char == ",":
        cursor.take(1)
        return not has_names or (yield from cursor.skip_blank()) == ")" or bool((yield from _keyword(cursor)))
    if char != ")":
        # Here a comma may be missing, or texts follow each other, which are one for Python: what is meant is not known.
        return char in "\"'" or bool((yield from _keyword(cursor)))
    cursor.take(1)
    char = yield from cursor.skip_blank()
    if not is_list:
        return not (char and char in ")\"'")
    if not char or char == "]" or (yield from cursor.starts(ends)):
        return True
    if char not in ",;":
        return False
    cursor.take(1)
    # The whole name is not waited for: it would hold the end of this call back.
    return (yield from cursor.skip_blank()).isidentifier()


def _keyword(cursor: Cursor) -> Waiting[str]:
    """Read the name of an argument and the sign after it; nothing if the argument has no name."""
    count = 1
    while True:
        text = yield from cursor.ahead(count)
        name, equals, _ = text.partition("=")
        if equals:
            return cursor.take(len(name) + 1)[:-1].strip() if name.strip().isidentifier() else ""
        if len(text) < count or not (text.strip().isidentifier() or not text.strip()) or count > LONGEST_NAME:
            return ""
        count += 1


def _python(value: Any) -> str:
    """Return a value as Python writes it, with JSON's quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(name)}: {_python(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


@dataclass(frozen=True)
class GemmaCalls:
    """Calls with a name and an object whose strings stand between a marker."""

    name: str
    openings: tuple[str, ...]
    closing: str
    quote: str
    bare: str = ""

    @property
    def signs(self) -> tuple[str, ...]:
        """Texts by which instructions show the dialect."""
        return (self.openings[0], self.closing, self.quote)

    def write(self, calls: Written) -> str:
        """Return the calls, each between the markers."""
        return "".join(f"{self.openings[0]}call:{name}{self._value(given)}{self.closing}" for name, given in calls)

    def _value(self, value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ",".join(f"{name}:{self._value(each)}" for name, each in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._value, value)) + "]"
        return f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value)

    def read(self, opening: str, cursor: Cursor, functions: Functions) -> Calls:
        """Read one call. What stands behind its name in place of an object is delivered as it was written."""
        begins = yield from cursor.accept(Markers(("call:", ":")), after_blank=True)  # some leave the word out
        if not begins:
            raise NotACall
        name, bracket = yield from cursor.until(Markers(("{", self.closing)), LONGEST_NAME, one_word=False)
        if bracket == self.closing:
            name, _, written = name.strip().partition(" ")
            if "`" in written or (begins == ":" and name not in functions):  # prose about markers
                raise NotACall
            yield CallBegan(function_name(name))
            yield CallArguments(written.strip() or "{}")
            yield Repaired(Repair.BROKEN if written else Repair.BRACKETS)
            yield CallEnded()
            return
        cursor.put_back(bracket)
        yield CallBegan(function_name(name))
        ends, repairs = Markers((self.closing, *self.openings)), set[Repair]()
        json_text = JsonText(cursor, repairs, stops=ends, quotes=Markers((self.quote,)))
        complete = yield from read_arguments(cursor, json_text, ends)
        if not (yield from cursor.accept(Markers((self.closing,)), after_blank=True)):
            repairs.add(Repair.CLOSING)
        yield from repaired(repairs)
        yield CallEnded(complete)
