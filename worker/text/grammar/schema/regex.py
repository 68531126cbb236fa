"""Parses clients' regular expressions into a tree: the syntax that ECMA-262 and Python share, without look-around."""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from operator import itemgetter

# Sets of characters, and the classes that two dialects of regular expressions read differently.
#
# JSON Schema's patterns are ECMA-262's, while many clients validate with Python's. A string must match a pattern in
# both.

CharacterRanges = tuple[tuple[int, int], ...]  # of code points, both ends included, sorted, with gaps between them

_LAST = 0x10FFFF
# Characters that a string of an answer can contain. The grammar allows no \u escapes, which other control characters
# would need.
WRITABLE: CharacterRanges = ((0x08, 0x0A), (0x0C, 0x0D), (0x20, 0x7E), (0x80, 0xD7FF), (0xE000, _LAST))

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


def union(*sets: CharacterRanges) -> CharacterRanges:
    """Return the characters of any of the sets."""
    merged = list[tuple[int, int]]()
    for low, high in sorted(each for ranges in sets for each in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(merged[-1][1], high)
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: CharacterRanges) -> CharacterRanges:
    """Return all characters but these."""
    gaps, begin = list[tuple[int, int]](), 0
    for low, high in ranges:
        if begin < low:
            gaps.append((begin, low - 1))
        begin = high + 1
    return (*gaps, (begin, _LAST)) if begin <= _LAST else tuple(gaps)


def intersection(*sets: CharacterRanges) -> CharacterRanges:
    """Return the characters of all the sets."""
    return complement(union(*map(complement, sets)))


def without(ranges: CharacterRanges, less: CharacterRanges) -> CharacterRanges:
    """Return the characters of `ranges` that are not in `less`."""
    return intersection(ranges, complement(less)) if less else ranges


def contains(ranges: CharacterRanges, character: str) -> bool:
    """True if the set contains the character."""
    code = ord(character)
    place = bisect_right(ranges, code, key=itemgetter(0))
    return place > 0 and code <= ranges[place - 1][1]


@cache
def character_class(letter: str, dialect: str) -> CharacterRanges:
    r"""Return the characters of \d, \w, \s, their opposites (a capital letter), or `.`, by this dialect."""
    if letter == ".":
        return complement(union(*(((ord(end), ord(end)),) for end in _LINE_ENDS[dialect])))
    if letter.isupper():
        return complement(character_class(letter.lower(), dialect))
    return _ECMA[letter] if dialect == "ecma" else _python_class(letter)


def _python_class(letter: str) -> CharacterRanges:
    every = "".join(map(chr, range(0x40000)))  # no digit, letter or space comes later
    return tuple((found.start(), found.end() - 1) for found in re.finditer(rf"\{letter}+", every))


_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_HEXADECIMAL = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)
_LOW_FOLLOWS = re.compile(r"\\u([0-9a-fA-F]{4})")
_PROPERTY = re.compile(r"([pP])\{([A-Za-z_]+(?:=[A-Za-z_]+)?)\}")
_TIMES = re.compile(r"\{([0-9]{1,9})(?:(,)([0-9]{1,9})?)?\}")
_NAME = re.compile(r"P?<[A-Za-z_$][A-Za-z0-9_$]*>")
_LOOKS = {"(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind"}


class UnsupportedPattern(ValueError):
    """Unsupported or invalid part of an expression. The message is a sentence for the client."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """^, or $ if `end`."""

    end: bool


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a class: in its ranges, in a class such as \\d, or with a Unicode property."""

    ranges: CharacterRanges = ()
    letters: frozenset[str] = frozenset()  # names of classes, as in \d
    properties: tuple[str, ...] = ()
    negated: bool = False

    def read(self, dialect: str) -> CharacterRanges:
        """Return the characters of the class by this dialect, without those of its properties."""
        ranges = union(self.ranges, *(character_class(letter, dialect) for letter in self.letters))
        return complement(ranges) if self.negated else ranges

    def surely(self) -> CharacterRanges:
        """Return the characters of the class that are in it by every dialect."""
        return _by_dialects(self)[0] if self.letters else self.read(DIALECTS[0])

    def possibly(self) -> CharacterRanges:
        """Return the characters of the class that are in it by any dialect."""
        return _by_dialects(self)[1] if self.letters else self.read(DIALECTS[0])


