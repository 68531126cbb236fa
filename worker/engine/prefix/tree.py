"""Prefix tree of cached tokens, with eviction of the least recently used.

A node holds a segment of tokens that follows its parent's, so a shared prefix is stored once. Tokens are compared, not
their hashes. A segment (KV state of each token) can be split at any token; a snapshot (recurrent state at the end of a
node) cannot.
"""

from bisect import bisect, bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, Literal, Protocol, Self, TypeVar

MAX_SEGMENT_TOKENS = 1024  # tokens of a new node, and so of what one eviction frees


class _Segment(Protocol):
    """Cached data of each token of a node."""

    @property
    def nbytes(self) -> int:
        """Bytes of all its tokens."""

    def split(self, at: int) -> tuple[Self, Self]:
        """Return the segment of the first `at` tokens, and that of the others."""


class _Snapshot(Protocol):
    """Cached state after all tokens up to the end of a node."""

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""

    @property
    def trimmable(self) -> bool:
        """True if it can be trimmed to the state after fewer tokens."""


R = TypeVar("R", bound=_Segment)
S = TypeVar("S", bound=_Snapshot)


@dataclass(slots=True, eq=False)
class Node(Generic[R, S]):
    """A segment of tokens in the tree. The root of a namespace has no tokens."""

    namespace: str
    parent: "Node[R, S] | None"  # None for the root
    tokens: tuple[int, ...]
    end: int  # number of tokens from the root to the node's last token
    segment: R | None = None
    snapshot: S | None = None
    children: "dict[int, Node[R, S]]" = field(default_factory=dict)  # by first token
    nbytes: int = 0  # of its segment and snapshot
    uses: int = 0  # number of requests that have shared it, after the first
    handed_over: bool = False  # to be written to disk early, with the snapshot if it has one
    marks: dict[str, int] | None = None  # that end in the node, and at which token

    @property
    def prefix(self) -> tuple[int, ...]:
        """All tokens from the root to the end of the node."""
        return tuple(chain.from_iterable(_path(self)))


@dataclass(frozen=True, slots=True)
class Found(Generic[R, S]):
    """The longest usable cached prefix."""

    length: int = 0  # tokens
    nodes: tuple[Node[R, S], ...] = ()  # from the root's child on; the last one may hold more tokens than match
    holder: Node[R, S] | None = None  # node with the snapshot; beyond `length` if that has to be trimmed
    known: int = 0  # tokens that the tree holds of those asked for; more than `length` if no snapshot was taken there


