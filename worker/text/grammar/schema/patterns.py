"""Rewrites patterns so that llguidance enforces them within a JSON string.

Derivre, its regex engine, escapes character sets for JSON. If a set has all control characters, or all but the line
feed, as `[^"]` has, it accepts every short escape, also those of the quotation mark and the backslash. So the sets here
contain only characters that an answer can write. Derivre takes a group named `stop` for look-ahead, and has its own
meaning of \\w, \\s and `.`, so groups lose their names and classes are written out.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

from worker.text.grammar.schema import regex
from worker.text.grammar.schema.regex import (
    WRITABLE,
    Anchor,
    CharacterRanges,
    Chars,
    Either,
    RegexNode,
    Repeated,
    Sequenced,
    UnsupportedPattern,
    contains,
    intersection,
    union,
    without,
)
from worker.text.grammar.schema.unsupported import Budget

_NOTHING = "[a&&b]"
_NO_MATCH_NEEDED = Sequenced(())


def pattern_steps(count: int = 400_000) -> Budget:
    """Return the steps for reading patterns and comparing names with them, which end with `UnsupportedPattern`."""
    message = "parsing it, or comparing names with it, takes too long; make it simpler"
    return Budget(count, partial(UnsupportedPattern, message))


class Pattern:
    """A client's pattern, which may match anywhere in a string, as in JSON Schema. Raises `UnsupportedPattern`."""

    def __init__(self, text: str, steps: Budget | None = None) -> None:
        self._steps = steps or pattern_steps()
        self._branches = [_Branch(items) for items in _expanded(regex.parse_pattern(text), len(text) + 1, self._steps)]

    @cached_property
    def disputed(self) -> CharacterRanges:
        """Characters that are in one of its classes by only one of the dialects."""
        nodes = (node for branch in self._branches for node in branch.nodes())
        classes = dict.fromkeys(node for node in nodes if isinstance(node, Chars) and node.letters)
        self._steps.take(400 * len(classes))  # a class of both dialects has some 750 ranges
        found = [without(each.possibly(), each.surely()) for each in classes]
        return intersection(union(*found), WRITABLE)

    def written(self, *, possibly: bool = False, less: CharacterRanges = ()) -> str:
        """Return an expression that is anchored at both ends. `possibly`: it matches the strings that match in some
        dialect, else those that match in every one. `less`: characters to leave out of its classes."""
        return f"^{self.whole(possibly=possibly, less=less)}$"

    def whole(self, *, possibly: bool = False, less: CharacterRanges = ()) -> str:
        """Return an expression that must match the whole string, without anchors."""
        writer = _Writer(less, possibly=possibly)
        return f"(?:{'|'.join(writer.branch(branch) for branch in self._branches)})"

    def matches(self, text: str) -> bool:
        """True if the text matches in every dialect. Raises `UnsupportedPattern` if that takes too many steps."""
        match = _Match(text, self._steps)
        return any(branch.matches(match) for branch in self._branches)


class _Branch:
    """One alternative of a pattern. Its anchors are removed, and stored as `at_start` and `at_end`."""

    def __init__(self, items: list[RegexNode]) -> None:
        begun, ended = 0, len(items)
        while begun < ended and items[begun] == Anchor(end=False):
            begun += 1
        while ended > begun and items[ended - 1] == Anchor(end=True):
            ended -= 1
        self.at_start, self.at_end = begun > 0, ended < len(items)
        self.body = Sequenced(tuple(items[begun:ended]))
        if any(isinstance(node, Anchor) for node in self.nodes()):
            raise UnsupportedPattern("^ and $ are supported only at the ends of an alternative; remove them")

    def nodes(self) -> Iterator[RegexNode]:
        return _within(self.body)

    def matches(self, match: "_Match") -> bool:
        ends = match.ends(self.body, {0} if self.at_start else match.positions)
        return max(match.positions) in ends if self.at_end else bool(ends)


def _within(node: RegexNode) -> Iterator[RegexNode]:
    waiting = [node]
    while waiting:
        yield (node := waiting.pop())
        waiting += regex.parts(node)


def _expanded(node: RegexNode, size: int, steps: Budget) -> list[list[RegexNode]]:
    """Return the alternatives, each a sequence of nodes, with the groups at its ends expanded if they hold an anchor.

    `size`: at least the number of nodes, all of which may be visited for each alternative.
    """
    ways, count = [[node]], 0
    most = 64  # alternatives
    for side in (0, -1):
        done = list[list[RegexNode]]()
        while ways:
            if (count := count + 1) > most * 8 or len(done) > most:
                raise UnsupportedPattern("its groups have too many ^ and $; write it with fewer")
            steps.take(size)
            way = ways.pop(0)
            opened = _opened(way, side)
            if opened is None:
                done.append(way)
            else:
                ways = opened + ways
        ways = done
    return ways


def _opened(way: list[RegexNode], side: int) -> list[list[RegexNode]] | None:
    """Return the alternatives without the outermost group on that side. None if it needs no expansion."""
    own, other = Anchor(end=side == -1), list(way)
    outer = list[RegexNode]()
    while other and other[side] == own:
        outer.append(other.pop(side))
    if not other or isinstance(other[side], Anchor) or own not in _within(other[side]):
        return None
    match other.pop(side):
        case Sequenced(items):
            inner = [list(items)]
        case Either(options):
            inner = [[option] for option in options]
        case Repeated(item, 0, 1):
            inner = [[], [item]]
        case _:
            raise UnsupportedPattern("^ and $ within a repeat are not supported; remove them")
    return [outer + each + other if side == 0 else other + each + outer for each in inner]


