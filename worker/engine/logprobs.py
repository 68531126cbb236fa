"""The logprobs of a step's tokens, for the rows that ask for them."""

import math
from typing import cast

import mlx.core as mx

from worker.engine.sampling import normalized
from worker.schedule.sequence import Logprobs


def logprobs_of(logprobs: mx.array, tokens: list[int], alternatives: list[int]) -> list[Logprobs]:
    """logprobs (rows, vocab), computed already. Alternatives that cannot be drawn are left out."""
    logprobs = mx.minimum(normalized(logprobs), 0.0)  # rounding may put a sure thing above
    wanted = mx.array(tokens, dtype=mx.uint32)[:, None]
    if most := min(max(alternatives), logprobs.shape[-1]):
        wanted = mx.concatenate([wanted, _best(logprobs, most)], axis=-1)
    values = mx.take_along_axis(logprobs, wanted, axis=-1)
    mx.eval(wanted, values)
    ids, theirs = cast("list[list[int]]", wanted.tolist()), cast("list[list[float]]", values.tolist())
    return [
        Logprobs(own, tuple(pair for pair in zip(best[:n], others[:n], strict=True) if pair[1] > -math.inf))
        for (_, *best), (own, *others), n in zip(ids, theirs, alternatives, strict=True)
    ]


def _best(logprobs: mx.array, n: int) -> mx.array:
    """The n most probable tokens of each row, the best first; of equal ones those with the smaller ids.

    A partition leaves it open which of equals it takes, so value and id are put into one number. The bits of a
    float below zero, read as an integer, are the greater the smaller it is.
    """
    ids = mx.arange(logprobs.shape[-1], dtype=mx.uint32)
    order = (logprobs.view(mx.uint32).astype(mx.uint64) << 32) | ids
    least = mx.partition(order, n - 1, axis=-1)[:, :n]
    return mx.sort(least, axis=-1).astype(mx.uint32)
