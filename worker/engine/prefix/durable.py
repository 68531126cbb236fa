"""Moves prefixes between memory and disk for the prefix cache."""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from worker.engine.cache.segments import KVSegment, StateSnapshot, copy_segment, snapshot_state, token_bytes
from worker.engine.cache.slots import materialize
from worker.engine.isolation import isolate
from worker.engine.prefix.disk import DiskTier
from worker.engine.prefix.tree import MAX_SEGMENT_TOKENS, Evicted, Found, Node, PrefixTree
from worker.outcomes import NotStored
from worker.prefix_store.index import Chain
from worker.prefix_store.policy import LoadLimit, LoadSize, writes_early
from worker.prefix_store.reader import ReadAhead, Reading
from worker.prefix_store.records import Held, HeldNode
from worker.prefix_store.writer import WriteReport

Tree = PrefixTree[KVSegment, StateSnapshot]

_SHOW_S = 5.0  # the interval at which the store rescans its folder
_SHOWN_NODES = 512  # a record of about 25 kB, and a millisecond of the engine's thread


@dataclass(frozen=True, slots=True)
class Storing:
    """An attempt to store a prefix that goes on."""

    start: int = 0  # tokens that were handed over
    handed_over: bool = False  # all of them were
    report: WriteReport = field(default_factory=WriteReport)

    @property
    def done(self) -> bool:
        """True once all of it is written or refused."""
        return self.handed_over and self.report.done


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
        self._shown, self._shown_s = (0, 0), 0.0  # version and bytes of the tree when it was shown, and the time
        self._readings: list[weakref.ref[Reading]] = []  # whose content is not inserted yet, in the order of begin

    @property
    def pending_bytes(self) -> int:
        """Bytes of evicted data in memory that wait to be written."""
        return self._tier.pending_bytes

    # Writing

    def spill(self, evicted: Iterable[Evicted[KVSegment, StateSnapshot]]) -> None:
        """Let evicted data be written, a snapshot with its segment. What exceeds the write queue is dropped."""
        segments = dict[tuple[str, tuple[int, ...]], Evicted[KVSegment, StateSnapshot]]()
        for each in evicted:  # a snapshot may have been evicted before its segment
            key = each.namespace, each.tokens
            before = segments.pop(key, each)
            merged = Evicted(
                each.namespace, each.path, each.segment or before.segment, each.snapshot or before.snapshot
            )
            segments[key] = merged
        for (namespace, tokens), each in reversed(segments.items()):  # files of a prefix that follow a gap are useless
            if segment := each.segment or self._segment_at(namespace, tokens):
                self._write(namespace, tokens, len(each.path[-1]), segment, each.snapshot)

    def write_early(self, found: Found[KVSegment, StateSnapshot]) -> None:
        """Let the nodes of a prefix that was used again be written, so that they survive a crash. Those that cannot
        wait to be written now are written after a later use."""
        for node in found.nodes:
            if node.end <= found.length and writes_early(node.uses, handed_over=node.handed_over):
                if not self._write_node(node):
                    return
                self._tree.mark_handed_over(node)

    def spill_row(self, namespace: str, tokens: tuple[int, ...], cache: Sequence[Any], limit_of: LoadLimit) -> None:
        """Let the cache of one row with these tokens be written as far as the disk lacks it, if loading that is
        worthwhile: nodes that hold its first tokens, then copies of the rest. What exceeds the write queue is dropped;
        all of it if the rest is useless without the state at its end."""
        chain = self.find_whole(namespace, tokens, 0)
        stored = len(chain.tokens) if chain else 0
        nodes = self._nodes_after(stored, namespace, tokens)
        start = nodes[-1].end if nodes else stored
        ends = [*range(start + MAX_SEGMENT_TOKENS, len(tokens), MAX_SEGMENT_TOKENS), len(tokens)]
        state = snapshot_state(cache, 0)
        kv_bytes = [node.segment.nbytes for node in nodes if node.segment]
        kv_bytes += [(end - begin) * token_bytes(cache) for begin, end in pairwise([start, *ends])]
        state_bytes = [node.snapshot.nbytes if node.snapshot else 0 for node in nodes]
        state_bytes += [0] * (len(ends) - 1) + [state.nbytes]
        share = self._tier.kv_share(cache)
        file_bytes = tuple(round(share * kv) + held for kv, held in zip(kv_bytes, state_bytes, strict=True))
        load = LoadSize(len(tokens) - stored, stored, file_bytes, self._tier.bytes_per_s, 0)
        held_bytes = sum(kv_bytes) + sum(state_bytes)
        if limit_of(load) is None or (state.layers and held_bytes > self._tier.room_bytes):
            return
        materialize(state.layers)
        if not all(map(self._write_node, nodes)):
            return
        for begin, end in pairwise([start, *ends]):
            segment = copy_segment(cache, 0, begin, end)
            at_end = state if state.layers and end == len(tokens) else None
            if not self._write(namespace, tokens[:end], end - begin, segment, at_end):
                return

    def _nodes_after(
        self, stored: int, namespace: str, tokens: tuple[int, ...]
    ) -> list[Node[KVSegment, StateSnapshot]]:
        """Return the nodes that hold the tokens after the first `stored` ones, which are on disk, but not the last
        token. All nodes if one of them begins where no file ends."""
        path, matched = self._tree.walk(namespace, tokens)
        path = [node for node in path if node.end <= matched and node.end < len(tokens)]
        nodes = [node for node in path if node.end > stored]
        return path if nodes and nodes[0].end - len(nodes[0].tokens) < stored else nodes

    def store(self, namespace: str, tokens: tuple[int, ...], attempt: Storing) -> Storing:
        """Let what the tree holds along these tokens be written and pinned, as far as it can wait to be written now.
        Returns the attempt to go on with. Blocks while a part of a node is copied."""
        path, matched = self._tree.walk(namespace, tokens)
        start = attempt.start
        # With states, a part of a node is useless without a state at its end.
        ends = [node.end if self._tree.stateful else min(node.end, matched) for node in path]
        nodes = {end: node for end, node in zip(ends, path, strict=True) if start < end <= matched}
        attempt.report.expect_end(max(nodes, default=start))
        for end, node in nodes.items():
            if not self._store_node(node, end, attempt.report):
                return replace(attempt, start=start)
            start = end
        return replace(attempt, start=start, handed_over=True)

    def _store_node(self, node: Node[KVSegment, StateSnapshot], end: int, report: WriteReport) -> bool:
        """Write the first tokens of a node, up to `end`; of a prefix that another one continues, no file ends there."""
        assert node.segment is not None, "the root is never written"
        if end == node.end:
            return self._write_node(node, report)
        start = node.end - len(node.tokens)
        first, _ = node.segment.split(end - start)
        return self._write(node.namespace, node.prefix[:end], end - start, first, None, report)

    def stored_length(self, namespace: str, tokens: tuple[int, ...]) -> int:
        """Return the number of the first of these tokens that a worker without them in memory would find on disk."""
        chain = self._tier.find(namespace, tokens, stateful=self._tree.stateful, held=(), longer_than=0)
        return len(chain.tokens) if chain else 0

    def _segment_at(self, namespace: str, tokens: tuple[int, ...]) -> KVSegment | None:
        path, _ = self._tree.walk(namespace, tokens)
        return path[-1].segment if path and path[-1].end == len(tokens) else None

    def _write_node(self, node: Node[KVSegment, StateSnapshot], report: WriteReport | None = None) -> bool:
        assert node.segment is not None, "the root is never written"
        return self._write(node.namespace, node.prefix, len(node.tokens), node.segment, node.snapshot, report)

    def _write(
        self,
        namespace: str,
        tokens: tuple[int, ...],
        length: int,
        segment: KVSegment,
        snapshot: StateSnapshot | None,
        report: WriteReport | None = None,
    ) -> bool:
        accepted = True  # after a failure too: another attempt would fail as well
        with isolate(f"writing a prefix of {len(tokens)} tokens to disk") as attempt:
            accepted = self._tier.write(namespace, tokens, length, segment, snapshot, report=report)
        if attempt.failed and report:
            report.expect()
            report.settle(NotStored.DISK)
        return accepted

    def write_all(self, until_s: float) -> None:
        """Write the whole tree, the most recently used first, at most until this time.monotonic(). Blocks."""
        for node in self._tree.recent():
            if not self._tier.wait_for_room(node.nbytes, until_s) or not self._write_node(node):
                break

    # Reading

    @property
    def loading_bytes(self) -> int:
        """Bytes of memory that the files take whose content will be inserted into the tree."""
        return sum(self._tier.memory_bytes(reading.chain) for reading in self._loading())

    def continued(self, *chains: Chain) -> set[Node[KVSegment, StateSnapshot]]:
        """Return the nodes that the files of all loads continue, and those that these chains would: without them the
        files are useless."""
        nodes = set[Node[KVSegment, StateSnapshot]]()
        for chain in (*chains, *(reading.chain for reading in self._loading())):
            nodes.update(self._tree.walk(chain.namespace, chain.tokens[: chain.start])[0])
        return nodes

    def reserved_bytes(self, *chains: Chain) -> int:
        """Return the bytes of the segments that all loads continue, and these chains would, and of the chains."""
        segments = (node.segment for node in self.continued(*chains))
        return sum(map(self.memory_bytes, chains)) + sum(segment.nbytes for segment in segments if segment)

    def memory_bytes(self, chain: Chain) -> int:
        """Return the most bytes of memory that loading these files takes."""
        return self._tier.memory_bytes(chain)

    def _loading(self) -> list[Reading]:
        readings = [reading for reference in self._readings if (reading := reference()) is not None]
        self._readings = [weakref.ref(reading) for reading in readings]
        return readings

    def show(self, now_s: float, *, idle: bool) -> None:
        """Publish what the tree holds for `sluice prefix list`, every few seconds and if the engine is idle. `now_s`: a
        clock. Copies no tokens."""
        state = self._tree.version, self._tree.nbytes
        if state != self._shown and (idle or now_s - self._shown_s >= _SHOW_S):
            self._shown, self._shown_s = state, now_s
            self._tier.show(Held(self._tree.nbytes, tuple(_held(self._tree.recent()[:_SHOWN_NODES]))))

    def find(self, namespace: str, tokens: tuple[int, ...], matched: int) -> Chain | None:
        """Return the files that hold more of the tokens than the `matched` ones that can be loaded from memory; None if
        there are none."""
        path, end = self._tree.walk(namespace, tokens)
        held = [node.end for node in path if node.end <= end]
        return self._tier.find(namespace, tokens, stateful=self._tree.stateful, held=held, longer_than=matched)

    def known_end(self, namespace: str, tokens: tuple[int, ...]) -> int:
        """Return the last position along these tokens at which a file ends, with a state or without one."""
        path, end = self._tree.walk(namespace, tokens)
        return self._tier.known_end(namespace, tokens, [node.end for node in path if node.end <= end])

    def find_whole(self, namespace: str, tokens: tuple[int, ...], matched: int) -> Chain | None:
        """Return the files that hold the first tokens, more than `matched`, without any help of memory."""
        return self._tier.find(namespace, tokens, stateful=self._tree.stateful, held=(), longer_than=matched)

    def size_of(self, chain: Chain, matched: int) -> LoadSize:
        """Return the size of the load of these files, of which memory holds the first `matched` tokens."""
        tokens = len(chain.tokens) - matched
        return LoadSize(tokens, matched, chain.sizes, self._tier.bytes_per_s, self._tier.waiting_bytes(chain))

    def is_loading(self, chain: Chain) -> bool:
        """Return True if these files are being read, so that reading them takes no more memory."""
        return any(reading.chain.files == chain.files and not reading.done for reading in self._loading())

    def read(self, chain: Chain) -> Reading:
        """Start to read files, or return the reading of the same files that is under way. It is given up if all callers
        drop the returned object."""
        reading = self.read_apart(chain)
        if reading not in self._loading():
            self._readings.append(weakref.ref(reading))
        return reading

    def read_apart(self, chain: Chain) -> Reading:
        """Start to read files as `read` does, but not for the tree: their bytes are the caller's to count."""
        return self._tier.read(chain)

    def read_ahead(self, chain: Chain) -> ReadAhead:
        """Bring files into the system's page cache, as long as the caller holds the returned object."""
        return self._tier.read_ahead(chain)

    def give_up(self, reading: Reading, waited_s: float) -> None:
        """Record that a reading took too long: until the reader has ended it, no prefix is found."""
        self._tier.give_up(reading, waited_s)

    def cancel_loads(self, max_bytes: int) -> None:
        """End the last loads until those left, with the segments that they continue, take at most `max_bytes`. Their
        prompts are computed."""
        for reading in reversed(self._loading()):
            if self.loading_bytes + self.reserved_bytes() <= max_bytes:
                break
            reading.cancel()
            self._forget_load(reading)

    def restored(self, reading: Reading) -> "list[Restored]":
        """Return what was read for the tree, file by file, which is the caller's to insert. Raises ValueError if it is
        not of this network."""
        self._forget_load(reading)
        return self.restored_apart(reading)

    def restored_apart(self, reading: Reading) -> "list[Restored]":
        """Return what was read with `read_apart`, file by file. Raises ValueError if it is not of this network."""
        names = (segment.header.name for segment in reading.segments)
        pairs = zip(names, map(self._tier.restore, reading.segments), strict=True)
        return [Restored(name.start, name.end, segment, snapshot) for name, (segment, snapshot) in pairs]

    def _forget_load(self, reading: Reading) -> None:
        self._readings = [weakref.ref(each) for each in self._loading() if each is not reading]

    def forget(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Remove the files along these tokens, and end the loads of them. Their prompts are computed."""
        for reading in self._tier.forget(namespace, tokens):
            self._forget_load(reading)


def _held(nodes: Iterable[Node[KVSegment, StateSnapshot]]) -> Iterator[HeldNode]:
    """Yield the nodes as they are published. Each comes after its parent."""
    indexes = dict[Node[KVSegment, StateSnapshot], int]()
    for index, node in enumerate(nodes):
        indexes[node] = index
        parent = indexes.get(node.parent) if node.parent else None  # None for the root
        yield HeldNode(parent, node.namespace, node.tokens, node.nbytes, node.uses)