def _least(node: RegexNode, side: int) -> RegexNode:
    """Return what an expression must match if anything may stand at this side of it: 0 is its begin, -1 its end.

    With [a-z]{1,255} at an open end, derivre would count letters that make no difference, in each of thousands of
    states; one letter is enough. No match at all is `_NO_MATCH_NEEDED`.
    """
    match node:
        case Repeated(_, 0):
            return _NO_MATCH_NEEDED
        case Repeated(item, 1):
            return _least(item, side)
        case Repeated(item, minimum):
            others = Repeated(item, minimum - 1, minimum - 1)
            return _least_of((item, others) if side == 0 else (others, item), side)
        case Sequenced(items):
            return _least_of(items, side)
        case Either(options):
            found = tuple(_least(option, side) for option in options)
            return _NO_MATCH_NEEDED if _NO_MATCH_NEEDED in found else Either(found)
    return node


def _least_of(items: Sequence[RegexNode], side: int) -> RegexNode:
    left = list(items)
    while left:
        found = _least(left.pop(side), side)
        if found != _NO_MATCH_NEEDED:
            return Sequenced((found, *left) if side == 0 else (*left, found))
    return _NO_MATCH_NEEDED


class _Match:
    """Matches expressions in one text, by the set of positions at which a match may end."""

    def __init__(self, text: str, steps: Budget) -> None:
        self._text, self._steps = text, steps
        self.positions = {*range(len(text) + 1)}

    def ends(self, node: RegexNode, starts: set[int]) -> set[int]:
        self._steps.take(len(starts) + 1)
        match node:
            case Chars() if node.properties:
                raise UnsupportedPattern("\\p is not supported in patterns of names; write out the characters")
            case Chars():
                text, ranges = self._text, node.surely()
                return {start + 1 for start in starts if start < len(text) and contains(ranges, text[start])}
            case Sequenced(items):
                for item in items:
                    starts = self.ends(item, starts) if starts else starts
            case Either(options):
                return set[int]().union(*(self.ends(option, starts) for option in options))
            case Repeated(item, minimum, maximum):
                return self._of_repeat(item, starts, minimum, maximum)
        return starts

    def _of_repeat(self, item: RegexNode, starts: set[int], minimum: int, maximum: int | None) -> set[int]:
        for _ in range(minimum):
            before, starts = starts, self.ends(item, starts)
            if starts == before:
                break
        found, times = set(starts), minimum
        while starts and (maximum is None or times < maximum):
            starts = self.ends(item, starts) - found
            found, times = found | starts, times + 1
        return found


class _Writer:
    def __init__(self, less: CharacterRanges, *, possibly: bool) -> None:
        self._possibly, self._less = possibly, less
        self._anything = f"{self._set(WRITABLE)}*"
        self._left = 200_000  # characters of its classes, which are written out
        self._classes = dict[Chars, str]()

    def branch(self, branch: _Branch) -> str:
        body: RegexNode = branch.body
        if not branch.at_start:
            body = _least(body, 0)
        if not branch.at_end:
            body = _least(body, -1)
        before, after = ("" if anchored else self._anything for anchored in (branch.at_start, branch.at_end))
        return before + self._node(body) + after if body != _NO_MATCH_NEEDED else before or after

    def _node(self, node: RegexNode) -> str:
        match node:
            case Chars():
                return self._counted(node)
            case Sequenced(items):
                return "".join(map(self._node, items))
            case Either(options):
                return f"(?:{'|'.join(map(self._node, options))})"
            case Repeated(item, minimum, maximum):
                return f"(?:{self._node(item)}){{{minimum},{'' if maximum is None else maximum}}}"
        raise AssertionError(node)

    def _counted(self, chars: Chars) -> str:
        if chars not in self._classes:
            self._classes[chars] = self._class(chars)
        self._left -= len(self._classes[chars])
        if self._left < 0:
            raise UnsupportedPattern("its classes are too large; make it shorter")
        return self._classes[chars]

    def _class(self, chars: Chars) -> str:
        if chars.properties:
            return self._with_properties(chars)
        return self._set(chars.possibly() if self._possibly else chars.surely())

    def _with_properties(self, chars: Chars) -> str:
        """Return a class with Unicode properties by name, which the regex engine supports."""
        plain = Chars(chars.ranges, chars.letters)
        ranges = plain.possibly() if chars.negated != self._possibly else plain.surely()
        own = f"[{'^' if chars.negated else ''}{_spelled(ranges)}{''.join(chars.properties)}]"
        return f"[{own}&&{self._set(WRITABLE)}]"

    def _set(self, ranges: CharacterRanges) -> str:
        ranges = without(intersection(ranges, WRITABLE), self._less)
        return f"[{_spelled(ranges)}]" if ranges else _NOTHING


def _spelled(ranges: CharacterRanges) -> str:
    return "".join(_one(low) if low == high else f"{_one(low)}-{_one(high)}" for low, high in ranges)


def _one(code: int) -> str:
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"
