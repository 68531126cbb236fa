"""Calls whose arguments are JSON after a header with the function's name: [TOOL_CALLS]weather[ARGS]{"city": "Oslo"}"""

import json
import re
from dataclasses import dataclass

from worker.text.dialects.cursor import LONGEST_HEADER, Cursor, Markers, NotACall, Waiting
from worker.text.dialects.dialect import (
    CallBegan,
    CallEnded,
    Calls,
    Functions,
    Repaired,
    Written,
    function_name,
    read_arguments,
    repaired,
)
from worker.text.dialects.json_calls import JsonCalls
from worker.text.dialects.json_text import JsonText, Repair


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
