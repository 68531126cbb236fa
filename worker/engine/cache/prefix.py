"""The prefix cache: KV state of earlier prompts and answers, reused by requests that share a prefix.

KV layers, plain or latent, are cached by token and shared by all requests with that prefix. All other layers (recurrent
states, rotating windows) are cached as snapshots at chosen positions. Restored state was computed from exactly these
tokens, so a cache hit yields the same tokens as a miss."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.nn as nn

from worker.engine.cache import slots
from worker.engine.cache.disk import DiskTier
from worker.engine.cache.durable import DurablePrefixes, IsWorthwhile, Restored
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
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.prefix_store.index import Chain
from worker.prefix_store.store import Reading
from worker.schedule.cache.prefix import Found, PrefixTree, checkpoint_positions
from worker.schedule.memory import BUFFER_TOKENS

GRID = 2048  # tokens between state snapshots that are not at a boundary


class PrefixCache:
    """Prefix cache of one network, for the engine's thread. Entries belong to a namespace, and are not found from
    another. Tokens are passed as cache keys: see `GenerationRequest.cache_key`."""

    def __init__(self, network: nn.Module, max_bytes: int, tier: DiskTier | None = None) -> None:
        """`max_bytes`: upper limit of the size; see `set_limit`. `tier`: receives what is evicted; see `close`."""
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

    def checkpoint_positions(self, boundaries: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Return the positions at which a prefill of `tokens` tokens has to end a forward so that a snapshot can be
        taken. Empty if the model needs no snapshots. `boundaries`: positions where other prompts are likely to
        diverge."""
        return checkpoint_positions(boundaries, tokens, GRID) if self.stateful else ()

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
        capacity = -(-len(tokens) // BUFFER_TOKENS) * BUFFER_TOKENS
        states = state.before(surplus) if state else iter(())
        cache = restore_cache(cache, segments, states, found.length, capacity=capacity)
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

        self._shrink(self._limit - bytes_needed())
        # Shrinking may have evicted a part of this prefix, so more is needed now.
        if self._tree.nbytes + bytes_needed() > self._limit:
            return
        if state:
            slots.materialize(state.layers)
        self._tree.insert(namespace, tokens, partial(copy_segment, cache, index), state)

    def set_limit(self, max_bytes: int) -> None:
        """Limit the size to `max_bytes` until the next call, and evict what exceeds it. The size given at the start is
        never exceeded."""
        self._limit = max(0, min(self._max_bytes, max_bytes))
        self._shrink(self._limit)

    def _shrink(self, max_bytes: int) -> None:
        """Evict what exceeds the bytes."""
        evicted = self._tree.shrink(max_bytes)
        if self._durable and evicted:
            self._durable.spill(evicted)

    def close(self) -> None:
        """Write all prefixes to disk, if there is a disk tier, as far as time allows. Blocks. The cache must not be
        used afterwards."""
        if self._durable:
            self._durable.close()

    # From disk

    def read_from_disk(self, namespace: str, tokens: tuple[int, ...], is_worthwhile: IsWorthwhile) -> Reading | None:
        """Start to read the longest prefix on disk if that is worthwhile and longer than the one in memory.
        `is_worthwhile`: see `IsWorthwhile`."""
        matched = self.match_length(namespace, tokens)
        if self._durable is None or (found := self._durable.find(namespace, tokens, matched, self._limit)) is None:
            return None
        chain, sizes = found
        gained = len(chain.tokens) - matched
        return self._durable.read(chain) if is_worthwhile(gained, matched, sizes, self._durable.bytes_per_s) else None

    def insert_from_disk(self, reading: Reading) -> int:
        """Insert what was read, as far as it fits. Returns the length of the prefix that the cache holds then. Blocks
        if the cache has divided the prefix otherwise, which makes copies. A failure is logged."""
        chain = reading.chain
        with isolate(f"loading a prefix of {len(chain.tokens)} tokens from disk"):
            self._insert_restored(chain, self._durable.restored(reading) if self._durable else [])
        return self.match_length(chain.namespace, chain.tokens)

    def _insert_restored(self, chain: Chain, restored: Sequence[Restored]) -> None:
        path, matched = self._tree.walk(chain.namespace, chain.tokens)
        self._tree.touch(Found(matched, tuple(path)))
        nbytes = sum(each.nbytes for each in restored)
        self._shrink(self._limit - nbytes)
        for each in restored:
            _, matched = self._tree.walk(chain.namespace, chain.tokens)
            # Shrinking may have evicted the tokens before these.
            if matched >= each.start and self._tree.nbytes + each.nbytes <= self._limit:
                self._tree.insert(chain.namespace, chain.tokens[: each.end], each.part, each.snapshot)

    def forget_non_finite(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Drop the first cached node along these tokens that is not finite, and every node that extends it. Blocks."""
        path, _ = self._tree.walk(namespace, tokens)
        non_finite = (node for node in path if not (is_finite(node.segment) and is_finite(node.snapshot)))
        if (first := next(non_finite, None)) is not None:
            self._tree.discard(first)
        if self._durable:
            self._durable.forget(namespace, tokens)
