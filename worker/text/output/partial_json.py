"""Parses a JSON object while it is being generated."""

import json
import re
from dataclasses import dataclass
from typing import Literal

_BLANK = " \t\n\r"
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_LETTERS = frozenset("-+.0123456789eEtrufalsn")
_HEX = frozenset("0123456789abcdefABCDEF")
_CLOSES = {"}": "{", "]": "["}
_IN_STRING = ("string", "escape", "hex")

# The state: what the next character belongs to. Not an enum, since reading an enum's members, several for each
# character, would double the cost of a character.
_State = Literal[
    "object", "key", "key or end", "colon", "value", "item or end", "next", "scalar", "nothing", "string", "escape",
    "hex",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemberText:
    """More of the JSON text of a member's value."""

    key: str
    text: str


class PartialJson:
    """Emits the text of the outermost object's members as it arrives: of strings, lists and objects, not of scalars.

    It is as strict as the JSON standard, and a member may occur only once. After the first invalid character it is
    `broken` and returns nothing more.
    """

    def __init__(self) -> None:
        self._open = list[str]()  # brackets, the outermost first
        self._expects: _State = "object"
        self._then: _State = "nothing"  # what is expected after the string
        self._token = list[str]()  # characters of a scalar, or a key of the outermost object, so far
        self._hex = 0  # digits missing in an escape
        self._inside = False  # True within the value of a member of the outermost object
        self._key = ""
        self.complete_members = set[str]()  # members that are complete
        self.broken = False

    @property
    def in_string(self) -> bool:
        """True within a string, where any character may follow."""
        return not self.broken and self._expects == "string"

    def feed(self, text: str) -> list[MemberText]:
        """Add text. Returns the members' text in it, in order."""
        pieces, begins = list[MemberText](), 0
        if self.broken:
            return pieces
        for at, char in enumerate(text):
            was = self._inside
            try:
                self._read(char)
            except ValueError:
                self.broken, text = True, text[:at]
                break
            self._inside = len(self._open) > 1 or (self._then == "next" and self._expects in _IN_STRING)
            if self._inside and not was:
                begins = at
            elif was and not self._inside:
                pieces.append(MemberText(self._key, text[begins : at + 1]))
                self.complete_members.add(self._key)
        if self._inside and begins < len(text):
            pieces.append(MemberText(self._key, text[begins:]))
        return pieces

    def _read(self, char: str) -> None:
        if self._expects in _IN_STRING:
            self._in_string(char)
        elif self._expects != "scalar":
            self._structure(char)
        elif char in _SCALAR_LETTERS:
            self._token.append(char)
        else:
            _require(_SCALAR.fullmatch("".join(self._token)) is not None)
            self._expects = "next"
            self._structure(char)

    def _in_string(self, char: str) -> None:
        if self._then == "colon" and len(self._open) == 1:
            self._token.append(char)
        match self._expects:
            case "string" if char == '"':
                self._expects = self._then
                if self._then == "colon" and len(self._open) == 1:
                    self._name_member()
            case "string" if char == "\\":
                self._expects = "escape"
            case "string":
                _require(char >= " ")
            case "escape":
                _require(char in '"\\/bfnrtu')
                self._expects = "hex" if char == "u" else "string"
                self._hex = 4
            case _:
                _require(char in _HEX)
                self._hex -= 1
                self._expects = "hex" if self._hex else "string"

    def _name_member(self) -> None:
        key = json.loads("".join(self._token))
        _require(key not in self.complete_members)
        self._key = key

    def _structure(self, char: str) -> None:
        if char in _BLANK:
            return
        match self._expects:
            case "object":
                _require(char == "{")
                self._enter(char)
            case "value" | "item or end":
                self._value(char)
            case "key" | "key or end" if char == '"':
                self._string(char, then="colon")
            case "colon" if char == ":":
                self._expects = "value"
            case "next" if char == ",":
                self._expects = "key" if self._open[-1] == "{" else "value"
            case "next" | "key or end":
                self._leave(char)
            case _:
                _require(False)

    def _value(self, char: str) -> None:
        if char in "{[":
            self._enter(char)
        elif char == '"':
            self._string(char, then="next")
        elif char == "]" and self._expects == "item or end":
            self._leave(char)
        else:
            _require(char in _SCALAR_LETTERS)
            if len(self._open) == 1:
                self.complete_members.add(self._key)
            self._expects, self._token = "scalar", [char]

    def _string(self, quote: str, *, then: _State) -> None:
        self._expects = "string"
        self._then = then
        self._token = [quote]

    def _enter(self, bracket: str) -> None:
        self._open.append(bracket)
        self._expects = "key or end" if bracket == "{" else "item or end"

    def _leave(self, bracket: str) -> None:
        _require(_CLOSES.get(bracket) == self._open[-1])
        self._open.pop()
        self._expects = "next" if self._open else "nothing"


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("The text is not JSON.")
