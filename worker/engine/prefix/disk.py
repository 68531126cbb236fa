"""The prefix cache on disk: what of the tree is written, and what of the disk is loaded into it."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import mlx.nn as nn

from worker.engine.cache.layers import layers
from worker.engine.cache.segments import (
    KVSegment,
    StateSnapshot,
    copy_segment,
    is_sliceable,
    needs_states,
    snapshot_state,
    token_bytes,
)
from worker.engine.cache.slots import materialize
from worker.engine.isolation import isolate
from worker.engine.prefix.tensors import Arrays, restored_segment, stored_segment
from worker.engine.prefix.tree import MAX_SEGMENT_TOKENS, Evicted, Found, Node, PrefixTree
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.errors import CannotStart
from worker.outcomes import NotStored
from worker.prefix_store.index import Chain
from worker.prefix_store.policy import LoadLimit, LoadSize, writes_early
from worker.prefix_store.reader import ChainReading, LoadedSegment
from worker.prefix_store.records import HeldNode
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewSegment, WriteReport

Tree = PrefixTree[KVSegment, StateSnapshot]

_SHOW_S = 5.0  # the interval at which the store rescans its folder


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
class _Restored:
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


class DiskPrefixes:
    """The prefixes of one network on disk, and their tree in memory, which belongs to the prefix cache. For the
    engine's thread. What concerns no tree is asked of the parts of the `store`."""

    def __init__(
        self,
        network: nn.Module,
        fingerprint: str,
        options: StoreOptions,
        wake: Callable[[], None],
        *,
        bits: int | None = None,
        token_bytes: int = 0,
    ) -> None:
        """`fingerprint`: of the model and its libraries: see `Model.cache_fingerprint`. `wake`: called on another
        thread when a reading is done. `bits`: of a value of the KV on disk, 8; None: KV is stored exactly.
        `token_bytes`: of the KV of a token in memory, at most; needed with `bits`. Blocks until the folder is listed.
        Raises `CannotStart`."""
        self._network = network
        self._bits = bits
        self.exact = bits is None  # KV is stored as it was computed
        self._token_bytes = token_bytes
        self.tree = Tree(stateful=needs_states(network))
        self._kinds = " ".join(type(layer).__name__ for layer in layers(make_prompt_cache(network)))
        self._shown, self._shown_s = (0, 0), 0.0  # version and bytes of the tree when it was shown, and the time
        self._readings: list[weakref.ref[ChainReading]] = []  # whose content is not inserted yet, in the order of begin
        stored_as = f" KV of {bits} bits" if bits else ""  # exact prefixes and others are never mixed
        try:
            self.store = PrefixStore(options, f"{fingerprint} {self._kinds}{stored_as}", Arrays(wake))
            self.store.open()
        except OSError as error:
            raise CannotStart(f"SLUICE_PREFIX_DISK_DIR={options.folder}: {error}; give a writable folder") from error
        except ImportError as error:
            raise CannotStart(f"SLUICE_PREFIX_DISK_KEY: {error}") from None

    def close(self, write_others: Callable[[float], None] = lambda until_s: None) -> None:
        """Write what the tree holds, the most recently used first, and then what else belongs into the store, as far as
        time allows, and end the store's threads. Blocks. `write_others`: called with the time.monotonic() at which it
        has to be done."""
        until_s = time.monotonic() + 20.0  # seconds for what is written at shutdown
        for node in self.tree.recent():
            if not self.store.writer.wait_for_room(node.nbytes, until_s) or not self._write_node(node):
                break
        write_others(until_s)
        self.store.close(max(0.0, until_s - time.monotonic()))

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
                self.tree.mark_handed_over(node)

    def spill_row(self, namespace: str, tokens: tuple[int, ...], cache: Sequence[Any], limit_of: LoadLimit) -> None:
        """Let the cache of one row that is given up be written as far as the disk lacks it, if loading that is expected
        to be faster than computing it: nodes that hold its first tokens, then copies of the rest. What exceeds the
        write queue is dropped; all of it if the rest is useless without the state at its end. The row must have
        computed exactly these tokens, at consecutive positions. Blocks while tokens that no prefix holds are copied. A
        failure is logged. Nothing is written if KV is rounded on disk: the row has to continue as it began. `limit_of`:
        see `LoadLimit`."""
        if not self.exact:
            return
        with isolate(f"writing the cache of a row of {len(tokens)} tokens to disk"):
            self._spill_row(namespace, tokens, cache, limit_of)

    def _spill_row(self, namespace: str, tokens: tuple[int, ...], cache: Sequence[Any], limit_of: LoadLimit) -> None:
        chain = self.find(namespace, tokens, alone=True)
        stored = len(chain.tokens) if chain else 0
        nodes = self._nodes_after(stored, namespace, tokens)
        start = nodes[-1].end if nodes else stored
        ends = [*range(start + MAX_SEGMENT_TOKENS, len(tokens), MAX_SEGMENT_TOKENS), len(tokens)]
        state = snapshot_state(cache, 0)
        kv_bytes = [node.segment.nbytes for node in nodes if node.segment]
        kv_bytes += [(end - begin) * token_bytes(cache) for begin, end in pairwise([start, *ends])]
        state_bytes = [node.snapshot.nbytes if node.snapshot else 0 for node in nodes]
        state_bytes += [0] * (len(ends) - 1) + [state.nbytes]
        file_bytes = tuple(map(sum, zip(kv_bytes, state_bytes, strict=True)))
        load = LoadSize(len(tokens) - stored, stored, file_bytes, self.store.reader.bytes_per_s)
        if limit_of(load) is None or (state.layers and sum(file_bytes) > self.store.writer.room_bytes):
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
        path, matched = self.tree.walk(namespace, tokens)
        path = [node for node in path if node.end <= matched and node.end < len(tokens)]
        nodes = [node for node in path if node.end > stored]
        return path if nodes and nodes[0].end - len(nodes[0].tokens) < stored else nodes

    def pin(self, namespace: str, tokens: tuple[int, ...], attempt: Storing) -> Storing:
        """Let what the tree holds along these tokens be written and pinned, as far as it can wait to be written now.
        Returns the attempt to go on with. Blocks while a part of a node is copied."""
        path, matched = self.tree.walk(namespace, tokens)
        start = attempt.start
        # With states, a part of a node is useless without a state at its end.
        ends = [node.end if self.tree.stateful else min(node.end, matched) for node in path]
        nodes = {end: node for end, node in zip(ends, path, strict=True) if start < end <= matched}
        attempt.report.expect_end(max(nodes, default=start))
        for end, node in nodes.items():
            if not self._pin_node(node, end, attempt.report):
                return replace(attempt, start=start)
            start = end
        return replace(attempt, start=start, handed_over=True)

    def _pin_node(self, node: Node[KVSegment, StateSnapshot], end: int, report: WriteReport) -> bool:
        """Write the first tokens of a node, up to `end`; of a prefix that another one continues, no file ends there."""
        assert node.segment is not None, "the root is never written"
        if end == node.end:
            return self._write_node(node, report)
        start = node.end - len(node.tokens)
        first, _ = node.segment.split(end - start)
        return self._write(node.namespace, node.prefix[:end], end - start, first, None, report)

    def _segment_at(self, namespace: str, tokens: tuple[int, ...]) -> KVSegment | None:
        path, _ = self.tree.walk(namespace, tokens)
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
            content = stored_segment(
                namespace, tokens[len(tokens) - length :], segment, snapshot, kinds=self._kinds, bits=self._bits
            )
            pinned = report is not None  # what is stored on request is not removed for space
            ends_pinned = report is not None and report.end == len(tokens)
            held_bytes = segment.nbytes + (snapshot.nbytes if snapshot else 0)
            new = NewSegment(tokens, snapshot is not None, content, pinned, ends_pinned, report, held_bytes)
            accepted = self.store.writer.write(new)
        if attempt.failed and report:
            report.expect()
            report.settle(NotStored.DISK)
        return accepted

    # Reading

    @property
    def loading_bytes(self) -> int:
        """Bytes of memory that the files take whose content will be inserted into the tree."""
        return sum(self.memory_bytes(reading.chain) for reading in self._loading())

    def continued(self, *chains: Chain) -> set[Node[KVSegment, StateSnapshot]]:
        """Return the nodes that the files of all loads continue, and those that these chains would: without them the
        files are useless."""
        nodes = set[Node[KVSegment, StateSnapshot]]()
        for chain in (*chains, *(reading.chain for reading in self._loading())):
            nodes.update(self.tree.walk(chain.namespace, chain.tokens[: chain.start])[0])
        return nodes

    def reserved_bytes(self, *chains: Chain) -> int:
        """Return the bytes of the segments that all loads continue, and these chains would, and of the chains."""
        segments = (node.segment for node in self.continued(*chains))
        return sum(map(self.memory_bytes, chains)) + sum(segment.nbytes for segment in segments if segment)

    def memory_bytes(self, chain: Chain) -> int:
        """Return the most bytes of memory that these files take while they are read, and afterwards."""
        if not self._bits:
            return chain.nbytes
        # Quantized KV is in memory for one file at a time; what else a file holds is a state.
        states = sum(size for name, size in zip(chain.files, chain.sizes, strict=True) if name.has_state)
        kv_bytes = self._token_bytes * (len(chain.tokens) - chain.start)
        return kv_bytes + min(chain.nbytes, states + max(chain.sizes))

    def _loading(self) -> list[ChainReading]:
        """Return the readings that callers hold, without those that have ended with nothing."""
        held = [reading for reference in self._readings if (reading := reference()) is not None]
        readings = [reading for reading in held if reading.segments or not reading.done]
        self._readings = [weakref.ref(reading) for reading in readings]
        return readings

    def show(self, now_s: float, *, idle: bool) -> None:
        """Publish what the tree holds for `sluice prefix list`, every few seconds and if the engine is idle. `now_s`: a
        clock. Copies no tokens."""
        state = self.tree.version, self.tree.nbytes
        if state != self._shown and (idle or now_s - self._shown_s >= _SHOW_S):
            self._shown, self._shown_s = state, now_s
            nodes = self.tree.recent()[:512]  # a record of about 25 kB, and a millisecond of the engine's thread
            self.store.memory.show(self.tree.nbytes, tuple(_held(nodes)))

    def find(
        self, namespace: str, tokens: tuple[int, ...], longer_than: int = 0, *, alone: bool = False
    ) -> Chain | None:
        """Return the files that hold the longest prefix of the tokens, after what memory holds of it; None if it is not
        longer than `longer_than`. `alone`: without any help of memory."""
        held = () if alone else self._held_ends(namespace, tokens)
        return self.store.find(namespace, tokens, stateful=self.tree.stateful, held=held, longer_than=longer_than)

    def known_end(self, namespace: str, tokens: tuple[int, ...]) -> int:
        """Return the number of tokens that a prompt on disk shares, up to the end of a file, with a state or without
        one. Hashes the tokens."""
        return self.store.index.known_end(namespace, tokens, self._held_ends(namespace, tokens))

    def _held_ends(self, namespace: str, tokens: tuple[int, ...]) -> list[int]:
        path, end = self.tree.walk(namespace, tokens)
        return [node.end for node in path if node.end <= end]

    def size_of(self, chain: Chain, matched: int) -> LoadSize:
        """Return the size of the load of these files, of which memory holds the first `matched` tokens."""
        tokens = len(chain.tokens) - matched
        reader = self.store.reader
        return LoadSize(tokens, matched, chain.sizes, reader.bytes_per_s, reader.waiting_bytes(chain))

    def is_loading(self, chain: Chain) -> bool:
        """Return True if these files are being read, so that reading them takes no more memory."""
        return any(reading.chain.files == chain.files and not reading.done for reading in self._loading())

    def read(self, chain: Chain) -> ChainReading:
        """Start to read files for the tree, which counts their bytes until their content is inserted: see
        `Reader.read`."""
        reading = self.store.reader.read(chain)
        if reading not in self._loading():
            self._readings.append(weakref.ref(reading))
        return reading

    def cancel_loads(self, max_bytes: int) -> None:
        """End the last loads until those left, with the segments that they continue, take at most `max_bytes`. Their
        prompts are computed."""
        for reading in reversed(self._loading()):
            if self.loading_bytes + self.reserved_bytes() <= max_bytes:
                break
            reading.cancel()

    def restore(self, reading: ChainReading, *, for_row: bool = False) -> list[_Restored]:
        """Return what was read, file by file, which is the caller's to insert. `for_row`: not into the tree. Raises
        ValueError if it is not of this network."""
        if not for_row:
            self._end_load(reading)
        return [self._restored(segment) for segment in reading.segments]

    def _end_load(self, reading: ChainReading) -> None:
        self._readings = [weakref.ref(each) for each in self._loading() if each is not reading]

    def _restored(self, loaded: LoadedSegment) -> _Restored:
        stateful = (layer for layer in layers(make_prompt_cache(self._network)) if not is_sliceable(layer))
        return _Restored(loaded.header.name.start, loaded.header.name.end, *restored_segment(loaded, stateful))


def _held(nodes: Iterable[Node[KVSegment, StateSnapshot]]) -> Iterator[HeldNode]:
    """Yield the nodes as they are published. Each comes after its parent."""
    indexes = dict[Node[KVSegment, StateSnapshot], int]()
    for index, node in enumerate(nodes):
        indexes[node] = index
        parent = indexes.get(node.parent) if node.parent else None  # None for the root
        yield HeldNode(parent, node.namespace, node.tokens, node.nbytes, node.uses)