@dataclass(frozen=True, slots=True)
class Sequenced:
    """Items that follow each other."""

    items: tuple["RegexNode", ...]


@dataclass(frozen=True, slots=True)
class Either:
    """Alternatives."""

    options: tuple["RegexNode", ...]


@dataclass(frozen=True, slots=True)
class Repeated:
    """An item that occurs `minimum` to `maximum` times; without a limit if `maximum` is None."""

    item: "RegexNode"
    minimum: int
    maximum: int | None


RegexNode = Anchor | Chars | Sequenced | Either | Repeated


@lru_cache(maxsize=256)
def _by_dialects(chars: Chars) -> tuple[CharacterRanges, CharacterRanges]:
    """Return the characters of the class by every dialect, and by any."""
    found = [chars.read(dialect) for dialect in DIALECTS]
    return intersection(*found), union(*found)


def parse_pattern(pattern: str) -> RegexNode:
    """Parse a pattern. Raises `UnsupportedPattern`."""
    if len(pattern) > 4_000:
        raise UnsupportedPattern("it is longer than 4,000 characters; shorten it")
    reader = _Parser(pattern)
    node = reader.either(0)
    if not reader.ended():
        raise UnsupportedPattern("a closing parenthesis has no group; write it as \\)")
    return node


def parts(node: RegexNode) -> Sequence[RegexNode]:
    """Return the nodes directly within a node."""
    match node:
        case Sequenced(items):
            return items
        case Either(options):
            return options
        case Repeated(item):
            return (item,)
    return ()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def ended(self) -> bool:
        return self._at == len(self._text)

    def _follows(self, *prefixes: str) -> bool:
        return self._text.startswith(prefixes, self._at)

    def _take(self, prefix: str) -> bool:
        if found := self._text.startswith(prefix, self._at):
            self._at += len(prefix)
        return found

    def _next(self) -> str:
        if self.ended():
            raise UnsupportedPattern("it ends too early; complete it")
        self._at += 1
        return self._text[self._at - 1]

    def _matched(self, expression: re.Pattern[str]) -> re.Match[str] | None:
        if found := expression.match(self._text, self._at):
            self._at = found.end()
        return found

    def either(self, depth: int) -> RegexNode:
        if depth > 40:  # groups in groups
            raise UnsupportedPattern("its groups are nested too deeply; flatten them")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _sequence(self, depth: int) -> RegexNode:
        items = list[RegexNode]()
        while not self.ended() and not self._follows("|", ")"):
            items.append(self._repeated(self._one(depth)))
        return items[0] if len(items) == 1 else Sequenced(tuple(items))

    def _one(self, depth: int) -> RegexNode:
        match self._next():
            case "(":
                return self._group(depth)
            case "[":
                return self._class()
            case "\\":
                return self._escaped()
            case "." as dot:
                return Chars(letters=frozenset(dot))
            case ("^" | "$") as anchor:
                return Anchor(end=anchor == "$")
            case ("*" | "+" | "?" | "{") as sign:
                raise UnsupportedPattern(f"{sign} has nothing to repeat; write it as \\{sign}")
            case other:
                return _just(ord(other))

    def _group(self, depth: int) -> RegexNode:
        for opening, name in _LOOKS.items():
            if self._follows(opening[1:]):
                raise UnsupportedPattern(f"{name} is not supported; remove it")
        if self._take("?") and not self._take(":") and self._matched(_NAME) is None:
            raise UnsupportedPattern("groups with flags or references are not supported; remove them")
        node = self.either(depth + 1)
        if not self._take(")"):
            raise UnsupportedPattern("a group is not closed; close it")
        return node

    def _repeated(self, item: RegexNode) -> RegexNode:
        minimum, maximum = self._times()
        if (minimum, maximum) == (1, 1):
            return item
        if isinstance(item, Anchor):
            raise UnsupportedPattern("^ and $ cannot be repeated; write them once")
        if maximum is not None and maximum < minimum:
            raise UnsupportedPattern("a repeat has a maximum below its minimum; exchange them")
        if self._take("+"):
            raise UnsupportedPattern("possessive repeats are not supported; remove the +")
        self._take("?")  # a lazy repeat matches the same strings
        if self._follows("*", "+", "?") or self._matched(_TIMES):
            raise UnsupportedPattern("a repeat of a repeat needs a group; add one")
        return Repeated(item, minimum, maximum)

    def _times(self) -> tuple[int, int | None]:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return times
        if self._follows("{"):
            return self._counted()
        return 1, 1

    def _counted(self) -> tuple[int, int | None]:
        found = self._matched(_TIMES)
        if found is None:
            raise UnsupportedPattern("a { that begins no repeat is not supported; write it as \\{")
        minimum = int(found[1])
        maximum = None if found[2] else minimum  # the second group is a comma
        if found[3]:
            maximum = int(found[3])
        if max(minimum, maximum or 0) > 1_000_000:
            raise UnsupportedPattern("a repeat may have at most 1,000,000 times; use fewer")
        return minimum, maximum

    def _escaped(self) -> Chars:
        if (found := self._matched(_PROPERTY)) is not None:
            return Chars(properties=(f"\\{found[1]}{{{found[2]}}}",))
        letter = self._text[self._at : self._at + 1]
        if letter and letter in "dDwWsS":
            self._at += 1
            return Chars(letters=frozenset(letter))
        return _just(self._character())

    def _character(self) -> int:
        """Parse an escape of one character, after its backslash."""
        if found := self._matched(_HEXADECIMAL):
            return self._surrogates(int(found[1] or found[2] or found[3], 16))
        match self._next():
            case letter if letter in _CONTROLS:
                return _CONTROLS[letter]
            case "0" if not self._follows(*"0123456789"):
                return 0
            case digit if digit.isascii() and digit.isdigit():
                raise UnsupportedPattern("references to groups are not supported; remove them")
            case letter if letter.isascii() and letter.isalpha():
                raise UnsupportedPattern(f"\\{letter} is not supported; remove it")
            case other:
                return ord(other)

    def _surrogates(self, code: int) -> int:
        if code in _HIGH and (found := _LOW_FOLLOWS.match(self._text, self._at)) and int(found[1], 16) in _LOW:
            self._at = found.end()
            return 0x10000 + (code - 0xD800) * 0x400 + int(found[1], 16) - 0xDC00
        if code > _LAST:
            raise UnsupportedPattern("\\u{10FFFF} is the last character; use one up to it")
        return code

    def _class(self) -> Chars:
        negated = self._take("^")
        if self._follows("]"):
            raise UnsupportedPattern("validators differ on an empty class; write a ] in a class as \\]")
        found = list[Chars]()
        while not self._take("]"):
            found.append(self._of_class())
        return Chars(
            union(*(each.ranges for each in found)),
            frozenset().union(*(each.letters for each in found)),
            tuple(name for each in found for name in each.properties),
            negated,
        )

    def _of_class(self) -> Chars:
        first = self._member()
        if self._follows("-]") or not self._take("-"):
            return first
        last = self._member()
        if not first.ranges or not last.ranges:
            raise UnsupportedPattern("a range of a class must be between two characters; write the - as \\-")
        (low, _), (high, _) = first.ranges[0], last.ranges[0]
        if low > high:
            raise UnsupportedPattern("a range of a class ends before it begins; exchange its ends")
        return Chars(((low, high),))

    def _member(self) -> Chars:
        match self._next():
            case "\\" if self._take("b"):
                return _just(0x08)
            case "\\":
                return self._escaped()
            case "[" if self._follows(":", ".", "="):
                raise UnsupportedPattern("named classes such as [:alpha:] are not supported; write out the characters")
            case other:
                return _just(ord(other))


def _just(code: int) -> Chars:
    return Chars(((code, code),))
