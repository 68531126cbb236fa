"""A prompt of which only some tokens are computed, each at its true position.

A cache counts the tokens that are in it, and models take that number for the position of the next one. So MLX's rope is
replaced, for the time of a forward, by one that is told where the tokens are. Then the row decodes as any other, since
slots know a row's position apart from its length: nothing is replaced while rows decode.
"""

import copy
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine import slots
from worker.engine.cache import layers
from worker.engine.prefill import Phase
from worker.engine.row import Row
from worker.engine.rows import Drawn
from worker.engine.scene import Scene
from worker.engine.upstream import RotatingKVCache, make_prompt_cache
from worker.schedule.sequence import Outcome, Prefilled, Range

Ranges = Sequence[Range]  # in order

_TRIAL = 4  # tokens


class Misplaced(Exception):
    """A model asked MLX's rope for something else than the positions of a row's next tokens."""


class SparsePrefill:
    """All but the last of the tokens that are kept; that one is the first that the row is fed when it decodes."""

    def __init__(
        self, network: nn.Module, row: Row, kept: Ranges, cache: list[Any], length: int, scene: Scene | None = None
    ) -> None:
        """`kept`: of the prompt; what follows it is kept anyway. `cache` holds the first `length` tokens, all of them
        kept, and is spent. A row says the same whatever part of what is kept was in the cache. `scene`: of a prompt
        with images.

        Raises ValueError for ranges that will not do."""
        known, prompt = row.sequence.known, len(row.sequence.prompt)
        _check(kept, prompt, window_of(cache))
        if length > front(kept):
            raise ValueError(f"{length} tokens are in the cache, and only the first {front(kept)} are all kept.")
        positions = [at for start, end in kept for at in range(start, end)] + [*range(prompt, len(known))]
        self._last: int = positions.pop()
        self._positions: list[int] = positions
        if not length <= self.total > 0:
            raise ValueError("A row is fed a token behind another.")
        self.row, self.done, self.cached, self.waited = row, length, length, 0
        self._network, self._cache, self._known, self._scene = network, cache, known, scene

    @property
    def total(self) -> int:
        """Tokens in the row's cache when it is through."""
        return len(self._positions)

    @property
    def remaining(self) -> int:
        """Tokens to compute."""
        return self.total - self.done

    @property
    def start(self) -> int:
        """Where the first token is that is kept, and not there."""
        return self._positions[self.done] if self.remaining else self._last

    @property
    def phase(self) -> Phase:
        return "prefill"

    @property
    def begun(self) -> bool:
        return True

    def news(self) -> list[Outcome]:
        """What came of it."""
        return [Prefilled(self.row.id, self.done, self.total, self.cached)]

    def look(self) -> None:
        """Nothing is found later on: what of a prefix can be used was given."""

    def skip(self) -> None:
        """So nothing is skipped."""

    def advance(self, tokens: int) -> int:
        """Blocks until they are computed; says how many they were. Raises `Misplaced`."""
        positions = self._positions[self.done : self._end(self.done + tokens)]
        if positions:
            with _placed(positions, self.done):
                self._compute(positions)
            slots.settle(self._cache)
            self.done += len(positions)
        return len(positions)

    def _end(self, end: int) -> int:
        """Not inside of an image that must be computed at once."""
        if self._scene is None or not self.done < end < self.total:
            return end
        return bisect_left(self._positions, self._scene.end(self._positions[self.done], self._positions[end]))

    def _compute(self, positions: list[int]) -> None:
        if self._scene:  # where it has positions of its own, nobody asks MLX's rope
            self._scene.read(self._cache, positions)
        else:
            self._network(mx.array([[self._known[at] for at in positions]]), cache=self._cache)

    def finish(self) -> tuple[list[Any], Drawn, int]:
        """The row's cache, what it is fed next, and at which position. The prefill is spent."""
        position = self._last + (self._scene.rope_delta if self._scene else 0)
        return self._cache, Drawn(mx.array([self._known[self._last]]), mx.array([True]), {}), position


def front(kept: Ranges) -> int:
    """How many tokens there are before the first that is left out: so many of a prefix can be used."""
    end = 0
    for start, after in kept:
        if start > end:
            break
        end = after
    return end


def window_of(cache: Sequence[Any]) -> int:
    """How many tokens the layers that forget look back; 0 where none forgets."""
    return max((layer.max_size for layer in layers(cache) if isinstance(layer, RotatingKVCache)), default=0)


def _check(kept: Ranges, prompt: int, window: int) -> None:
    edges = [edge for span in kept for edge in span]
    if not edges or edges[0] < 0 or edges != sorted(edges) or any(start == end for start, end in kept):
        raise ValueError("Ranges of tokens come in order, and have some.")
    if edges[-1] != prompt:
        raise ValueError(f"The last token of a prompt is kept: the last range ends at {prompt}, not at {edges[-1]}.")
    # A window counts what is kept, so it holds what it would have held only where nothing was left out.
    first = max(0, prompt - window)
    if sum(max(0, end - max(start, first)) for start, end in kept) < prompt - first:
        raise ValueError(f"Some layers look back {window} tokens, so the last {window} of a prompt are kept.")


@contextmanager
def _placed(positions: list[int], first: int) -> Iterator[None]:
    """Whoever asks MLX's rope for the positions of tokens from number `first` on, gets these. Process-wide, so for the
    building of a single forward; its graph keeps what it was given."""
    rope, at = mx.fast.rope, mx.array(positions)

    def placed(a: mx.array, dims: int, *, offset: Any, **how: Any) -> mx.array:
        if int(offset) != first or a.shape[0] != 1 or a.shape[-2] != len(positions):
            raise Misplaced(f"{a.shape} at {offset} are not the {len(positions)} tokens of a row from {first} on")
        # Rope takes a position for each row: each token is one.
        return rope(a.swapaxes(0, -2), dims, offset=at, **how).swapaxes(0, -2)

    mx.fast.rope = placed
    try:
        yield
    finally:
        mx.fast.rope = rope


def why_not_sparse(network: nn.Module, context: int) -> str | None:
    """Why prompts of this model, of up to `context` tokens, are always computed whole; None where they need not be. Of
    models whose rows can share a batch.

    Computes a few tokens, so it takes the weights in. Not while another thread computes."""
    cache = make_prompt_cache(network)
    try:
        with _placed([*range(_TRIAL)], 0):
            network(mx.zeros((1, _TRIAL), mx.int32), cache=cache)
        # Some models heed positions beyond a certain one only. The nearest come first, for tables of them end.
        here, *elsewhere = (_hiding(network, cache, position) for position in (_TRIAL, _TRIAL + 1, context - 1))
    except Misplaced as error:
        return f"This model turns its tokens by positions of its own: {error}."
    if all(mx.array_equal(here, there, equal_nan=True) for there in elsewhere):
        return None
    return "This model uses the positions of its tokens not in MLX's rope alone, but in a table or a scale as well."


def _hiding(network: nn.Module, cache: list[Any], position: int) -> mx.array:
    """Lazy: the logits of a row's next token, at a position that is hidden from rope. Whatever still depends on it has
    asked for it elsewhere."""
    batch = slots.batch_of(copy.deepcopy(cache), position)
    with _placed([_TRIAL], position):
        logits: mx.array = network(mx.zeros((1, 1), mx.int32), cache=batch)
    return logits