@dataclass(frozen=True, slots=True)
class Evicted(Generic[R, S]):
    """Data of a node that was evicted, enough to insert it into another cache."""

    namespace: str
    path: tuple[tuple[int, ...], ...]  # tokens from the root to the end of the node, by node
    segment: R | None = None  # of the tokens of the last node in `path`; None if it stays in the tree
    snapshot: S | None = None  # None if the node had none

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens from the root to the end of the node."""
        return tuple(chain.from_iterable(self.path))


class PrefixTree(Generic[R, S]):
    """Cached prefixes by namespace; a lookup finds nothing of another namespace. Not thread-safe.

    Prefixes may have names, their marks, by which other programs know them: those of lost prefixes are reported."""

    def __init__(self, *, stateful: bool, max_marks: int = 20_000) -> None:
        """`stateful`: a prefix is usable only with a snapshot at its end. `max_marks`: beyond it the oldest count as
        lost; as many take some 5 MB, and a chat has up to 30."""
        self.stateful = stateful
        self._max_marks = max_marks
        self._marked: OrderedDict[str, Node[R, S]] = OrderedDict()  # the oldest first
        self._lost = deque[str](maxlen=max_marks)
        self._emptied = False
        self._roots: dict[str, Node[R, S]] = {}
        # Least recently used first. A use touches a node before its parents, so the first "segment" entry is a leaf's.
        self._order: OrderedDict[tuple[Node[R, S], Literal["segment", "snapshot"]], None] = OrderedDict()
        self._num_trimmable = 0  # number of trimmable snapshots
        self.nbytes = self.evicted = 0
        self.version = 0  # changes if a lookup may find more than before

    def find(self, namespace: str, tokens: tuple[int, ...]) -> Found[R, S]:
        """Return the longest usable prefix of the tokens. Does not count as a use: see `touch`."""
        path, matched = self.walk(namespace, tokens)
        if not path or not self.stateful:
            return Found(matched, tuple(path), known=matched)
        for at, node in reversed([*enumerate(path, start=1)]):
            length = min(node.end, matched)
            holder = node if node.snapshot is not None and node.end == length else self._find_trimmable(node)
            if holder is not None:
                return Found(length, tuple(path[:at]), holder, matched)
        return Found(known=matched)

    def walk(self, namespace: str, tokens: tuple[int, ...]) -> tuple[list[Node[R, S]], int]:
        """Return the nodes along these tokens, from the root's child on, and the number of tokens that match. The last
        node may hold more tokens than match."""
        path = list[Node[R, S]]()
        matched = 0
        node = self._roots.get(namespace)
        while node is not None and matched < len(tokens) and (child := node.children.get(tokens[matched])):
            path.append(child)
            here = tokens[matched : child.end]
            if here != child.tokens:
                return path, matched + shared_length(here, child.tokens)
            matched, node = child.end, child
        return path, matched

    def touch(self, found: Found[R, S]) -> None:
        """Mark a found prefix as the most recently used."""
        if found.holder is not None:
            self._order.move_to_end((found.holder, "snapshot"))
        self._touch(found.holder or (found.nodes[-1] if found.nodes else None))

    def use(self, found: Found[R, S]) -> None:
        """Mark a found prefix as the most recently used, and count the use of each node that matches as a whole."""
        self.touch(found)
        for node in found.nodes:
            node.uses += node.end <= found.length

    def mark_handed_over(self, node: Node[R, S]) -> None:
        """Record that a node was handed over to be written to disk early. Its next snapshot ends that."""
        node.handed_over = True

    def recent(self) -> list[Node[R, S]]:
        """Return all nodes, the most recently used first, and each after its parent."""
        return [node for node, kind in reversed(self._order) if kind == "segment"]

    def insert(
        self, namespace: str, tokens: tuple[int, ...], copy: Callable[[int, int], R], snapshot: S | None = None
    ) -> None:
        """Insert the tokens that are not in the tree yet. `copy(start, end)` returns the segment of tokens start to
        end - 1; `snapshot` is the snapshot after all the tokens."""
        path, matched = self.walk(namespace, tokens)
        ends = range(matched, len(tokens), MAX_SEGMENT_TOKENS)
        segments = [
            (tokens[at : at + MAX_SEGMENT_TOKENS], copy(at, min(at + MAX_SEGMENT_TOKENS, len(tokens)))) for at in ends
        ]
        if path and matched < path[-1].end and (segments or snapshot is not None):
            path[-1] = self._split(path[-1], matched)
        for segment_tokens, segment in segments:
            parent = path[-1] if path else self._roots.setdefault(namespace, Node(namespace, None, (), 0))
            path.append(self._attach(parent, segment_tokens, segment))
        if snapshot is not None and path[-1].snapshot is None:
            self._set_snapshot(path[-1], snapshot)
        self._touch(path[-1] if path else None)
        self.version += 1

    def shrink(self, max_bytes: int, keep: Collection[Node[R, S]] = ()) -> list[Evicted[R, S]]:
        """Evict segments and snapshots, the least recently used first, until at most `max_bytes` are left. Returns what
        was evicted, in this order; it belongs to the caller. `keep`: nodes whose segments stay, each with its parent;
        they stay without a snapshot too."""
        evicted = list[Evicted[R, S]]()
        while self.nbytes > max_bytes:
            entry = next((each for each in self._order if each[1] == "snapshot" or each[0] not in keep), None)
            if entry is None:
                break
            node, kind = entry
            self.evicted += 1
            if kind == "snapshot":
                evicted.append(Evicted(node.namespace, _path(node), snapshot=self._pop_snapshot(node)))
            if kind == "segment" or (self._is_useless(node) and node not in keep):
                evicted += self._remove(node, keep)
        self._drop_empty_roots()
        return evicted

    def discard(self, node: Node[R, S]) -> None:
        """Remove a node with all its descendants."""
        nodes = [node]
        for each in nodes:
            nodes += each.children.values()
        for each in reversed(nodes):
            if (each, "segment") in self._order:  # else it was removed with its last child
                self._remove(each)
        self._drop_empty_roots()

    def mark(self, namespace: str, tokens: tuple[int, ...], marks: Sequence[tuple[str, int]]) -> None:
        """Name prefixes of these tokens, each by a mark and its length. A mark whose prefix the tree does not hold, or
        no longer, is lost."""
        path, matched = self.walk(namespace, tokens)
        ends = [node.end for node in path]
        for name, end in marks:
            if end <= matched and path:
                self._unmark(name)
                node = path[bisect_left(ends, end)]
                if node.marks is None:
                    node.marks = {}
                node.marks[name] = end
                self._marked[name] = node
            elif name not in self._marked:
                self._lost.append(name)
        while len(self._marked) > self._max_marks:
            name = next(iter(self._marked))
            self._unmark(name)
            self._lost.append(name)

    @property
    def num_marks(self) -> int:
        """Number of marks whose prefixes the tree holds."""
        return len(self._marked)

    def take_lost(self) -> tuple[tuple[str, ...], bool]:
        """Return the marks that were lost since the last call, and True if the tree has lost all that it held."""
        lost, emptied = tuple(self._lost), self._emptied
        self._lost.clear()
        self._emptied = False
        return lost, emptied

    def _unmark(self, name: str) -> None:
        node = self._marked.pop(name, None)
        if node is not None and node.marks:
            node.marks.pop(name, None)

    def _drop_empty_roots(self) -> None:
        self._roots = {namespace: root for namespace, root in self._roots.items() if root.children}

    def _touch(self, node: Node[R, S] | None) -> None:
        """Mark a node and its ancestors as the most recently used."""
        while node is not None and node.parent is not None:
            self._order.move_to_end((node, "segment"))
            node = node.parent

    def _attach(self, parent: Node[R, S], tokens: tuple[int, ...], segment: R) -> Node[R, S]:
        node = parent.children[tokens[0]] = Node(parent.namespace, parent, tokens, parent.end + len(tokens), segment)
        self._order[node, "segment"] = None
        self._count(node, segment.nbytes)
        return node

    def _count(self, node: Node[R, S], added_bytes: int) -> None:
        node.nbytes += added_bytes
        self.nbytes += added_bytes

    def _split(self, node: Node[R, S], end: int) -> Node[R, S]:
        """Split a node in two at token `end`; return the upper one, which ends there."""
        assert node.parent is not None, "the root is never split"
        assert node.segment is not None
        at = end - node.parent.end
        first, rest = node.segment.split(at)
        self._count(node, rest.nbytes - node.segment.nbytes)
        upper = self._attach(node.parent, node.tokens[:at], first)
        upper.uses = node.uses + 1  # the other prompt shares it
        node.parent = upper
        node.tokens = node.tokens[at:]
        node.segment = rest
        upper.children[node.tokens[0]] = node
        if node.marks:
            upper.marks = {name: at for name, at in node.marks.items() if at <= end}
            node.marks = {name: at for name, at in node.marks.items() if at > end}
            self._marked.update(dict.fromkeys(upper.marks, upper))
        return upper

    def _set_snapshot(self, node: Node[R, S], snapshot: S) -> None:
        node.snapshot = snapshot
        node.handed_over = False
        self._num_trimmable += snapshot.trimmable
        self._order[node, "snapshot"] = None
        self._count(node, snapshot.nbytes)

    def _pop_snapshot(self, node: Node[R, S]) -> S | None:
        """Remove and return the node's snapshot, if it has one."""
        snapshot, node.snapshot = node.snapshot, None
        if snapshot is not None:
            del self._order[node, "snapshot"]
            self._count(node, -snapshot.nbytes)
            self._num_trimmable -= snapshot.trimmable
        return snapshot

    def _find_trimmable(self, node: Node[R, S]) -> Node[R, S] | None:
        """Return a node with a trimmable snapshot, this one or a descendant; None if there is none."""
        candidates = [node] if self._num_trimmable else []
        while candidates:
            candidate = candidates.pop()
            if candidate.snapshot is None:
                candidates += candidate.children.values()
            elif candidate.snapshot.trimmable:
                return candidate  # below a snapshot that is not trimmable, none is: it covers more tokens
        return None

    def _remove(self, node: Node[R, S], keep: Collection[Node[R, S]] = ()) -> list[Evicted[R, S]]:
        """Remove and return a leaf, and the ancestors that are useless without it, except for those to keep."""
        removed = list[Evicted[R, S]]()
        while True:
            assert not node.children, "other nodes extend it"
            assert node.parent is not None, "the root is never removed"
            assert node.segment is not None
            removed.append(Evicted(node.namespace, _path(node), node.segment, self._pop_snapshot(node)))
            del self._order[node, "segment"]
            del node.parent.children[node.tokens[0]]
            self.nbytes -= node.segment.nbytes
            for name in node.marks or ():
                del self._marked[name]
                self._lost.append(name)
            self._emptied |= not self._order
            node = node.parent
            if not self._is_useless(node) or node in keep:
                return removed

    def _is_useless(self, node: Node[R, S]) -> bool:
        """Return True for a leaf without a snapshot if prefixes are usable only with one."""
        return self.stateful and node.parent is not None and not node.children and node.snapshot is None


