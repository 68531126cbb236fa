r"""Calls whose parameters stand in tags of their own, as text: <parameter=city>\nOslo\n</parameter>"""

import json
import re
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from worker.text.dialects.cursor import BLANK, LONGEST_HEADER, Cursor, Markers, NotACall, Waiting
from worker.text.dialects.dialect import (
    CallArguments,
    CallBegan,
    CallEnded,
    Calls,
    Functions,
    Repaired,
    Written,
    collected,
    function_name,
    repaired,
)
from worker.text.dialects.json_calls import ARGUMENTS, JsonCalls, object_of
from worker.text.dialects.json_text import BrokenJson, JsonText, Repair
from worker.text.dialects.values import Parameters

_NAME = re.compile(r"[\w.-]+\s*")
_ELEMENT = re.compile(r"[\w.-]+")  # names that can be those of elements
_TYPE_NAMES = {bool: "boolean", int: "number", float: "number", list: "array", dict: "object", type(None): "null"}


def tag(around: tuple[str, str], name: str, attribute: str = "") -> str:
    """Return the tag around a name, with an attribute behind it."""
    quote = '"' if around[0].endswith('"') else ""
    return f"{around[0]}{name}{quote}{attribute and ' ' + attribute}{around[1]}"


def _name_of(head: str, around: tuple[str, str]) -> tuple[str, str]:
    """Return the name in a tag, and what follows it if the name stands in quotes."""
    name, _, attribute = head.partition('"') if around[0].endswith('"') else (head, "", "")
    return name.strip(), attribute


