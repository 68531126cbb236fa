"""A guide's hand on one row's logits."""

import math

import mlx.core as mx

from worker.engine.sampling import Processor
from worker.schedule.sequence import Guide


def guided(guide: Guide, prompt_tokens: int) -> Processor:
    """Tells the guide the answer's tokens as they come; those of an earlier attempt come all at once."""
    heard = prompt_tokens
    guide.rewind()  # the row may have been here before, and lost its place

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        nonlocal heard
        news: list[int] = tokens[heard:].tolist()  # type: ignore[assignment]
        for token in news:
            guide.accept(token)
        heard += len(news)
        mask = guide.allowed()
        return logits if mask is None else mx.where(_unpacked(mask, logits.shape[-1]), logits, -math.inf)

    return process


def _unpacked(mask: bytes, width: int) -> mx.array:
    """A bool for each of so many tokens. Those beyond the mask are not allowed."""
    words = memoryview(mask.ljust(-(-width // 32) * 4, b"\0")).cast("I")
    bits = (mx.array(words)[:, None] >> mx.arange(32, dtype=mx.uint32)) & 1  # type: ignore[arg-type]
    return bits.reshape(-1)[:width].astype(mx.bool_)