def _path(node: Node[R, S]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the node and its ancestors, the root's child first."""
    path = list[tuple[int, ...]]()
    while node.parent is not None:
        path.append(node.tokens)
        node = node.parent
    return tuple(reversed(path))


def shared_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of the common prefix."""
    return bisect(range(1, min(len(one), len(other)) + 1), False, key=lambda count: one[:count] != other[:count])


CLOSE_TOKENS = 16  # recomputing them takes hardly longer than computing one


def checkpoint_positions(
    boundaries: Sequence[int], tokens: int, grid: int, partings: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the positions, ascending, at which to take a snapshot of a prompt of `tokens`: its end, the first
    (likeliest) boundaries, and further boundaries and multiples of `grid` that are far from all others. `partings`:
    positions at which the prompt parts from known ones, which are used in any case too."""
    freely = 4  # boundaries used in any case; each takes another forward, and the memory of a snapshot
    chosen = list[int]()
    for at in sorted([*partings, *boundaries[:freely], tokens]):
        # Of two close positions, the first serves both.
        if CLOSE_TOKENS <= at <= tokens and not (chosen and at - chosen[-1] < CLOSE_TOKENS):
            chosen.append(at)
    for at in [*boundaries[freely:], *range(grid, tokens, grid)]:
        if at < tokens and all(abs(at - other) >= grid // 2 for other in [0, *chosen]):
            chosen.append(at)
    return tuple(sorted(chosen))
