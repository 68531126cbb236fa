"""Reads a JSON value while it is being written, and repairs what models get wrong.

The value may be written as Python or Gemma writes it: with other quotes, with keys that have none, with True, False and
None. What comes out is strict JSON, in which every character that was right is unchanged.
"""

import json
import re
from ast import literal_eval
from collections.abc import Callable, Generator
from enum import Enum
from typing import NamedTuple

from worker.text.dialects.cursor import BLANK, Cursor, Markers, Waiting

_PLAIN = re.compile(r"""[^"'\\\x00-\x1f]+""")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
# What models write for numbers besides: +5, .5, 5., 1_000.
_LOOSE_NUMBER = re.compile(
    r"(?P<sign>[+-]?)(?P<whole>0|[1-9][0-9]*(?:_[0-9]+)*)?(?P<fraction>\.[0-9]*)?(?P<exponent>[eE][+-]?[0-9]+)?"
)
_ZEROS = re.compile(r"^([+-]?)0+(?=[0-9])")  # in front of a number, or of a code
_WORD = re.compile(r"[^\s\"'{}\[\](),:;=<|]+")
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CODE = re.compile(r"u[0-9a-fA-F]{4}")
_PYTHON_CODE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}|[0-7]{1,3}|[av])")
_PREFIXED = re.compile(r"""[rbfuRBFU]{1,2}(?=["'])""")  # a string of Python

Pieces = Generator[str | None, None, None]  # yields pieces of JSON, and None when it needs more text


class Repair(Enum):
    """What was wrong with a call and was put right."""

    OPENING = "the marker that begins calls was missing"
    CLOSING = "a marker that ends a call was missing"
    ARGUMENTS = "the marker before the arguments was missing"
    BRACKETS = "closing brackets were missing"
    COMMA = "a comma stood before a closing bracket"
    QUOTES = "a string had single quotes, none, or quotes within it that were not escaped"
    NUMBER = "a number was written as JSON does not write it, such as +5 or .5"
    LITERAL = "True, False or None stood for true, false or null"
    LIST = "a set or a tuple stood for a list"
    CONTROL_CHARACTER = "a control character in a string was not escaped"
    ESCAPE = "a backslash escaped nothing"
    WRAPPED = "the arguments stood within a parameter that the function does not have"
    TWICE = "calls were written twice, the second time without their opening marker"
    BROKEN = "the arguments are no JSON; they are delivered as they were written"


class BrokenJson(Exception):
    """The text is no JSON value and cannot be repaired. The cursor stands before the place."""


class _Bracket(NamedTuple):
    """A list or an object that is open."""

    end: str  # as it is written
    json: str  # as JSON has it


_LIST, _OBJECT = _Bracket("]", "]"), _Bracket("}", "}")
_SET, _TUPLE = _Bracket("}", "]"), _Bracket(")", "]")


