"""The prefix cache: what was computed for a prompt and its answer, for those who begin alike.

Layers of keys and values, plain or latent, are kept by token, and shared by all that begin with it. All others
(recurrent states, rotating windows) are kept whole, at chosen places. What is restored was computed from just these
tokens, so a hit says what a miss would.
"""

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

GRID = 2048  # tokens; at least, between states that no boundary asks for


class PrefixCache:
    """For the engine's thread. `space` is whose prefixes they are: nothing is found in another's."""

    def __init__(self, network: nn.Module, most: int) -> None:
        """`most`: bytes."""
        self._network, self._most, self._room = network, most, most
        self.stateful = needs_states(network)
        self._tree = Tree[Run, State](stateful=self.stateful)

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    @property
    def evicted(self) -> int:
        """Runs and states, since the beginning."""
        return self._tree.evicted

    @property
    def version(self) -> int:
        """Another one when more may be found."""
        return self._tree.version

    def cuts(self, boundaries: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Where a prefill of so many tokens has to stop, because states are kept there."""
        return cuts(boundaries, tokens, GRID) if self.stateful else ()

    def length(self, space: str, tokens: tuple[int, ...]) -> int:
        """How many of the tokens are there, from the first one on."""
        return self._tree.find(space, tokens).length

    def use(self, space: str, tokens: tuple[int, ...]) -> None:
        """Somebody is about to fetch them: others shall go first."""
        self._tree.use(self._tree.find(space, tokens))

    def fetch(self, space: str, tokens: tuple[int, ...]) -> tuple[list[Any], int]:
        """A cache of one row, with room for all the tokens, and how many of them are in it."""
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
        """All that the row at that place of the cache has seen is these tokens, one position each."""
        path, matched = self._tree.walk(space, tokens)
        self._tree.use(Found(matched, tuple(path)))
        if path and matched == len(tokens) and (not self.stateful or (path[-1].end == matched and path[-1].state)):
            return
        try:
            self._add(space, tokens, cache, place)
        except Exception:  # memory, most likely; the row has lost nothing
            logger.exception("a prefix of %d tokens could not be kept", len(tokens))

    def _add(self, space: str, tokens: tuple[int, ...], cache: Sequence[Any], place: int) -> None:
        state = whole(cache, place) if self.stateful else None

        def needs() -> int:
            _, matched = self._tree.walk(space, tokens)
            return token_bytes(cache) * (len(tokens) - matched) + (state.nbytes if state else 0)

        self._tree.shrink(self._room - needs())
        if self.nbytes + needs() > self._room:  # what it begins with may have gone, too
            return
        if state:
            slots.settle(state.layers)
        self._tree.add(space, tokens, partial(taken, cache, place), state)

    def make_room(self, most: int) -> None:
        """It takes no more than so many bytes, until told otherwise."""
        self._room = max(0, min(self._most, most))
        self._tree.shrink(self._room)

    def forget_unsound(self, space: str, tokens: tuple[int, ...]) -> None:
        """Whatever gave a row no numbers is not given to others."""
        path, _ = self._tree.walk(space, tokens)
        unsound = (node for node in path if not (sound(node.run) and sound(node.state)))
        if (first := next(unsound, None)) is not None:
            self._tree.discard(first)
