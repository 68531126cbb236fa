"""Sets of characters, and the classes that two dialects of regular expressions read differently.

JSON Schema's patterns are ECMA-262's, while many clients validate with Python's. A string must match a pattern in
both.
"""

import re
from bisect import bisect_right
from functools import cache
from operator import itemgetter

Ranges = tuple[tuple[int, int], ...]  # of code points, both ends included, sorted, with gaps between them

_LAST = 0x10FFFF
_ASSIGNED = 0x40000  # no digit, letter or space comes later
ALL: Ranges = ((0, _LAST),)
# Characters that a string of an answer can contain. The grammar allows no \u escapes, which other control characters
# would need.
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
    """Return the characters of any of the sets."""
    merged = list[tuple[int, int]]()
    for low, high in sorted(each for ranges in sets for each in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    """Return all characters but these."""
    gaps, begin = list[tuple[int, int]](), 0
    for low, high in ranges:
        if begin < low:
            gaps.append((begin, low - 1))
        begin = high + 1
    return (*gaps, (begin, _LAST)) if begin <= _LAST else tuple(gaps)


def intersection(*sets: Ranges) -> Ranges:
    """Return the characters of all the sets."""
    return complement(union(*map(complement, sets)))


def without(ranges: Ranges, less: Ranges) -> Ranges:
    """Return the characters of `ranges` that are not in `less`."""
    return intersection(ranges, complement(less)) if less else ranges


def contains(ranges: Ranges, character: str) -> bool:
    """True if the set contains the character."""
    code = ord(character)
    place = bisect_right(ranges, code, key=itemgetter(0))
    return place > 0 and code <= ranges[place - 1][1]


@cache
def named(letter: str, dialect: str) -> Ranges:
    r"""Return the characters of \d, \w, \s, their opposites (a capital letter), or `.`, by this dialect."""
    if letter == ".":
        return complement(union(*(((ord(end), ord(end)),) for end in _LINE_ENDS[dialect])))
    if letter.isupper():
        return complement(named(letter.lower(), dialect))
    return _ECMA[letter] if dialect == "ecma" else _python_class(letter)


def _python_class(letter: str) -> Ranges:
    every = "".join(map(chr, range(_ASSIGNED)))
    return tuple((found.start(), found.end() - 1) for found in re.finditer(rf"\{letter}+", every))