class JsonText:
    """Reads values from a cursor as pieces of strict JSON."""

    def __init__(
        self,
        cursor: Cursor,
        repairs: set[Repair],
        *,
        stops: Markers | None = None,
        quotes: Markers | None = None,
        python: bool = False,
        zeros: bool = False,
        string_ends: Callable[[], Waiting[bool]] | None = None,
    ) -> None:
        """`repairs`: receives what was repaired. `stops`: markers after a call, before which missing brackets are
        added. `quotes`: the dialect's own quotes, between which nothing is escaped. `python`: the dialect writes values
        as Python does, so that single quotes and True are no mistakes. `zeros`: digits with zeros in front are a
        number, and no code. `string_ends`: tells behind a quote if it may end a value that is a string; it reads text
        that is put back."""
        self._cursor, self._repairs = cursor, repairs
        self._stops, self._quotes = stops or Markers(()), quotes or Markers(())
        self._python, self._own_form = python, python or quotes is not None
        self._zeros, self._string_ends = zeros, string_ends

    def value(self) -> Pieces:
        """Yield the pieces of the next value, without the white space before it. Raises `BrokenJson`."""
        yield from self._cursor.skip_blank()
        brackets = list[_Bracket]()  # that are open
        while True:
            first = yield from self._begin_value(brackets)
            while brackets and not (yield from self._next_item(brackets, first=first)):
                first = False
            if not brackets:
                return

    def _begin_value(self, brackets: list[_Bracket]) -> Generator[str | None, None, bool]:
        """Yield a value that is no list or object, or an opening bracket. Returns True for a bracket."""
        char = yield from self._cursor.next()
        if not char or char not in ("{[(" if self._python else "{["):
            yield from self._scalar("," + brackets[-1].end if brackets else "")
            return False
        if len(brackets) == 500:  # json.loads gives up at about a thousand
            raise BrokenJson
        bracket = yield from self._bracket(char)
        if bracket in (_SET, _TUPLE):
            self._repairs.add(Repair.LIST)
        brackets.append(bracket)
        self._cursor.take(1)
        yield "{" if bracket is _OBJECT else "["
        return True

    def _bracket(self, char: str) -> Waiting[_Bracket]:
        """Return the kind of the bracket that comes next. Raises `BrokenJson` for a value in parentheses."""
        if char == "[" or not self._python:
            return _LIST if char == "[" else _OBJECT
        recording, behind = self._cursor.record(), ""
        self._cursor.take(1)
        item = yield from self._cursor.skip_blank()
        try:
            for piece in JsonText(self._cursor, set(), stops=self._stops, python=True)._scalar(",:})"):
                if piece is None:
                    yield None
            behind = yield from self._cursor.skip_blank()
        except BrokenJson:
            pass  # what comes first is none, or a key without quotes, or a bracket
        self._cursor.put_back(self._cursor.recorded(recording))
        if char == "{":
            return _SET if behind and behind in ",}" else _OBJECT
        if behind != "," and not (item and item in "([{)"):
            raise BrokenJson
        return _TUPLE

    def _next_item(self, brackets: list[_Bracket], *, first: bool) -> Generator[str | None, None, bool]:
        """Go to the next value of the innermost bracket. Returns False if the bracket closed instead."""
        blank = yield from self._blank()
        if (yield from self._closes(brackets, blank)):
            return False
        if first:
            yield blank
        elif (yield from self._cursor.next()) == ",":
            self._cursor.take(1)
            after = yield from self._blank()
            if (yield from self._cursor.next()) == brackets[-1].end:
                if brackets[-1] is not _TUPLE:
                    self._repairs.add(Repair.COMMA)
                return not (yield from self._closes(brackets, blank + after))
            yield f"{blank},{after}"
        else:
            yield blank
            raise BrokenJson
        if brackets[-1] is _OBJECT:
            yield from self._key()
        return True

    def _closes(self, brackets: list[_Bracket], blank: str) -> Generator[str | None, None, bool]:
        """Yield the closing bracket if it comes next, or all of them if the call ends without them."""
        char = yield from self._cursor.next()
        if char == brackets[-1].end:
            self._cursor.take(1)
            yield blank + brackets.pop().json
            return True
        has_ended = not self._cursor.cut_off
        if char:
            has_ended = bool((yield from self._cursor.starts(self._stops)))
        if not has_ended:
            return False
        self._repairs.add(Repair.BRACKETS)
        yield "".join(bracket.json for bracket in reversed(brackets))
        brackets.clear()
        return True

    def _blank(self) -> Waiting[str]:
        blank = ""
        while (char := (yield from self._cursor.next())) and char in BLANK:
            blank += self._cursor.take(1)
        return blank

    def _key(self) -> Pieces:
        word = ""
        if (yield from self._is_quoted()):
            yield from self._string(":")
        elif not (word := (yield from self._word())):
            raise BrokenJson
        blank = yield from self._blank()
        if (yield from self._cursor.next()) != ":":
            yield word + blank
            raise BrokenJson
        if word:
            self._mistake(Repair.QUOTES)
            yield json.dumps(word, ensure_ascii=False)
        yield blank + self._cursor.take(1)
        yield (yield from self._blank())

    def _scalar(self, follows: str) -> Pieces:
        """Yield a value that is no list or object. `follows`: what may come behind it within brackets."""
        if (yield from self._is_quoted()):
            yield from self._string(follows)
            return
        word = yield from self._word()
        if self._zeros and _number(without := _ZEROS.sub(r"\1", word)) and without != word:
            self._repairs.add(Repair.NUMBER)
            word = without
        if not word:
            raise BrokenJson
        if literal := _LITERALS.get(word):
            if literal != word:
                self._mistake(Repair.LITERAL)
            yield literal
        elif _NUMBER.fullmatch(word):
            yield word
        elif number := _number(word):
            self._mistake(Repair.NUMBER)
            yield number
        else:
            blank = yield from self._blank()
            char = yield from self._cursor.next()
            if char and char not in ",]})" and not (yield from self._cursor.starts(self._stops)):
                yield word + blank
                raise BrokenJson
            self._repairs.add(Repair.QUOTES)
            yield json.dumps(word, ensure_ascii=False) + blank

    def _mistake(self, repair: Repair) -> None:
        if not self._own_form:
            self._repairs.add(repair)

    def _word(self) -> Waiting[str]:
        word = ""
        while (char := (yield from self._cursor.next())) and _WORD.match(char):
            word += self._cursor.match(_WORD)
            if len(word) > 5_000:  # json.loads refuses integers of more than 4,300 digits
                raise BrokenJson
        return word

    def _is_quoted(self) -> Waiting[bool]:
        char = yield from self._cursor.next()
        if char and char in "\"'":
            return True
        if self._python and char and char in "rbfuRBFU" and _PREFIXED.match((yield from self._cursor.ahead(3))):
            return True
        return bool((yield from self._cursor.starts(self._quotes)))

    def _string(self, follows: str) -> Pieces:
        if quote := (yield from self._cursor.accept(self._quotes)):
            yield from self._between(Markers((quote,)))
            return
        is_raw = "r" in self._cursor.match(_PREFIXED).lower()
        quote = self._cursor.take(1)
        if quote == "'":
            self._mistake(Repair.QUOTES)
        if self._python and (yield from self._cursor.ahead(2)) == 2 * quote:
            quote += self._cursor.take(2)
        yield '"'
        while char := (yield from self._cursor.next()):
            if plain := self._cursor.match(_PLAIN):
                yield plain
            elif char == "\\":
                yield from self._escape(is_raw)
            elif char == quote[0] and (yield from self._cursor.ahead(len(quote))) == quote:
                if (yield from self._ends(quote, follows)):
                    self._cursor.take(len(quote))
                    yield '"'
                    return
                self._repairs.add(Repair.QUOTES)
                yield json.dumps(self._cursor.take(1))[1:-1]
            else:
                self._cursor.take(1)
                if char not in "\"'":
                    self._mistake(Repair.CONTROL_CHARACTER)
                yield char if char == "'" else json.dumps(char)[1:-1]
        raise BrokenJson

    def _ends(self, quote: str, follows: str) -> Waiting[bool]:
        """Return False for a quote within a string of Python that was not escaped: nothing that follows a value comes
        behind it."""
        if not self._python or len(quote) > 1 or not (follows or self._string_ends):
            return True
        recording = self._cursor.record()
        self._cursor.take(1)
        if follows:
            char = yield from self._cursor.skip_blank()
            # Texts that follow each other lack a comma, or are one for Python: what is meant is not known.
            ends = not char or char in follows or char in "\"'" or bool((yield from self._cursor.starts(self._stops)))
        else:
            ends = self._string_ends is None or (yield from self._string_ends())
        self._cursor.put_back(self._cursor.recorded(recording))
        return ends

    def _escape(self, is_raw: bool) -> Pieces:
        code = yield from self._cursor.ahead(2)
        if len(code) < 2:
            raise BrokenJson
        if is_raw:
            yield json.dumps(self._cursor.take(2), ensure_ascii=False)[1:-1]
        elif self._python and (coded := _PYTHON_CODE.match((yield from self._cursor.ahead(10)))):
            yield json.dumps(literal_eval(f'"{self._cursor.take(coded.end())}"'))[1:-1]
        elif self._python and code[1] == "\n":  # the string goes on in the next line
            self._cursor.take(2)
        elif code[1] in '"\\/bfnrt':
            yield self._cursor.take(2)
        elif code[1] == "'":
            yield self._cursor.take(2)[1]
        elif code[1] == "u" and _CODE.fullmatch((yield from self._cursor.ahead(6))[1:]):
            yield self._cursor.take(6)
        else:
            self._repairs.add(Repair.ESCAPE)
            yield "\\" + self._cursor.take(1)

    def _between(self, quote: Markers) -> Pieces:
        """Yield a string whose quote is a marker, after the first of them."""
        yield '"'
        while True:
            text, marker = self._cursor.before(quote)
            yield json.dumps(text, ensure_ascii=False)[1:-1]
            if marker:
                yield '"'
                return
            if self._cursor.ended:
                raise BrokenJson
            yield None


def _number(word: str) -> str:
    """Return a number as JSON writes it; nothing for a word that is none."""
    found = _LOOSE_NUMBER.fullmatch(word)
    if not found or not (found["whole"] or (found["fraction"] or "").strip(".")):
        return ""
    sign = "-" if found["sign"] == "-" else ""
    fraction = found["fraction"] or ""
    digits = (found["whole"] or "0").replace("_", "")
    return f"{sign}{digits}{fraction}{'0' if fraction == '.' else ''}{found['exponent'] or ''}"


def whole(text: str, repairs: set[Repair], *, python: bool = False, zeros: bool = False) -> str | None:
    """Return the strict JSON of a text that is one value; None if it is none. See `JsonText`."""
    cursor = Cursor()
    cursor.add(text)
    cursor.end()
    try:
        written = "".join(piece or "" for piece in JsonText(cursor, repairs, python=python, zeros=zeros).value())
    except BrokenJson:
        return None
    return written if not cursor.match(_REST).strip() else None


_REST = re.compile(r"(?s:.*)")
