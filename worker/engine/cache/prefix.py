"""The prefix cache: KV state of earlier prompts and answers, reused by requests that share a prefix.

KV layers, plain or latent, are cached by token and shared by all requests with that prefix. All other layers (recurrent
states, rotating windows) are cached as snapshots at chosen positions. Restored state was computed from exactly these
tokens, so a cache hit yields the same tokens as a miss."""

import logging
from collections.abc import Sequence
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
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.schedule.memory import BUFFER_TOKENS
from worker.schedule.prefix import Found, PrefixTree, checkpoint_positions

logger = logging.getLogger("sluice.engine")

GRID = 2048  # tokens between state snapshots that are not at a boundary


class PrefixCache:
    """Prefix cache of one network, for the engine's thread. Entries belong to a namespace, and are not found from
    another. Tokens are passed as cache keys: see `GenerationRequest.cache_key`."""

    def __init__(self, network: nn.Module, most: int) -> None:
        """`most`: the largest size in bytes."""
        self._network, self._most, self._room = network, most, most
        self.stateful = needs_states(network)
        self._tree = PrefixTree[KVSegment, StateSnapshot](stateful=self.stateful)

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._tree.nbytes

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

    def match_length(self, space: str, tokens: tuple[int, ...]) -> int:
        """Return the length of the longest cached prefix, in tokens."""
        return self._tree.find(space, tokens).length

    def touch(self, space: str, tokens: tuple[int, ...]) -> None:
        """Mark the longest cached prefix as most recently used, so that it is evicted last."""
        self._tree.touch(self._tree.find(space, tokens))

    def load(self, space: str, tokens: tuple[int, ...]) -> tuple[list[Any], int]:
        """Return a new cache of one row that holds the longest cached prefix, with room for all the tokens, and the
        prefix's length. The caller owns the cache. Blocks until it is computed."""
        found, cache = self._tree.find(space, tokens), make_prompt_cache(self._network)
        if found.length == 0:
            return cache, 0
        self._tree.touch(found)
        runs = [node.segment for node in found.nodes if node.segment]
        state, surplus = (found.holder.snapshot, found.holder.end - found.length) if found.holder else (None, 0)
        room = -(-len(tokens) // BUFFER_TOKENS) * BUFFER_TOKENS
        cache = restore_cache(cache, runs, state.before(surplus) if state else iter(()), found.length, room=room)
        slots.materialize(cache)
        return cache, found.length

    def insert(self, space: str, tokens: tuple[int, ...], cache: Sequence[Any], place: int = 0) -> None:
        """Copy what row `place` of `cache` holds into the prefix cache, as far as it is not there and fits. The row
        must have computed exactly these tokens, at consecutive positions. Blocks. A failure, such as out of memory, is
        logged."""
        path, matched = self._tree.walk(space, tokens)
        self._tree.touch(Found(matched, tuple(path)))
        if path and matched == len(tokens) and (not self.stateful or (path[-1].end == matched and path[-1].snapshot)):
            return
        try:
            self._add(space, tokens, cache, place)
        except Exception:  # most likely out of memory; the row itself is unharmed
            logger.exception("a prefix of %d tokens could not be cached", len(tokens))

    def _add(self, space: str, tokens: tuple[int, ...], cache: Sequence[Any], place: int) -> None:
        state = snapshot_state(cache, place) if self.stateful else None

        def needs() -> int:
            _, matched = self._tree.walk(space, tokens)
            return token_bytes(cache) * (len(tokens) - matched) + (state.nbytes if state else 0)

        self._tree.shrink(self._room - needs())
        if self.nbytes + needs() > self._room:  # shrinking may have evicted its own prefix, so it needs more now
            return
        if state:
            slots.materialize(state.layers)
        self._tree.insert(space, tokens, partial(copy_segment, cache, place), state)

    def set_limit(self, most: int) -> None:
        """Limit the size to `most` bytes until the next call, and evict what exceeds it. The size given at the start is
        never exceeded."""
        self._room = max(0, min(self._most, most))
        self._tree.shrink(self._room)

    def forget_non_finite(self, space: str, tokens: tuple[int, ...]) -> None:
        """Drop the first cached node along these tokens that is not finite, and every node that extends it. Blocks."""
        path, _ = self._tree.walk(space, tokens)
        unsound = (node for node in path if not (is_finite(node.segment) and is_finite(node.snapshot)))
        if (first := next(unsound, None)) is not None:
            self._tree.discard(first)
