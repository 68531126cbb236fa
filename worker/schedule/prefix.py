"""Which prefixes are kept: a tree of tokens, and what goes when there is too much.

A node is a run of tokens behind its parent's, so what begins alike is there once. Tokens are compared, not hashes of
them. What an engine keeps of a run can be had for any part of it; a state, which stands at the end of a node, is
what it can only keep whole.
"""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, Self, TypeVar

MAX_SEGMENT_TOKENS = 1024  # tokens; so much comes and goes at once


class Segment(Protocol):
    """What is kept of each token of a node."""

    @property
    def nbytes(self) -> int: ...

    def split(self, at: int) -> tuple[Self, Self]:
        """Of its first `at` tokens, and of the others."""


class Snapshot(Protocol):
    """What is kept of all tokens up to the end of a node together."""

    @property
    def nbytes(self) -> int: ...

    @property
    def trimmable(self) -> bool:
        """Whether it can be made that of fewer tokens."""


R = TypeVar("R", bound=Segment)
S = TypeVar("S", bound=Snapshot)


@dataclass(slots=True, eq=False)
class Node(Generic[R, S]):
    parent: "Node[R, S] | None"  # None for what lies before the first token
    tokens: tuple[int, ...]
    end: int  # tokens from the very first to the node's last
    segment: R | None = None
    snapshot: S | None = None
    children: "dict[int, Node[R, S]]" = field(default_factory=dict)  # by their first token


@dataclass(frozen=True, slots=True)
class Found(Generic[R, S]):
    """The longest prefix that can be had."""

    length: int = 0  # tokens
    nodes: tuple[Node[R, S], ...] = ()  # the last one may reach further
    holder: Node[R, S] | None = None  # of the state; further on, where that has to be shortened


