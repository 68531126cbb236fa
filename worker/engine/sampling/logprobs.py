"""Log probabilities of a step's tokens, for the rows that request them."""

import math
from typing import cast

import mlx.core as mx

from worker.engine.sampling.sampler import normalized
from worker.schedule.outcomes import Logprobs


def logprobs_of(logprobs: mx.array, tokens: list[int], alternatives: list[int]) -> list[Logprobs]:
    """Return the log probability of each row's token and of its `alternatives[i]` most probable tokens; tokens with
    probability 0 are omitted. `logprobs`: (rows, vocab), already computed. Blocks."""
    logprobs = mx.minimum(normalized(logprobs), 0.0)  # rounding may yield a probability slightly above 1
    wanted = mx.array(tokens, dtype=mx.uint32)[:, None]
    if num_best := min(max(alternatives), logprobs.shape[-1]):
        wanted = mx.concatenate([wanted, _best(logprobs, num_best)], axis=-1)
    values = mx.take_along_axis(logprobs, wanted, axis=-1)
    mx.eval(wanted, values)
    ids, values_by_row = cast("list[list[int]]", wanted.tolist()), cast("list[list[float]]", values.tolist())
    return [
        Logprobs(own, tuple(pair for pair in zip(best[:n], others[:n], strict=True) if pair[1] > -math.inf))
        for (_, *best), (own, *others), n in zip(ids, values_by_row, alternatives, strict=True)
    ]


def _best(logprobs: mx.array, n: int) -> mx.array:
    """Return the n most probable tokens of each row (rows, n), most probable first; equal ones by ascending id.

    A partition does not define which of equal values it picks, so value and id are packed into one number. The bits of
    a negative float, read as an integer, are greater for smaller values."""
    ids = mx.arange(logprobs.shape[-1], dtype=mx.uint32)
    order = (logprobs.view(mx.uint32).astype(mx.uint64) << 32) | ids
    least = mx.partition(order, n - 1, axis=-1)[:, :n]
    return mx.sort(least, axis=-1).astype(mx.uint32)
