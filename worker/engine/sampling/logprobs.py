"""Log probabilities of a step's tokens, for the rows that request them."""

import math
from functools import cached_property
from typing import cast

import mlx.core as mx

from worker.engine.sampling.sampler import best_ids, normalized
from worker.outcomes import Logprobs


class StepLogprobs:
    """Log probabilities of the tokens that a forward draws and of the most probable other ones, computed with it.

    A token of probability 0 is never among the others."""

    def __init__(self, logprobs: mx.array, tokens: mx.array, alternatives: list[int]) -> None:
        """`logprobs` (rows, vocab), `tokens` (rows,): the drawn ones. `alternatives`: number of most probable tokens to
        report, by row. Lazy."""
        logprobs = normalized(logprobs)
        self._ids = tokens[:, None]
        if num_best := min(max(alternatives), logprobs.shape[-1]):
            self._ids = mx.concatenate([self._ids, best_ids(logprobs, num_best)], axis=-1)
        # Rounding may yield a probability slightly above 1.
        self._values = mx.minimum(mx.take_along_axis(logprobs, self._ids, axis=-1), 0.0)
        self._alternatives = alternatives

    @property
    def arrays(self) -> tuple[mx.array, mx.array]:
        """The lazy arrays, of a few numbers for each row."""
        return self._ids, self._values

    @cached_property
    def rows(self) -> list[Logprobs]:
        """The log probabilities of each row. Blocks until they are computed."""
        ids, values = cast("list[list[int]]", self._ids.tolist()), cast("list[list[float]]", self._values.tolist())
        return [
            Logprobs(own, tuple(pair for pair in zip(best[:n], others[:n], strict=True) if pair[1] > -math.inf))
            for (_, *best), (own, *others), n in zip(ids, values, self._alternatives, strict=True)
        ]
