"""The prefix cache: KV state of earlier prompts and answers, reused by requests that share a prefix.

KV layers, plain or latent, are cached by token and shared by all requests with that prefix. All other layers (recurrent
states, rotating windows) are cached as snapshots at chosen positions. Restored state was computed from exactly these
tokens, so a cache hit yields the same tokens as a miss."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.nn as nn

from worker.engine.cache import slots
from worker.engine.cache.segments import (
    KVSegment,
    StateSnapshot,
    copy_segment,
    is_finite,
    needs_states,
    restore_cache,
    snapshot_state,
    token_bytes,
)
from worker.engine.isolation import isolate
from worker.engine.memory import BUFFER_TOKENS
from worker.engine.prefix.disk import DiskPrefixes, Storing
from worker.engine.prefix.tree import CLOSE_TOKENS, Found, PrefixTree, checkpoint_positions
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.outcomes import NotStored, StoreResult
from worker.prefix_store.index import Chain
from worker.prefix_store.policy import LoadLimit, store_result
from worker.prefix_store.reader import ChainReading, ReadAhead

GRID = 2048  # tokens between state snapshots that are not at a boundary


@dataclass(frozen=True, slots=True)
class StartedLoad:
    """A prefix that is read from disk for one prompt."""

    reading: ChainReading
    limit_s: float  # after which the prompt is computed instead
    for_row: bool = False  # into the memory of the prompt's row: see `PrefixCache.read_for_row`


class PrefixCache:
    """Prefix cache of one network, for the engine's thread. Entries belong to a namespace, and are not found from
    another. Tokens are passed as cache keys: see `GenerationRequest.cache_key`."""

    def __init__(self, network: nn.Module, max_bytes: int, disk: DiskPrefixes | None = None) -> None:
        """`max_bytes`: upper limit of the size; see `set_limit`. `disk`: receives what is evicted; of this network, and
        of no other cache."""
        self._network = network
        self._max_bytes = max_bytes
        self._limit = max_bytes
        self.stateful = needs_states(network)
        self.disk = disk
        self._tree = disk.tree if disk else PrefixTree[KVSegment, StateSnapshot](stateful=self.stateful)

    @property
    def nbytes(self) -> int:
        """Bytes held now, those that wait to be written to disk included."""
        return self._tree.nbytes + (self.disk.store.writer.pending_bytes if self.disk else 0)

    @property
    def evicted(self) -> int:
        """Number of KV segments and state snapshots evicted so far."""
        return self._tree.evicted

    @property
    def version(self) -> int:
        """Number that changes when a longer match may have become possible."""
        return self._tree.version

    @property
    def num_marks(self) -> int:
        """Number of marks whose prefixes are held."""
        return self._tree.num_marks

    def mark(self, namespace: str, tokens: tuple[int, ...], marks: Sequence[tuple[str, int]]) -> None:
        """Name prefixes of these tokens: see `PrefixTree.mark`."""
        self._tree.mark(namespace, tokens, marks)

    def take_lost(self) -> tuple[tuple[str, ...], bool]:
        """Return the marks lost since the last call, and True if all that was held is lost: see `PrefixTree`."""
        return self._tree.take_lost()

    def checkpoint_positions(
        self, boundaries: Sequence[int], tokens: int, partings: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Return the positions at which a prefill of `tokens` tokens has to end a forward so that a snapshot can be
        taken. Empty if the model needs no snapshots. `boundaries`: positions where other prompts are likely to
        diverge; `partings`: where known ones do."""
        return checkpoint_positions(boundaries, tokens, GRID, partings) if self.stateful else ()

    def match(self, namespace: str, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Return the length of the longest cached prefix, and the number of tokens that are shared with an earlier
        prompt. That is more if no snapshot was taken where the two part."""
        found = self._tree.find(namespace, tokens)
        return found.length, found.known

    def match_length(self, namespace: str, tokens: tuple[int, ...]) -> int:
        """Return the length of the longest cached prefix, in tokens."""
        return self._tree.find(namespace, tokens).length

    def touch(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Mark the longest cached prefix as most recently used, so that it is evicted last."""
        self._tree.touch(self._tree.find(namespace, tokens))

    def load(self, namespace: str, tokens: tuple[int, ...]) -> tuple[list[Any], int]:
        """Return a new cache of one row that holds the longest cached prefix, with room for all the tokens, and the
        prefix's length. The caller owns the cache. Blocks until it is computed."""
        found, cache = self._tree.find(namespace, tokens), make_prompt_cache(self._network)
        if found.length == 0:
            return cache, 0
        self._tree.use(found)
        if self.disk:
            self.disk.write_early(found)
        segments = [node.segment for node in found.nodes if node.segment]
        state, surplus = (found.holder.snapshot, found.holder.end - found.length) if found.holder else (None, 0)
        states = state.before(surplus) if state else iter(())
        cache = restore_cache(cache, segments, states, found.length, capacity=_capacity(len(tokens)))
        slots.materialize(cache)
        return cache, found.length

    def insert(self, namespace: str, tokens: tuple[int, ...], cache: Sequence[Any], index: int = 0) -> None:
        """Copy what row `index` of `cache` holds into the prefix cache, as far as it is not there and fits. The row
        must have computed exactly these tokens, at consecutive positions. Blocks. A failure, such as out of memory, is
        logged."""
        path, matched = self._tree.walk(namespace, tokens)
        self._tree.touch(Found(matched, tuple(path)))
        if path and matched == len(tokens) and (not self.stateful or (path[-1].end == matched and path[-1].snapshot)):
            return
        with isolate(f"caching a prefix of {len(tokens)} tokens"):  # the row itself is unharmed
            self._insert(namespace, tokens, cache, index)

    def _insert(self, namespace: str, tokens: tuple[int, ...], cache: Sequence[Any], index: int) -> None:
        state = snapshot_state(cache, index) if self.stateful else None

        def bytes_needed() -> int:
            _, matched = self._tree.walk(namespace, tokens)
            return token_bytes(cache) * (len(tokens) - matched) + (state.nbytes if state else 0)

        if bytes_needed() > self._room:
            return
        self._shrink(self._room - bytes_needed())
        # Shrinking may have evicted a part of this prefix, so more is needed now.
        if self._tree.nbytes + bytes_needed() > self._room:
            return
        if state:
            slots.materialize(state.layers)
        self._tree.insert(namespace, tokens, partial(copy_segment, cache, index), state)
        if self.disk:  # a prefix that this row shares with others may have a node of its own only now
            self.disk.write_early(self._tree.find(namespace, tokens))

    def set_limit(self, max_bytes: int) -> None:
        """Limit the size to `max_bytes` until the next call, and evict what exceeds it; loads from disk that do not fit
        any more are ended. The size given at the start is never exceeded."""
        self._limit = max(0, min(self._max_bytes, max_bytes))
        if self.disk:
            self.disk.cancel_loads(self._limit)
        self._shrink(self._room)

    @property
    def _room(self) -> int:
        """Most bytes of the tree: those of loads that have begun are reserved."""
        return self._limit - (self.disk.loading_bytes if self.disk else 0)

    def _shrink(self, max_bytes: int, *chains: Chain) -> None:
        """Evict what exceeds the bytes, except for segments that loads from disk continue, or these chains."""
        evicted = self._tree.shrink(max_bytes, self.disk.continued(*chains) if self.disk else ())
        if self.disk and evicted:
            self.disk.spill(evicted)

    def store(self, namespace: str, tokens: tuple[int, ...], attempt: Storing | None = None) -> StoreResult | Storing:
        """Let the cached prefix of these tokens be written to disk, and never be removed from there for space. Returns
        an attempt until all of it is written or refused: call again with it later. Without a disk nothing is
        written."""
        if self.disk is None:
            return StoreResult(0, missing=NotStored.NO_FOLDER)
        attempt = self.disk.pin(namespace, tokens, attempt or Storing())
        if not attempt.done:
            return attempt
        stored = self.disk.find(namespace, tokens, alone=True)
        return store_result(
            len(tokens),
            len(stored.tokens) if stored else 0,
            attempt.report.written_bytes,
            attempt.report.refusal,
            spacing=CLOSE_TOKENS if self.stateful else 1,
        )

    # From disk

    def read(self, namespace: str, tokens: tuple[int, ...], limit_of: LoadLimit) -> StartedLoad | None:
        """Start to read the longest prefix on disk if that is worthwhile, longer than the one in memory, and fits into
        the cache beside the loads that have begun. Evicts what it replaces. `limit_of`: see `LoadLimit`."""
        matched = self.match_length(namespace, tokens)
        if self.disk is None or (chain := self.disk.find(namespace, tokens, matched)) is None:
            return None
        limit_s = limit_of(self.disk.size_of(chain, matched))
        fits = self.disk.is_loading(chain) or self.disk.reserved_bytes(chain) <= self._room
        if limit_s is None or not fits:
            return None
        self._touch_all(namespace, tokens)
        reading = self.disk.read(chain)
        self._shrink(self._room)
        return StartedLoad(reading, limit_s)

    def read_ahead(self, namespace: str, tokens: tuple[int, ...], limit_of: LoadLimit) -> ReadAhead | None:
        """Bring the files of the longest prefix on disk into the system's page cache, for a request that waits, if
        loading it now would be worthwhile. Takes no memory of the cache. Ends if the caller drops the returned
        object."""
        matched = self.match_length(namespace, tokens)
        if self.disk is None or (chain := self.disk.find(namespace, tokens, matched)) is None:
            return None
        is_worthwhile = limit_of(self.disk.size_of(chain, matched)) is not None
        return self.disk.store.reader.read_ahead(chain) if is_worthwhile else None

    def read_for_row(
        self, namespace: str, tokens: tuple[int, ...], limit_of: LoadLimit, row_bytes: int
    ) -> StartedLoad | None:
        """Start to read the longest prefix on disk into memory that is reserved for its row, and that the row does not
        use yet, if that is worthwhile: for a prefix that does not fit into the cache. `row_bytes`: the most bytes to
        load. `restore_row` then takes the result."""
        matched = self.match_length(namespace, tokens)
        if self.disk is None or (chain := self.disk.find(namespace, tokens, matched, alone=True)) is None:
            return None
        limit_s = limit_of(self.disk.size_of(chain, matched))
        if limit_s is None or self.disk.memory_bytes(chain) > row_bytes:
            return None
        return StartedLoad(self.disk.store.reader.read(chain), limit_s, for_row=True)

    def restore_row(self, reading: ChainReading, tokens: int) -> tuple[list[Any], int] | None:
        """Return a new cache of one row with what was read for it, and room for `tokens` tokens, and the prefix's
        length; None if nothing was read, or after a failure, which is logged. The caller owns the cache. Blocks until
        it is computed."""
        with isolate(f"loading a row of {len(reading.chain.tokens)} tokens from disk"):
            parts = self.disk.restore(reading, for_row=True) if self.disk else []
            while parts and self.stateful and not parts[-1].snapshot:  # a later file was bad
                parts.pop()
            if parts:
                states = parts[-1].snapshot.before(0) if parts[-1].snapshot else iter(())
                end = parts[-1].end
                segments, cache = [part.segment for part in parts], make_prompt_cache(self._network)
                cache = restore_cache(cache, segments, states, end, capacity=_capacity(tokens))
                slots.materialize(cache)
                return cache, end
        return None

    def _touch_all(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Mark all nodes along these tokens as most recently used, also those without a state."""
        path, matched = self._tree.walk(namespace, tokens)
        self._tree.touch(Found(matched, tuple(path)))

    def insert_read(self, reading: ChainReading) -> int:
        """Insert what was read, as far as it fits. Returns the length of the prefix that the cache holds then. Blocks
        if the cache has divided the prefix otherwise, which makes copies. A failure is logged."""
        chain = reading.chain
        with isolate(f"loading a prefix of {len(chain.tokens)} tokens from disk"):
            if self.disk:
                self._insert_read(self.disk, reading)
        return self.match_length(chain.namespace, chain.tokens)

    def _insert_read(self, disk: DiskPrefixes, reading: ChainReading) -> None:
        chain, restored = reading.chain, disk.restore(reading)
        if self.match_length(chain.namespace, chain.tokens) == len(chain.tokens):  # another prompt was first
            return
        self._touch_all(chain.namespace, chain.tokens)
        self._shrink(self._room - sum(each.nbytes for each in restored), chain)
        for each in restored:
            _, matched = self._tree.walk(chain.namespace, chain.tokens)
            # Shrinking may have evicted the tokens before these.
            if matched >= each.start and self._tree.nbytes + each.nbytes <= self._room:
                self._tree.insert(chain.namespace, chain.tokens[: each.end], each.part, each.snapshot)

    def forget_non_finite(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Drop the first cached node along these tokens that is not finite, and every node that extends it, and the
        files along these tokens. Blocks."""
        path, _ = self._tree.walk(namespace, tokens)
        non_finite = (node for node in path if not (is_finite(node.segment) and is_finite(node.snapshot)))
        if (first := next(non_finite, None)) is not None:
            self._tree.discard(first)
        if self.disk:
            self.disk.store.forget(namespace, tokens)


def _capacity(tokens: int) -> int:
    """Return the tokens that the buffers of a row have room for."""
    return -(-tokens // BUFFER_TOKENS) * BUFFER_TOKENS
