"""Prefill of a subset of a prompt's tokens, each at its original position.

A cache counts its tokens, and models use that count as the position of the next one. Therefore MLX's rope is replaced
during a forward by one that receives the positions. Decoding replaces nothing, since slots store a row's position
separately from its length."""

import copy
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.batch.decode_batch import PendingTokens
from worker.engine.batch.row import Row
from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.prefill.base import Phase
from worker.engine.upstream.hooks import UnsupportedRope, rope_at
from worker.engine.upstream.mlx_lm import RotatingKVCache, make_prompt_cache
from worker.engine.vision.inputs import MultimodalInputs
from worker.schedule.outcomes import Outcome, Prefilled
from worker.schedule.request import Range

Ranges = Sequence[Range]  # in order

_TRIAL = 4  # tokens


class SparsePrefill:
    """Computes all kept tokens but the last one, which is the row's first input when it decodes."""

    def __init__(
        self,
        network: nn.Module,
        row: Row,
        kept_ranges: Ranges,
        cache: list[Any],
        length: int,
        inputs: MultimodalInputs | None = None,
    ) -> None:
        """`kept_ranges`: ranges of the prompt; tokens after the prompt are always kept. `cache` holds the first
        `length` tokens, all of them kept, and belongs to this object from now on. How many of the kept tokens were in
        the cache does not change the answer. `inputs`: the inputs of a prompt with images.

        Raises ValueError for ranges that are unordered, miss the end of the prompt or a sliding window, or do not cover
        `length`."""
        tokens, prompt = row.request.tokens, len(row.request.prompt)
        _check_ranges(kept_ranges, prompt, window_of(cache))
        if length > dense_prefix_len(kept_ranges):
            raise ValueError(
                f"length: {length} tokens are in the cache, but only the first {dense_prefix_len(kept_ranges)} are all "
                "kept."
            )
        positions = [at for start, end in kept_ranges for at in range(start, end)] + [*range(prompt, len(tokens))]
        self._last: int = positions.pop()
        self._positions: list[int] = positions
        if not length <= self.total > 0:
            raise ValueError("kept: a row needs at least two kept tokens.")
        self.row, self.done, self.cached, self.waited = row, length, length, 0
        self._network, self._cache, self._tokens, self._inputs = network, cache, tokens, inputs

    @property
    def total(self) -> int:
        """Tokens in the row's cache when the prefill is done."""
        return len(self._positions)

    @property
    def remaining(self) -> int:
        """Tokens left to compute."""
        return self.total - self.done

    @property
    def start(self) -> int:
        """Index of the first kept token that is not computed."""
        return self._positions[self.done] if self.remaining else self._last

    @property
    def phase(self) -> Phase:
        """Phase for progress reports and budgets, always "prefill"."""
        return "prefill"

    @property
    def started(self) -> bool:
        """Always True: part of the work, the choice of tokens, is done."""
        return True

    def pop_outcomes(self) -> list[Outcome]:
        """Return the progress since the last call as outcomes."""
        return [Prefilled(self.row.id, self.done, self.total, self.cached)]

    def match_prefix(self) -> None:
        """Do nothing: the usable part of a prefix was passed to the constructor."""

    def apply_prefix(self) -> None:
        """Do nothing, as `match_prefix`."""

    def advance(self, tokens: int) -> int:
        """Compute up to `tokens` tokens, or more if an image must be computed in one piece. Blocks. Returns the number
        computed. Raises `UnsupportedRope`."""
        positions = self._positions[self.done : self._end(self.done + tokens)]
        if positions:
            with rope_at(positions, self.done):
                self._compute(positions)
            slots.materialize(self._cache)
            self.done += len(positions)
        return len(positions)

    def _end(self, end: int) -> int:
        """Return `end`, moved out of an image that must be computed in one piece."""
        if self._inputs is None or not self.done < end < self.total:
            return end
        return bisect_left(self._positions, self._inputs.end(self._positions[self.done], self._positions[end]))

    def _compute(self, positions: list[int]) -> None:
        if self._inputs:  # a family with its own positions does not call MLX's rope
            self._inputs.read(self._cache, positions)
        else:
            self._network(mx.array([[self._tokens[at] for at in positions]]), cache=self._cache)

    def finish(self) -> tuple[list[Any], PendingTokens, int]:
        """Return the row's cache, its next input, and the position of that input. The caller owns the cache; the
        prefill must not be used afterwards. Lazy."""
        position = self._last + (self._inputs.rope_delta if self._inputs else 0)
        return self._cache, PendingTokens(mx.array([self._tokens[self._last]]), mx.array([True]), {}), position


def dense_prefix_len(kept_ranges: Ranges) -> int:
    """Return the number of tokens before the first dropped one: the part of a prefix that can be reused."""
    end = 0
    for start, after in kept_ranges:
        if start > end:
            break
        end = after
    return end


def window_of(cache: Sequence[Any]) -> int:
    """Return the longest sliding window among the layers, in tokens; 0 if there is none."""
    return max((layer.max_size for layer in layers(cache) if isinstance(layer, RotatingKVCache)), default=0)


def _check_ranges(kept_ranges: Ranges, prompt: int, window: int) -> None:
    edges = [edge for span in kept_ranges for edge in span]
    if not edges or edges[0] < 0 or edges != sorted(edges) or any(start == end for start, end in kept_ranges):
        raise ValueError("kept: ranges must be in order and not empty.")
    if edges[-1] != prompt:
        raise ValueError(f"kept: the last range must end at {prompt}, the end of the prompt, not at {edges[-1]}.")
    # A window counts cached tokens, so it has its usual content only if none of these was dropped.
    first = max(0, prompt - window)
    if sum(max(0, end - max(start, first)) for start, end in kept_ranges) < prompt - first:
        raise ValueError(
            f"kept: the last {window} tokens must be kept, since some layers have a window of {window} tokens."
        )


def why_not_sparse(network: nn.Module, context: int) -> str | None:
    """Return why SpecPrefill cannot be used with this model for prompts of up to `context` tokens; None if it can. The
    model's rows must be able to share a batch.

    Computes a few tokens, so it loads the weights. Blocks. Must not run while another thread computes."""
    cache = make_prompt_cache(network)
    try:
        with rope_at([*range(_TRIAL)], 0):
            network(mx.zeros((1, _TRIAL), mx.int32), cache=cache)
        # Some models use positions only beyond a threshold. The nearest come first, since position tables are finite.
        first, *others = (_logits_at(network, cache, position) for position in (_TRIAL, _TRIAL + 1, context - 1))
    except UnsupportedRope as error:
        return f"This model rotates tokens by positions of its own: {error}."
    if all(mx.array_equal(first, other, equal_nan=True) for other in others):
        return None
    return "This model uses token positions not only in MLX's rope, but also in a table or a scale."


def _logits_at(network: nn.Module, cache: list[Any], position: int) -> mx.array:
    """Return the logits of a row's next token at a position of which only the rope replacement is informed. Lazy. If
    they differ between positions, the model uses the position elsewhere."""
    batch = slots.batch_of(copy.deepcopy(cache), position)
    with rope_at([_TRIAL], position):
        logits: mx.array = network(mx.zeros((1, 1), mx.int32), cache=batch)
    return logits
