"""Apply a grammar to one row's logits."""

import math

import mlx.core as mx

from worker.engine.sampling.processors import Processor
from worker.schedule.request import GrammarState


def grammar_processor(grammar: GrammarState, prompt_tokens: int) -> Processor:
    """Return a logits processor that advances the grammar by the answer's tokens and masks what it forbids. Resets the
    grammar first; tokens of earlier attempts are replayed at the first call. `prompt_tokens`: tokens before the answer.
    The call blocks until the last token is known."""
    num_accepted = prompt_tokens
    grammar.reset()  # the row may be recomputed after a failure or a preemption

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal num_accepted
        new_tokens: list[int] = tokens[num_accepted:].tolist()  # type: ignore[assignment]
        for token in new_tokens:
            grammar.accept(token)
        num_accepted += len(new_tokens)
        mask = grammar.bitmask()
        return logits if mask is None else mx.where(_unpacked(mask, logits.shape[-1]), logits, -math.inf)

    return process


def _unpacked(mask: bytes, width: int) -> mx.array:
    """Return the mask as booleans (width,). Tokens beyond its end are not allowed."""
    words = memoryview(mask.ljust(-(-width // 32) * 4, b"\0")).cast("I")
    bits = (mx.array(words)[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1  # type: ignore[arg-type]
    return bits.reshape(-1)[:width].astype(mx.bool_)
