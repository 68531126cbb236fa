"""Sets of characters, and the classes that two dialects of regular expressions read differently.

JSON Schema's patterns are ECMA-262's, while many clients validate with Python's. A string is held to a pattern where
both agree that it matches.
"""

import re
from bisect import bisect_right
from functools import cache
from operator import itemgetter

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included, sorted and apart

_LAST = 0x10FFFF
_ASSIGNED = 0x40000  # no digit, letter or space comes later
ALL: Ranges = ((0, _LAST),)
# What a string of an answer can have: \u is not among the escapes that the grammar allows, and without it the other
# control characters cannot be written.
WRITABLE: Ranges = ((0x08, 0x0A), (0x0C, 0x0D), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, _LAST))

_LINE_ENDS = {"ecma": "\n\r\u2028\u2029", "python": "\n"}
_ECMA = {
    "d": ((0x30, 0x39),),
    "w": ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)),
    "s": (
        (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
        (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
    ),
}  # fmt: skip
DIALECTS = ("ecma", "python")


def union(*sets: Ranges) -> Ranges:
    merged = list[tuple[int, int]]()
    for low, high in sorted(each for ranges in sets for each in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    gaps, begin = list[tuple[int, int]](), 0
    for low, high in ranges:
        if begin < low:
            gaps.append((begin, low - 1))
        begin = high + 1
    return (*gaps, (begin, _LAST)) if begin <= _LAST else tuple(gaps)


def intersection(*sets: Ranges) -> Ranges:
    return complement(union(*map(complement, sets)))


def without(ranges: Ranges, less: Ranges) -> Ranges:
    return intersection(ranges, complement(less)) if less else ranges


def has(ranges: Ranges, character: str) -> bool:
    code = ord(character)
    place = bisect_right(ranges, code, key=itemgetter(0))
    return place > 0 and code <= ranges[place - 1][1]


@cache
def named(letter: str, dialect: str) -> Ranges:
    r"""Return the class of `d`, `w`, `s`, of a capital for its opposite, or of `.`, as the dialect reads it."""
    if letter == ".":
        return complement(union(*(((ord(end), ord(end)),) for end in _LINE_ENDS[dialect])))
    if letter.isupper():
        return complement(named(letter.lower(), dialect))
    return _ECMA[letter] if dialect == "ecma" else _pythons(letter)


def _pythons(letter: str) -> Ranges:
    every = "".join(map(chr, range(_ASSIGNED)))
    return tuple((found.start(), found.end() - 1) for found in re.finditer(rf"\{letter}+", every))