class PrefixTree(Generic[R, S]):
    """`space` is whose prefixes they are; nothing is found in another's."""

    def __init__(self, *, stateful: bool) -> None:
        """`stateful`: a prefix can be had only with a state."""
        self._stateful = stateful
        self._roots: dict[str, Node[R, S]] = {}
        # Least recently used first. Whoever uses a node uses its parents after it, so the first run is a leaf's.
        self._order: OrderedDict[tuple[Node[R, S], Literal["run", "state"]], None] = OrderedDict()
        self._shortening = 0  # states that can be made those of fewer tokens
        self.nbytes = self.evicted = 0
        self.version = 0  # another one when more may be found

    def find(self, space: str, tokens: tuple[int, ...]) -> Found[R, S]:
        path, matched = self.walk(space, tokens)
        if not path or not self._stateful:
            return Found(matched, tuple(path))
        for at, node in reversed([*enumerate(path, start=1)]):
            length = min(node.end, matched)
            holder = node if node.snapshot is not None and node.end == length else self._extend(node)
            if holder is not None:
                return Found(length, tuple(path[:at]), holder)
        return Found()

    def walk(self, space: str, tokens: tuple[int, ...]) -> tuple[list[Node[R, S]], int]:
        """The nodes along these tokens, and how many tokens they share; the last node may reach further."""
        path, matched, node = list[Node[R, S]](), 0, self._roots.get(space)
        while node is not None and matched < len(tokens) and (child := node.children.get(tokens[matched])):
            path.append(child)
            there = tokens[matched : child.end]
            if there != child.tokens:
                return path, matched + _shared(there, child.tokens)
            matched, node = child.end, child
        return path, matched

    def touch(self, found: Found[R, S]) -> None:
        if found.holder is not None:
            self._order.move_to_end((found.holder, "state"))
        self._touch(found.holder or (found.nodes[-1] if found.nodes else None))

    def insert(
        self, space: str, tokens: tuple[int, ...], take: Callable[[int, int], R], state: S | None = None
    ) -> None:
        """Keeps what is not there yet. `take` gives the run from one token to before another; `state` is that of
        all the tokens."""
        path, matched = self.walk(space, tokens)
        ends = range(matched, len(tokens), MAX_SEGMENT_TOKENS)
        runs = [
            (tokens[at : at + MAX_SEGMENT_TOKENS], take(at, min(at + MAX_SEGMENT_TOKENS, len(tokens)))) for at in ends
        ]
        if path and matched < path[-1].end and (runs or state is not None):
            path[-1] = self._cut(path[-1], matched)
        for its_tokens, run in runs:
            parent = path[-1] if path else self._roots.setdefault(space, Node(None, (), 0))
            path.append(self._attach(parent, its_tokens, run))
        if state is not None and path[-1].snapshot is None:
            self._set_snapshot(path[-1], state)
        self._touch(path[-1] if path else None)
        self.version += 1

    def shrink(self, most: int) -> None:
        """To so many bytes, the least recently used first."""
        while self.nbytes > most and self._order:
            node, what = next(iter(self._order))
            self.evicted += 1
            if what == "state":
                self._drop_snapshot(node)
                if self._is_useless(node):
                    self._remove(node)
            else:
                self._remove(node)
        self._space_checkpoints()

    def discard(self, node: Node[R, S]) -> None:
        """With all that begins with it."""
        doomed = [node]
        for each in doomed:
            doomed += each.children.values()
        for each in reversed(doomed):
            if (each, "run") in self._order:  # else it went with its last child
                self._remove(each)
        self._space_checkpoints()

    def _space_checkpoints(self) -> None:
        self._roots = {space: root for space, root in self._roots.items() if root.children}

    def _touch(self, node: Node[R, S] | None) -> None:
        """It and all that is before it."""
        while node is not None and node.parent is not None:
            self._order.move_to_end((node, "run"))
            node = node.parent

    def _attach(self, parent: Node[R, S], tokens: tuple[int, ...], run: R) -> Node[R, S]:
        node = parent.children[tokens[0]] = Node(parent, tokens, parent.end + len(tokens), run)
        self._order[node, "run"] = None
        self.nbytes += run.nbytes
        return node

    def _cut(self, node: Node[R, S], end: int) -> Node[R, S]:
        """Makes two of it; returns the one that ends there."""
        assert node.parent is not None, "the root is never cut"
        assert node.segment is not None
        at = end - node.parent.end
        first, rest = node.segment.split(at)
        self.nbytes += rest.nbytes - node.segment.nbytes
        upper = self._attach(node.parent, node.tokens[:at], first)
        node.parent, node.tokens, node.segment = upper, node.tokens[at:], rest
        upper.children[node.tokens[0]] = node
        return upper

    def _set_snapshot(self, node: Node[R, S], state: S) -> None:
        node.snapshot = state
        self._shortening += state.trimmable
        self._order[node, "state"] = None
        self.nbytes += state.nbytes

    def _drop_snapshot(self, node: Node[R, S]) -> None:
        if node.snapshot is not None:
            del self._order[node, "state"]
            self.nbytes -= node.snapshot.nbytes
            self._shortening -= node.snapshot.trimmable
            node.snapshot = None

    def _extend(self, node: Node[R, S]) -> Node[R, S] | None:
        """One that has a state, here or further on, that can be made that of fewer tokens."""
        places = [node] if self._shortening else []
        while places:
            place = places.pop()
            if place.snapshot is None:
                places += place.children.values()
            elif place.snapshot.trimmable:
                return place  # where it does not, one further on is of more tokens, and does not either
        return None

    def _remove(self, node: Node[R, S]) -> None:
        """A leaf, and whatever is of no use without it."""
        while True:
            assert not node.children, "others begin with it"
            assert node.parent is not None, "the root stays"
            assert node.segment is not None
            self._drop_snapshot(node)
            del self._order[node, "run"]
            del node.parent.children[node.tokens[0]]
            self.nbytes -= node.segment.nbytes
            node = node.parent
            if not self._is_useless(node):
                return

    def _is_useless(self, node: Node[R, S]) -> bool:
        """Where nothing can be had without a state, a leaf has to have one."""
        return self._stateful and node.parent is not None and not node.children and node.snapshot is None


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many tokens they begin with alike."""
    return bisect(range(1, min(len(one), len(other)) + 1), False, key=lambda count: one[:count] != other[:count])


_CLOSE = 16  # tokens: to compute them again takes hardly longer than to compute one
_FREELY = 4  # boundaries; each takes a forward of its own, and a state's memory


def checkpoint_positions(boundaries: Sequence[int], tokens: int, grid: int) -> tuple[int, ...]:
    """Where to keep a state of a prompt of so many tokens, in order: at the most valuable boundaries and its end, and
    else where that is far from all others."""
    chosen = list[int]()
    for at in sorted([*boundaries[:_FREELY], tokens]):
        # Of two that are close the first will do for both.
        if _CLOSE <= at <= tokens and not (chosen and at - chosen[-1] < _CLOSE):
            chosen.append(at)
    for at in [*boundaries[_FREELY:], *range(grid, tokens, grid)]:
        if at < tokens and all(abs(at - other) >= grid // 2 for other in [0, *chosen]):
            chosen.append(at)
    return tuple(sorted(chosen))
