"""What a prefix cache with a disk tier hands over to it, and takes back."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from worker.engine.cache.disk import DiskTier
from worker.engine.cache.segments import KVSegment, StateSnapshot
from worker.engine.isolation import isolate
from worker.prefix_store.index import Chain
from worker.prefix_store.store import Reading
from worker.schedule.cache.disk import writes_early
from worker.schedule.cache.prefix import Evicted, Found, Node, PrefixTree

Tree = PrefixTree[KVSegment, StateSnapshot]

# Returns True to load: (tokens gained, tokens before them, bytes of each file, bytes per second)
IsWorthwhile = Callable[[int, int, Sequence[int], float], bool]


@dataclass(frozen=True, slots=True)
class Restored:
    """A part of a prefix that was read from disk: tokens `start` to `end` (exclusive)."""

    start: int
    end: int
    segment: KVSegment
    snapshot: StateSnapshot | None

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.segment.nbytes + (self.snapshot.nbytes if self.snapshot else 0)

    def part(self, start: int, end: int) -> KVSegment:
        """Return the segment of tokens `start` to `end` of the prefix. Copies, and blocks, unless these are all."""
        if (start, end) == (self.start, self.end):
            return self.segment
        _, rest = self.segment.split(start - self.start)
        return rest.split(end - start)[0]


class DurablePrefixes:
    """Moves prefixes between a tree and the disk. For the engine's thread; the tree belongs to the prefix cache."""

    def __init__(self, tree: Tree, tier: DiskTier) -> None:
        self._tree = tree
        self._tier = tier

    @property
    def pending_bytes(self) -> int:
        """Bytes of evicted data in memory that wait to be written."""
        return self._tier.pending_bytes

    @property
    def bytes_per_s(self) -> float:
        """Measured speed of reading."""
        return self._tier.bytes_per_s

    # Writing

    def spill(self, evicted: Iterable[Evicted[KVSegment, StateSnapshot]]) -> None:
        """Let evicted data be written; a snapshot together with its segment. What cannot wait is lost."""
        places = dict[tuple[str, tuple[int, ...]], Evicted[KVSegment, StateSnapshot]]()
        for each in evicted:  # a snapshot may have been evicted before its segment
            key = each.namespace, each.tokens
            before = places.pop(key, each)
            merged = Evicted(
                each.namespace, each.path, each.segment or before.segment, each.snapshot or before.snapshot
            )
            places[key] = merged
        for (namespace, tokens), each in reversed(places.items()):  # files of a prefix that follow a gap are useless
            if segment := each.segment or self._segment_at(namespace, tokens):
                self._write(namespace, tokens, len(each.path[-1]), segment, each.snapshot)

    def write_early(self, found: Found[KVSegment, StateSnapshot]) -> None:
        """Let the nodes of a prefix that was used again be written, so that they survive a crash."""
        for node in found.nodes:
            if node.end <= found.length and writes_early(node.uses) and node.segment:
                self._write_node(node)

    def _segment_at(self, namespace: str, tokens: tuple[int, ...]) -> KVSegment | None:
        path, _ = self._tree.walk(namespace, tokens)
        return path[-1].segment if path and path[-1].end == len(tokens) else None

    def _write_node(self, node: Node[KVSegment, StateSnapshot]) -> bool:
        assert node.segment is not None, "the root is never written"
        return self._write(node.namespace, node.prefix, len(node.tokens), node.segment, node.snapshot)

    def _write(
        self, namespace: str, tokens: tuple[int, ...], length: int, segment: KVSegment, snapshot: StateSnapshot | None
    ) -> bool:
        accepted = True  # after a failure too: another attempt would fail as well
        with isolate(f"writing a prefix of {len(tokens)} tokens to disk"):
            accepted = self._tier.write(namespace, tokens, length, segment, snapshot)
        return accepted

    def close(self) -> None:
        """Write the whole tree, the most recently used first, as far as time allows. Blocks."""
        until_s = self._tier.deadline_s()
        for node in self._tree.recent():
            if not self._tier.wait_for_room(node.nbytes, until_s) or not self._write_node(node):
                break
        self._tier.close(until_s)

    # Reading

    def find(
        self, namespace: str, tokens: tuple[int, ...], matched: int, max_bytes: int
    ) -> tuple[Chain, list[int]] | None:
        """Return the files that hold more of the tokens than the `matched` ones that can be loaded from memory, and
        the bytes of each; None if there are none, or they exceed `max_bytes`."""
        path, end = self._tree.walk(namespace, tokens)
        held = [node.end for node in path if node.end <= end]
        if (chain := self._tier.find(namespace, tokens, held=held, longer_than=matched)) is None:
            return None
        sizes = self._tier.sizes(chain)
        return (chain, sizes) if sum(sizes) <= max_bytes else None

    def read(self, chain: Chain) -> Reading:
        """Start to read files. They are given up if the caller drops the returned object."""
        return self._tier.read(chain)

    def restored(self, reading: Reading) -> "list[Restored]":
        """Return what was read, file by file. Raises ValueError if it is not of this network."""
        names = (place.header.name for place in reading.places)
        pairs = zip(names, map(self._tier.restore, reading.places), strict=True)
        return [Restored(name.start, name.end, segment, snapshot) for name, (segment, snapshot) in pairs]

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Remove what the disk holds of these tokens. Blocks."""
        self._tier.forget(namespace, tokens)