@dataclass(frozen=True)
class TagCalls:
    """Calls in tags. A tag is given as what precedes its name, which may be a quote, and the end of the tag."""

    name: str
    openings: tuple[str, ...]
    function: tuple[str, str]  # around the function's name
    parameter: tuple[str, str]  # around a parameter's name
    index: str = ""  # the attribute after a function's name, with {index} in it, which counts the calls from 1
    value: tuple[str, str] = ("", "")  # before a value, and after it: with {name}, it repeats the parameter's name
    end: str = ""  # after the parameters
    closing: str = ""  # after all calls
    line: str = ""  # what the format puts before and after a value
    typed: tuple[str, str] | tuple[()] = ()  # the attribute after the name of a string, and of another {type}
    gap: str = "\n"  # is written between tags
    item: str = ""  # lists and objects are elements within a value, and this is the name of a list's
    cdata: bool = False  # a string may be written as <![CDATA[Oslo]]>
    python: bool = False  # lists and objects are written as Python writes them
    bare: str = ""

    @property
    def signs(self) -> tuple[str, ...]:
        """Texts by which instructions show the dialect."""
        return (self.openings[0], self.function[0], self.parameter[0], self.closing)

    def write(self, calls: Written) -> str:
        """Return the calls, each between the markers."""
        return self.gap.join(self._written(index, *call) for index, call in enumerate(calls, 1))

    def _written(self, index: int, function: str, arguments: dict[str, Any]) -> str:
        opening = "" if self.openings[0] == self.function[0] else self.openings[0]
        head = tag(self.function, function, self.index.format(index=index))
        lines = [opening + (self.gap if self.function[0] and opening else "") + head]
        for name, value in arguments.items():
            head = tag(self.parameter, name, self._attribute(value)) + (self.value[0] and self.gap + self.value[0])
            lines.append(f"{head}{self.line}{self._text(value)}{self.line}{self.end_of(name)}")
        return self.gap.join(filter(None, [*lines, self.end, self.closing]))

    def end_of(self, name: str) -> str:
        """Return the tag after the value of a parameter."""
        return self.value[1].replace("{name}", name)

    def _text(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not (self.item and value and isinstance(value, dict | list) and self._shows_types(value)):
            return json.dumps(value, ensure_ascii=False)
        members = value.items() if isinstance(value, dict) else ((self.item, each) for each in value)
        return "".join(f"{tag(self.parameter, name)}{self._text(each)}{self.end_of(name)}" for name, each in members)

    def _shows_types(self, value: Any) -> bool:
        """True if elements show without a schema what the value is; else it is written as JSON."""
        if isinstance(value, dict):
            return {*value} != {self.item} and all(
                _ELEMENT.fullmatch(name) and self._shows_types(each) for name, each in value.items()
            )
        if isinstance(value, list):
            return bool(value) and all(map(self._shows_types, value))
        return isinstance(value, str) and value.lstrip()[:1] not in ("{", "[")

    def _attribute(self, value: Any) -> str:
        if not self.typed:
            return ""
        return self.typed[0] if isinstance(value, str) else self.typed[1].format(type=_TYPE_NAMES[type(value)])

    def read(self, opening: str, cursor: Cursor, functions: Functions) -> Calls:
        """Read the calls between the markers. Each is emitted when it is complete, since only then is it known which
        of several ends of a value is the last."""
        begins = Markers((self.function[0],))
        found = False
        if opening != self.function[0] and (yield from cursor.skip_blank()) in ("{", "["):  # some models write JSON
            yield from JsonCalls("", self.openings, self.closing).read(opening, cursor, functions)
            return
        if opening and opening == self.function[0]:  # without the marker around the call
            yield from self._call(cursor, functions)
            found = True
            if self.closing and self.openings[0] != opening:
                yield Repaired(Repair.OPENING)
        elif not self.function[0]:
            yield from self._call(cursor, functions)
            found = True
        while self.function[0] and (yield from cursor.accept(begins, after_blank=True)):
            yield from self._call(cursor, functions)
            found = True
        if not found:
            raise NotACall
        if self.closing and not (yield from cursor.accept(Markers((self.closing,)), after_blank=True)):
            yield Repaired(Repair.CLOSING)

    def _call(self, cursor: Cursor, functions: Functions) -> Calls:
        function = yield from self._function(cursor)
        parameters, repairs = functions.get(function) or Parameters({}), set[Repair]()
        written, as_json = dict[str, str](), ""
        if (yield from cursor.skip_blank()) == "{":  # some models write an object in place of tags
            as_json = yield from self._object_in_json(cursor, repairs)
        try:
            while head := (yield from self._head(cursor)):
                written[head[0]] = yield from self._argument(cursor, *head, parameters, written, repairs)
            if self.end and not (yield from cursor.accept(Markers((self.end,)), after_blank=True)):
                follows = cursor.ended or (yield from cursor.starts(self._ends, after_blank=True))
                if cursor.cut_off or not follows:
                    raise NotACall
                repairs.add(Repair.CLOSING)
        except NotACall:
            if not cursor.cut_off or not (written or function in functions):
                raise
            cursor.take(len(cursor.waiting))
            yield CallBegan(function)
            yield CallArguments(_object(written)[:-1])
            yield CallEnded(complete=False)
            return
        yield CallBegan(function)
        yield CallArguments(as_json or _unwrapped(written, parameters, repairs) or _object(written))
        yield from repaired(repairs)
        yield CallEnded()

    def _object_in_json(self, cursor: Cursor, repairs: set[Repair]) -> Waiting[str]:
        ends = Markers((self.end, *self._ends.texts))
        try:
            return (yield from collected(JsonText(cursor, repairs, stops=ends, python=self.python).value()))
        except BrokenJson:
            raise NotACall from None

    def _argument(
        self, cursor: Cursor, name: str, attribute: str, parameters: Parameters, written: Collection[str],
        repairs: set[Repair], depth: int = 0,
    ) -> Waiting[str]:  # fmt: skip
        """Read the value of a parameter, or of an element within one, as JSON."""
        if self.item and (yield from self._has_elements(cursor, parameters.other_types(name))):
            return (yield from self._elements(cursor, name, parameters, repairs, depth))
        text, closed = yield from self._value(cursor, self.end_of(name), parameters, {*written, name})
        if not closed and not (yield from cursor.next()):
            raise NotACall  # the answer ends within a value: its rest is not known
        if not closed:
            text = text.rstrip()
            repairs.add(Repair.CLOSING)
        if self.item and not text.strip() and not parameters.may_be_string(name):
            return "[]" if "array" in parameters.other_types(name) else "{}"
        return self._json(name, attribute, text, parameters, repairs)

    def _has_elements(self, cursor: Cursor, types: Collection[str]) -> Waiting[bool]:
        if not {"object", "array"} & {*types}:
            return False
        return (yield from cursor.starts(self._heads, after_blank=True)) == self.parameter[0]

    def _elements(
        self, cursor: Cursor, name: str, parameters: Parameters, repairs: set[Repair], depth: int
    ) -> Waiting[str]:
        """Read the elements of a list or an object, up to its end. Several of one name in an object are a list."""
        if depth == 50:  # elements within one another
            raise NotACall
        within, found = parameters.within(name, self.item), dict[str, list[str]]()
        while head := (yield from self._head(cursor)):
            known = {*found} - {self.item}
            value = yield from self._argument(cursor, *head, within, known, repairs, depth + 1)
            found.setdefault(head[0], []).append(value)
        if not (yield from cursor.accept(Markers((self.end_of(name),)), after_blank=True)):
            if cursor.ended or not (yield from cursor.starts(Markers((self.end, *self._ends.texts)), after_blank=True)):
                raise NotACall
            repairs.add(Repair.CLOSING)
        if found.keys() == {self.item} and "array" in parameters.other_types(name):
            return f"[{', '.join(found[self.item])}]"
        members = {
            member: values[0] if len(values) == 1 else f"[{', '.join(values)}]" for member, values in found.items()
        }
        return _object(members)

    @property
    def _heads(self) -> Markers:
        """What begins a tag before a value, and what only looks so: the end of an element."""
        return Markers((self.parameter[0], self.parameter[0] + "/" * bool(self.item)))

    @property
    def _ends(self) -> Markers:
        return Markers((self.closing, *self.openings))

    def _function(self, cursor: Cursor) -> Waiting[str]:
        after = self.function[1]
        if after:
            name, _ = yield from cursor.until(Markers((after,)), LONGEST_HEADER)
            if "<" in name:
                raise NotACall
            return function_name(_name_of(name, self.function)[0].strip("\"'"))
        # The name ends where the parameters begin, or the call.
        yield from cursor.skip_blank()
        name = ""
        ends = Markers((self.parameter[0], self.end, self.closing))
        while not (yield from cursor.starts(ends, after_blank=True)):
            char = yield from cursor.next()
            if not char or char.isspace() or len(name) > LONGEST_HEADER:
                raise NotACall
            name += cursor.take(1)
        return function_name(name)

    def _head(self, cursor: Cursor) -> Waiting[tuple[str, str] | None]:
        """Read the tag before a value: the parameter's name, and what follows it within the tag."""
        if (yield from cursor.starts(self._heads, after_blank=True)) != self.parameter[0]:
            return None
        yield from cursor.accept(Markers((self.parameter[0],)), after_blank=True)
        head, _ = yield from cursor.until(Markers((self.parameter[1],)), LONGEST_HEADER, one_word=False)
        if self.value[0] and not (yield from cursor.accept(Markers((self.value[0],)), after_blank=True)):
            raise NotACall
        return _name_of(head, self.parameter)

    def _value(
        self, cursor: Cursor, end: str, parameters: Parameters, written: Collection[str]
    ) -> Generator[None, None, tuple[str, bool]]:
        """Read a value and its end, which is `end`. Returns False with a value whose end was missing.

        Nothing in a value is escaped, so its end may stand in it too. It ends at the first end behind which a
        parameter, the end of the call or nothing comes (`_may_follow`), unless another end with the end of a call
        behind it comes soon: then the value quotes a call (`_is_last_end`). Ends within calls that the value quotes
        whole do not count. Without an end it ends where the next known parameter begins, or where the call ends
        (`_is_without_end`).
        """
        text, quoted = list[str](), 0  # `quoted`: calls within the value that have begun and not ended
        first, last = self.openings[0], self.closing or self.end
        marks = Markers((first, end, self.parameter[0], self.end, self.closing))
        while True:
            more, mark = cursor.before(marks)
            text.append(more)
            if mark == first and (yield from self._begins_call(cursor)):
                quoted += 1
            elif mark and quoted:
                quoted -= mark == last
            elif mark == end:
                if self.item or ((yield from self._may_follow(cursor)) and (yield from self._is_last_end(cursor, end))):
                    return "".join(text), True
            elif mark:
                if (yield from self._is_without_end(cursor, mark, parameters, written)):
                    cursor.put_back(mark)
                    return "".join(text), False
            elif cursor.ended:
                return "".join(text), False
            else:
                yield None
            text.append(mark)

    def _begins_call(self, cursor: Cursor) -> Waiting[bool]:
        """True if a marker within a value is followed by a call, and not by prose about it."""
        if self.function[0] == self.openings[0]:
            return '"' not in self.function[0] or (yield from _is_name(cursor, ('"',)))
        if self.function[0]:
            return bool((yield from cursor.starts(Markers((self.function[0],)), after_blank=True)))
        return (yield from _is_name(cursor, (self.parameter[0], self.closing)))

    def _may_follow(self, cursor: Cursor) -> Waiting[bool]:
        """True if what comes next can follow the end of a value; else the end is a part of the value."""
        follows = Markers((self.parameter[0], self.end, self.closing, self.function[0]))
        return bool((yield from cursor.starts(follows, after_blank=True))) or not cursor.waiting.strip()

    def _is_last_end(self, cursor: Cursor, value_end: str) -> Waiting[bool]:
        """False if another end of a value follows soon, with the end of a call behind it, before anything else that
        begins: the value holds whole calls."""
        marks = Markers((value_end, self.parameter[0], self.function[0], *self.openings))
        behind = Markers((self.end, self.closing, self.parameter[0]))
        limit = len(self.end) + len(self.closing) + 64  # characters
        while True:
            text = cursor.waiting
            place, mark = marks.first(text[:limit], 0)
            if mark == value_end:
                rest = text[place + len(mark) :].lstrip(BLANK)
                if cursor.ended or (rest and not behind.may_go_on(rest, 0)):
                    return not behind.at(rest, 0)
            elif mark or cursor.ended or len(text) >= limit:
                return True
            yield None

    def _is_without_end(
        self, cursor: Cursor, mark: str, parameters: Parameters, written: Collection[str]
    ) -> Waiting[bool]:
        """True if a value ends at this mark, since the end before it is missing. A parameter must be one that the
        function has and the call has not; the end of a call must end it."""
        if mark == self.parameter[0]:
            while self.parameter[1] not in cursor.waiting[:LONGEST_HEADER]:
                if cursor.ended or len(cursor.waiting) >= LONGEST_HEADER:
                    return False
                yield None
            name, _ = _name_of(cursor.waiting.partition(self.parameter[1])[0], self.parameter)
            return parameters.has(name) and name not in written
        follows = Markers((self.closing, *self.openings, self.function[0]) if mark == self.end else self.openings)
        return bool((yield from cursor.starts(follows, after_blank=True))) or not cursor.waiting.strip()

    def _json(self, name: str, attribute: str, text: str, parameters: Parameters, repairs: set[Repair]) -> str:
        text = text.removeprefix(self.line).removesuffix(self.line)
        if self.cdata and text.startswith("<![CDATA[") and text.endswith("]]>"):
            text = text[len("<![CDATA[") : -len("]]>")]
        if not (self.typed and attribute):
            return parameters.json_of(name, text, repairs, python=self.python)
        return parameters.typed_json_of(name, text, repairs, is_string=self.typed[0] in attribute)


def _unwrapped(written: Mapping[str, str], parameters: Parameters, repairs: set[Repair]) -> str:
    """Return the arguments that stand as an object within the only parameter, which the function does not have; nothing
    if there are none: each must be one of the function's parameters."""
    if len(written) != 1 or (name := next(iter(written))) not in ARGUMENTS or parameters.has(name):
        return ""
    value = object_of(written[name], repairs)
    members = json.loads(value) if value.startswith("{") else {}
    if not members or not all(map(parameters.has, members)):
        return ""
    repairs.add(Repair.WRAPPED)
    return value


def _object(members: Mapping[str, str]) -> str:
    """Return the JSON of an object, of whose members the values are JSON."""
    return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in members.items()) + "}"


def _is_name(cursor: Cursor, ends: tuple[str, ...]) -> Waiting[bool]:
    """True if a name comes next, and one of these ends behind it."""
    count = 1
    while True:
        text = yield from cursor.ahead(count)
        name = _NAME.match(text)
        if not name or len(text) < count or count > LONGEST_HEADER:
            return False
        if name.end() < len(text):
            behind = yield from cursor.ahead(name.end() + max(map(len, ends)))
            return behind[name.end() :].startswith(ends)
        count += 1
