"""What a prompt chunk takes in passing on this device, behind short and long contexts.

Only what MLX's own attention scores is known from the model's anatomy. Others hold more for each pair of tokens:
DeepSeek-V3.2's indexer scores all tokens before it picks some, and only where there are more of them than it picks. So
a chunk is measured behind several contexts, and what grows with the context is what each pair costs.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import layers
from worker.engine.upstream import KVCache, make_prompt_cache
from worker.schedule.memory import CHUNK, Costs

_LONGEST = 8192  # tokens; DeepSeek-V3.2 and GLM pick 2,048
_WEIGHTS_SHARE = 8  # of the weights' bytes, one part may go into a measurement
_LEAST_BYTES = 64_000_000  # and so many in any case

Point = tuple[int, int]  # tokens before a chunk and in it, and the bytes that it took


def calibrated(costs: Costs, network: nn.Module, context: int) -> Costs:
    """With the needs of a prompt chunk as they are on this device. Computes some, so it takes the weights in.
    `context`: the most tokens that a row may have."""
    longest = _longest(costs, context)
    contexts = sorted({0, longest // 2, longest})
    measured = [[*_measured(network, tokens)] for tokens in contexts]
    pair_bytes = max((_slope(*two) for two in pairwise(map(_mean, measured))), default=float(costs.score_bytes))
    points = [point for each in measured for point in each]
    token_bytes = max(took / CHUNK - pair_bytes * tokens for tokens, took in points)
    return replace(costs, chunk_token_bytes=max(0, ceil(token_bytes)), score_bytes=ceil(pair_bytes))


def _longest(costs: Costs, context: int) -> int:
    """Tokens of a context that costs no more to measure than may be spent on it; of no such, none."""
    if all(kind.window for kind in costs.growing):
        return 0
    most = max(_LEAST_BYTES, costs.weights_bytes // _WEIGHTS_SHARE)
    tokens = max(0, min(_LONGEST, context - 2 * CHUNK))
    while tokens and costs.row_bytes(tokens) + costs.chunk_bytes(CHUNK, tokens) > most:
        tokens //= 2
    return tokens


def _measured(network: nn.Module, context: int) -> Iterator[Point]:
    """Of two chunks, one behind the other: which buffers are there at once depends on how threads get to them."""
    cache = make_prompt_cache(network)
    if context:
        network(mx.zeros((1, 2), mx.int32), cache=cache)
        _pad(cache, context)
    for chunk in (1, 2):
        _settle(cache)
        mx.reset_peak_memory()
        network(mx.zeros((1, CHUNK), mx.int32), cache=cache)
        _settle(cache)
        yield context + chunk * CHUNK, mx.get_peak_memory() - mx.get_active_memory()


def _pad(cache: list[Any], tokens: int) -> None:
    """As if there were so many tokens more. Windows and recurrent states are as large as ever."""
    for layer in layers(cache):
        if isinstance(layer, KVCache):
            layer.update_and_fetch(*(mx.zeros((*like.shape[:2], tokens, like.shape[3]), like.dtype)
                                     for like in (layer.keys, layer.values)))  # fmt: skip


def _settle(cache: list[Any]) -> None:
    mx.eval([layer.state for layer in layers(cache)])


def _mean(points: list[Point]) -> tuple[float, float]:
    return sum(tokens for tokens, _ in points) / len(points), sum(took for _, took in points) / len(points)


def _slope(few: tuple[float, float], many: tuple[float, float]) -> float:
    return max(0.0, (many[1] - few[1]) / (many[0] - few[0]) / CHUNK)
