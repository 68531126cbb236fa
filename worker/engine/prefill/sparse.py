"""Sparse prompts: some of their tokens are dropped, and each of the others has its original position.

A cache counts its tokens, and models use that count as the position of the next one. Therefore MLX's rope is replaced
during a forward by one that receives the positions. Decoding replaces nothing, since slots store a row's position
separately from its length."""

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.engine.cache import slots
from worker.engine.upstream.hooks import UnsupportedRope, rope_at
from worker.engine.upstream.mlx_lm import make_prompt_cache

_TRIAL = 4  # tokens


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
