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
from worker.engine.prefix.disk import DiskTier
from worker.engine.prefix.durable import DurablePrefixes, Restored, Storing
from worker.engine.prefix.tree import CLOSE_TOKENS, Found, PrefixTree, checkpoint_positions
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.outcomes import NotStored, StoreResult
from worker.prefix_store.index import Chain
from worker.prefix_store.policy import LoadLimit, store_result
from worker.prefix_store.reader import ReadAhead, Reading

GRID = 2048  # tokens between state snapshots that are not at a boundary


@dataclass(frozen=True, slots=True)
class StartedLoad:
    """A prefix that is read from disk for one prompt."""

    reading: Reading
    limit_s: float  # after which the prompt is computed instead
    for_row: bool = False  # into the memory of the prompt's row: see `PrefixCache.read_for_row`


class PrefixCache:
    """Prefix cache of one network, for the engine's thread. Entries belong to a namespace, and are not found from
    another. Tokens are passed as cache keys: see `GenerationRequest.cache_key`."""

    def __init__(self, network: nn.Module, max_bytes: int, tier: DiskTier | None = None) -> None:
        """`max_bytes`: upper limit of the size; see `set_limit`. `tier`: receives what is evicted."""
        self._network = network
        self._max_bytes = max_bytes
        self._limit = max_bytes
        self.stateful = needs_states(network)
        self._tree = PrefixTree[KVSegment, StateSnapshot](stateful=self.stateful)
        self._durable = DurablePrefixes(self._tree, tier) if tier else None

    @property
    def nbytes(self) -> int:
        """Bytes held now, those that wait to be written to disk included."""
        return self._tree.nbytes + (self._durable.pending_bytes if self._durable else 0)

    @property
    def on_disk(self) -> bool:
        """True if it has a disk tier."""
        return self._durable is not None

    @property
    def evicted(self) -> int:
        """Number of KV segments and state snapshots evicted so far."""
        return self._tree.evicted

    @property
    def version(self) -> int:
        """Number that changes when a longer match may have become possible."""
        return self._tree.version

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

    def known_on_disk(self, namespace: str, tokens: tuple[int, ...]) -> int:
        """Return the number of tokens that a prompt on disk shares, up to the end of a file; 0 if the model needs no
        snapshots. Hashes the tokens."""
        return self._durable.known_end(namespace, tokens) if self._durable and self.stateful else 0

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
        if self._durable:
            self._durable.write_early(found)
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
        if self._durable:  # a prefix that this row shares with others may have a node of its own only now
            self._durable.write_early(self._tree.find(namespace, tokens))

    def set_limit(self, max_bytes: int) -> None:
        """Limit the size to `max_bytes` until the next call, and evict what exceeds it; loads from disk that do not fit
        any more are ended. The size given at the start is never exceeded."""
        self._limit = max(0, min(self._max_bytes, max_bytes))
        if self._durable:
            self._durable.cancel_loads(self._limit)
        self._shrink(self._room)

    @property
    def _room(self) -> int:
        """Most bytes of the tree: those of loads that have begun are reserved."""
        return self._limit - (self._durable.loading_bytes if self._durable else 0)

    def _shrink(self, max_bytes: int, *chains: Chain) -> None:
        """Evict what exceeds the bytes, except for segments that loads from disk continue, or these chains."""
        evicted = self._tree.shrink(max_bytes, self._durable.continued(*chains) if self._durable else ())
        if self._durable and evicted:
            self._durable.spill(evicted)

    def store(self, namespace: str, tokens: tuple[int, ...], attempt: Storing | None = None) -> StoreResult | Storing:
        """Let the cached prefix of these tokens be written to disk, and never be removed from there for space. Returns
        an attempt until all of it is written or refused: call again with it later. Without a disk tier nothing is
        written."""
        if self._durable is None:
            return StoreResult(0, missing=NotStored.NO_FOLDER)
        attempt = self._durable.store(namespace, tokens, attempt or Storing())
        if not attempt.done:
            return attempt
        return store_result(
            len(tokens),
            self._durable.stored_length(namespace, tokens),
            attempt.report.written_bytes,
            attempt.report.refusal,
            spacing=CLOSE_TOKENS if self.stateful else 1,
        )

    def spill_row(self, namespace: str, tokens: tuple[int, ...], cache: Sequence[Any], limit_of: LoadLimit) -> None:
        """Let the cache of one row that is given up be written to disk, if there is a disk tier, and if loading it is
        expected to be faster than computing it. The row must have computed exactly these tokens, at consecutive
        positions. Blocks while tokens that no prefix holds are copied. A failure is logged. `limit_of`: see
        `LoadLimit`."""
        if self._durable:
            with isolate(f"writing the cache of a row of {len(tokens)} tokens to disk"):
                self._durable.spill_row(namespace, tokens, cache, limit_of)

    def show(self, now_s: float, *, idle: bool) -> None:
        """Publish what memory holds, if there is a disk tier: see `DurablePrefixes.show`."""
        if self._durable:
            self._durable.show(now_s, idle=idle)

    def write_all(self, until_s: float) -> None:
        """Write all prefixes to disk, if there is a disk tier, at most until this time.monotonic(). Blocks."""
        if self._durable:
            self._durable.write_all(until_s)

    # From disk

    def read_from_disk(self, namespace: str, tokens: tuple[int, ...], limit_of: LoadLimit) -> StartedLoad | None:
        """Start to read the longest prefix on disk if that is worthwhile, longer than the one in memory, and fits into
        the cache beside the loads that have begun. Evicts what it replaces. `limit_of`: see `LoadLimit`."""
        matched = self.match_length(namespace, tokens)
        if self._durable is None or (chain := self._durable.find(namespace, tokens, matched)) is None:
            return None
        limit_s = limit_of(self._durable.size_of(chain, matched))
        fits = self._durable.is_loading(chain) or self._durable.reserved_bytes(chain) <= self._room
        if limit_s is None or not fits:
            return None
        self._touch_all(namespace, tokens)
        reading = self._durable.read(chain)
        self._shrink(self._room)
        return StartedLoad(reading, limit_s)

    def read_ahead(self, namespace: str, tokens: tuple[int, ...], limit_of: LoadLimit) -> ReadAhead | None:
        """Bring the files of the longest prefix on disk into the system's page cache, for a request that waits, if
        loading it now would be worthwhile. Takes no memory of the cache. Ends if the caller drops the returned
        object."""
        matched = self.match_length(namespace, tokens)
        if self._durable is None or (chain := self._durable.find(namespace, tokens, matched)) is None:
            return None
        is_worthwhile = limit_of(self._durable.size_of(chain, matched)) is not None
        return self._durable.read_ahead(chain) if is_worthwhile else None

    def read_for_row(
        self, namespace: str, tokens: tuple[int, ...], limit_of: LoadLimit, row_bytes: int
    ) -> StartedLoad | None:
        """Start to read the longest prefix on disk into memory that is reserved for its row, and that the row does not
        use yet, if that is worthwhile: for a prefix that does not fit into the cache. `row_bytes`: the most bytes to
        load. `restore_row` then takes the result."""
        matched = self.match_length(namespace, tokens)
        if self._durable is None or (chain := self._durable.find_whole(namespace, tokens, matched)) is None:
            return None
        limit_s = limit_of(self._durable.size_of(chain, matched))
        if limit_s is None or self._durable.memory_bytes(chain) > row_bytes:
            return None
        return StartedLoad(self._durable.read_apart(chain), limit_s, for_row=True)

    def restore_row(self, reading: Reading, tokens: int) -> tuple[list[Any], int] | None:
        """Return a new cache of one row with what was read for it, and room for `tokens` tokens, and the prefix's
        length; None if nothing was read, or after a failure, which is logged. The caller owns the cache. Blocks until
        it is computed."""
        with isolate(f"loading a row of {len(reading.chain.tokens)} tokens from disk"):
            parts = self._durable.restored_apart(reading) if self._durable else []
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

    def give_up_load(self, reading: Reading, waited_s: float) -> None:
        """Record that a prefix is computed, since it was not read within `waited_s` seconds."""
        if self._durable:
            self._durable.give_up(reading, waited_s)

    def insert_from_disk(self, reading: Reading) -> int:
        """Insert what was read, as far as it fits. Returns the length of the prefix that the cache holds then. Blocks
        if the cache has divided the prefix otherwise, which makes copies. A failure is logged."""
        chain = reading.chain
        with isolate(f"loading a prefix of {len(chain.tokens)} tokens from disk"):
            restored = self._durable.restored(reading) if self._durable else []
            if self.match_length(chain.namespace, chain.tokens) < len(chain.tokens):  # else another prompt was first
                self._insert_restored(chain, restored)
        return self.match_length(chain.namespace, chain.tokens)

    def _insert_restored(self, chain: Chain, restored: Sequence[Restored]) -> None:
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
        if self._durable:
            self._durable.forget(namespace, tokens)


def _capacity(tokens: int) -> int:
    """Return the tokens that the buffers of a row have room for."""
    return -(-tokens // BUFFER_TOKENS) * BUFFER_TOKENS
