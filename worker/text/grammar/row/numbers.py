"""Keeps the numbers of answers in JSON within a double.

A grammar of llguidance (1.9) allows any digits and exponents where the schema bounds nothing, and readers of JSON take
1e400 for infinity. What the grammar allows is narrowed here, by the text of the number that has begun.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import isinf
from typing import Protocol


class Spelling(Protocol):
    """What tokens spell."""

    def bytes_of(self, token: int) -> bytes:
        """Return the token's bytes."""
        ...


_PART = frozenset(b"+-.0123456789eE")
_DIGIT = re.compile(rb"[0-9]")
_NUMBER = re.compile(rb"-?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_BEGINNING = re.compile(rb"[+.0-9eE-]+")  # what a token adds to a number that has begun
_EXPONENT = re.compile(rb"[eE]\+?[0-9]{2}")
_SAFE = 100  # bytes of a number without an exponent to which any token without one may be added
_LONGEST = 1000  # bytes of a number, whose digits would else never end


@dataclass(frozen=True, slots=True)
class Place:
    """A place in an answer: what came last of its JSON."""

    in_json: bool  # else nothing of it has begun
    in_string: bool = False
    escaped: bool = False  # by a backslash
    number: bytes = b""  # what has been written of a number

    def after(self, text: bytes) -> "Place":
        """Return the place after a token with this text."""
        in_json, number = self.in_json, bytearray(self.number)
        in_string, escaped = self.in_string, self.escaped
        for byte in text:
            if escaped:
                escaped = False
            elif in_string:
                in_string, escaped = byte != _QUOTE, byte == _BACKSLASH
            elif byte in _PART:
                number.append(byte)
            else:
                number.clear()
                in_json = in_json or byte in _OPENINGS
                in_string = in_json and byte == _QUOTE
        return Place(in_json, in_string, escaped, bytes(number))


_QUOTE, _BACKSLASH = b'"\\'
_OPENINGS = b"[{"


class FiniteNumbers:
    """The tokens of one vocabulary that continue numbers."""

    def __init__(self, vocabulary: Spelling, count: int, markers: Iterable[int], *, begun: bool) -> None:
        """`count`: tokens in a mask. `markers`: tokens after which other JSON begins. `begun`: the answer begins with
        JSON; else other texts may precede its first bracket."""
        self._bytes_of, self._markers = vocabulary.bytes_of, frozenset(markers)
        self.begins = Place(begun)
        self._continuing = defaultdict[bytes, list[int]](list)  # tokens by what they add to a number
        self._infinite = list[int]()  # tokens that hold a whole number beyond a double
        for token in range(count):
            text = vocabulary.bytes_of(token)
            if not _DIGIT.search(text):
                continue
            if adds := _BEGINNING.match(text):
                self._continuing[adds[0]].append(token)
            if any(map(_is_infinite, _NUMBER.findall(text))):
                self._infinite.append(token)
        self._with_exponents = [adds for adds in self._continuing if _EXPONENT.search(adds)]

    def after(self, place: Place, token: int) -> Place:
        """Return the place after this token."""
        return self.begins if token in self._markers else place.after(self._bytes_of(token))

    def allows(self, place: Place, token: int) -> bool:
        """Return False if a number would exceed a double after this token."""
        return place.in_string or not place.in_json or token not in self._barred(place)

    def narrowed(self, mask: bytes, place: Place) -> bytes:
        """Return a mask without the tokens after which a number would exceed a double. A mask of nothing else stays as
        it is: a multiple of 1000 has to end with zeros."""
        if place.in_string or not place.in_json or not (barred := self._barred(place)):
            return mask
        left = bytearray(mask)
        for token in barred:
            left[token // 8] &= ~(1 << token % 8)
        return bytes(left) if left.count(0) < len(left) else mask

    def _barred(self, place: Place) -> list[int]:
        number = place.number
        if not number:
            return self._infinite
        is_long = len(number) > _SAFE or b"e" in number.lower()
        if len(number) > _LONGEST and number[-1:].isdigit():
            beyond = [*self._continuing]
        else:
            beyond = [
                adds
                for adds in (self._continuing if is_long else self._with_exponents)
                if (written := _NUMBER.match(number + adds)) and _is_infinite(written[0])
            ]
        return [*self._infinite, *(token for adds in beyond for token in self._continuing[adds])]


def _is_infinite(number: bytes) -> bool:
    return isinf(float(number))
