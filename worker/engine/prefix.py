"""The prefix cache: KV state of earlier prompts and answers, reused by requests that share a prefix.

KV layers, plain or latent, are cached by token and shared by all requests with that prefix. All other layers (recurrent
states, rotating windows) are cached as snapshots at chosen positions. Restored state was computed from exactly these
tokens, so a cache hit yields the same tokens as a miss."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.nn as nn

from worker.engine import slots
from worker.engine.kept import Run, State, needs_states, restored, sound, taken, token_bytes, whole
from worker.engine.upstream import make_prompt_cache
from worker.schedule.memory import BUFFER_TOKENS
from worker.schedule.prefix import Found, Tree, cuts

logger = logging.getLogger("sluice.engine")

GRID = 2048  # tokens between state snapshots that are not at a boundary


class PrefixCache:
    """Prefix cache of one network, for the engine's thread. Entries belong to a namespace, and are not found from
    another. Tokens are passed as cache keys: see `GenerationRequest.cache_key`."""

    def __init__(self, network: nn.Module, most: int) -> None:
        """`most`: the largest size in bytes."""
        self._network, self._most, self._room = network, most, most
        self.stateful = needs_states(network)
        self._tree = Tree[Run, State](stateful=self.stateful)

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

    def cuts(self, boundaries: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Return the positions at which a prefill of `tokens` tokens has to end a forward so that a snapshot can be
        taken. Empty if the model needs no snapshots. `boundaries`: positions where other prompts are likely to
        diverge."""
        return cuts(boundaries, tokens, GRID) if self.stateful else ()

    def length(self, space: str, tokens: tuple[int, ...]) -> int:
        """Return the length of the longest cached prefix, in tokens."""
        return self._tree.find(space, tokens).length

    def use(self, space: str, tokens: tuple[int, ...]) -> None:
        """Mark the longest cached prefix as most recently used, so that it is evicted last."""
        self._tree.use(self._tree.find(space, tokens))

    def fetch(self, space: str, tokens: tuple[int, ...]) -> tuple[list[Any], int]:
        """Return a new cache of one row that holds the longest cached prefix, with room for all the tokens, and the
        prefix's length. The caller owns the cache. Blocks until it is computed."""
        found, cache = self._tree.find(space, tokens), make_prompt_cache(self._network)
        if found.length == 0:
            return cache, 0
        self._tree.use(found)
        runs = [node.run for node in found.nodes if node.run]
        state, surplus = (found.holder.state, found.holder.end - found.length) if found.holder else (None, 0)
        room = -(-len(tokens) // BUFFER_TOKENS) * BUFFER_TOKENS
        cache = restored(cache, runs, state.before(surplus) if state else iter(()), found.length, room=room)
        slots.settle(cache)
        return cache, found.length

    def keep(self, space: str, tokens: tuple[int, ...], cache: Sequence[Any], place: int = 0) -> None:
        """Copy what row `place` of `cache` holds into the prefix cache, as far as it is not there and fits. The row
        must have computed exactly these tokens, at consecutive positions. Blocks. A failure, such as out of memory, is
        logged."""
        path, matched = self._tree.walk(space, tokens)
        self._tree.use(Found(matched, tuple(path)))
        if path and matched == len(tokens) and (not self.stateful or (path[-1].end == matched and path[-1].state)):
            return
        try:
            self._add(space, tokens, cache, place)
        except Exception:  # most likely out of memory; the row itself is unharmed
            logger.exception("a prefix of %d tokens could not be cached", len(tokens))

    def _add(self, space: str, tokens: tuple[int, ...], cache: Sequence[Any], place: int) -> None:
        state = whole(cache, place) if self.stateful else None

        def needs() -> int:
            _, matched = self._tree.walk(space, tokens)
            return token_bytes(cache) * (len(tokens) - matched) + (state.nbytes if state else 0)

        self._tree.shrink(self._room - needs())
        if self.nbytes + needs() > self._room:  # shrinking may have evicted its own prefix, so it needs more now
            return
        if state:
            slots.settle(state.layers)
        self._tree.add(space, tokens, partial(taken, cache, place), state)

    def make_room(self, most: int) -> None:
        """Limit the size to `most` bytes until the next call, and evict what exceeds it. The size given at the start is
        never exceeded."""
        self._room = max(0, min(self._most, most))
        self._tree.shrink(self._room)

    def forget_unsound(self, space: str, tokens: tuple[int, ...]) -> None:
        """Drop the first cached node along these tokens that is not finite, and every node that extends it. Blocks."""
        path, _ = self._tree.walk(space, tokens)
        unsound = (node for node in path if not (sound(node.run) and sound(node.state)))
        if (first := next(unsound, None)) is not None:
            self._tree.discard(first)
