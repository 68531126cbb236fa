"""Measure the temporary memory of a prompt chunk on this device, after short and long contexts.

The profile predicts the scores of MLX's own attention only. Some models hold more for each pair of tokens:
DeepSeek-V3.2's indexer scores all tokens before it picks some, but only in a context with more tokens than it picks. So
chunks are measured after several contexts, and the growth with the context gives the cost of a pair."""

from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.cache.segments import is_sliceable
from worker.engine.memory import BUFFER_TOKENS, CHUNK, MemoryModel
from worker.engine.upstream.mlx_lm import make_prompt_cache


class _Point(NamedTuple):
    """Measured memory of one chunk."""

    context: int  # tokens before the chunk and in it
    each_bytes: float  # temporary bytes for each token of the chunk


def calibrated(costs: MemoryModel, network: nn.Module, context: int) -> MemoryModel:
    """Return the memory model with a prompt chunk's temporary bytes measured on this device. Runs forwards, so it
    blocks and loads the weights into memory. `context`: the most tokens that a row may have."""
    longest, score_bytes = _longest(costs, context), float(costs.score_bytes)
    points = [_measured(network, make_prompt_cache(network), 0, CHUNK)]  # at the start of a prompt
    if longest:
        half, whole = (_probed(network, tokens) for tokens in (longest // 2, longest))
        # A chunk after a context makes buffers grow, which copies them; no probe does that.
        score_bytes = _slope(half, whole) + sum(kind.token_bytes for kind in costs.kv_layers) / CHUNK
        points += half + whole
    token_bytes = max(each - score_bytes * tokens for tokens, each in points)
    return replace(costs, chunk_token_bytes=max(0, ceil(token_bytes)), score_bytes=ceil(score_bytes))


def _longest(costs: MemoryModel, context: int) -> int:
    """Return the tokens of a long context whose measurement takes an acceptable amount of memory; 0 if length does
    not matter or no context is short enough."""
    if all(kind.window for kind in costs.kv_layers):
        return 0
    max_bytes = max(64_000_000, costs.weights_bytes // 8)  # of a measurement
    longest = min(8192, context - 2 * CHUNK)  # tokens; DeepSeek-V3.2 and GLM pick 2,048
    tokens = max(0, longest) // BUFFER_TOKENS * BUFFER_TOKENS
    while tokens and costs.row_bytes(tokens) + costs.chunk_bytes(CHUNK, tokens) > max_bytes:
        tokens //= 2
    return tokens


def _probed(network: nn.Module, context: int) -> list[_Point]:
    """Measure two consecutive chunks: which buffers exist at once varies with the scheduling of threads."""
    chunk = 32  # tokens: precise enough, in an eighth of the time of a whole chunk
    cache = make_prompt_cache(network)
    network(mx.zeros((1, 2), mx.int32), cache=cache)
    _pad(cache, context - 2 * chunk)  # these buffers have room for both
    return [_measured(network, cache, context + at, chunk) for at in (0, chunk)]


def _measured(network: nn.Module, cache: list[Any], context: int, chunk: int) -> _Point:
    slots.materialize(cache)
    mx.reset_peak_memory()
    network(mx.zeros((1, chunk), mx.int32), cache=cache)
    slots.materialize(cache)
    return _Point(context + chunk, (mx.get_peak_memory() - mx.get_active_memory()) / chunk)


def _pad(cache: list[Any], tokens: int) -> None:
    """Append zeros for `tokens` tokens to unlimited KV caches. Windows and recurrent states keep their size."""
    for layer in layers(cache):
        if is_sliceable(layer):
            layer.update_and_fetch(*(mx.zeros((*like.shape[:2], tokens, like.shape[3]), like.dtype)
                                     for like in (layer.keys, layer.values)))  # fmt: skip


def _slope(few: list[_Point], many: list[_Point]) -> float:
    less, more = _mean(few), _mean(many)
    return max(0.0, (more.each_bytes - less.each_bytes) / (more.context - less.context))


def _mean(points: list[_Point]) -> _Point:
    contexts, each_bytes = zip(*points, strict=True)
    return _Point(sum(contexts) // len(points), sum(each_bytes) / len(points))
