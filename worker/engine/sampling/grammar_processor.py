"""Apply grammars to the logits of a batch."""

import math
from collections.abc import Mapping, Set
from typing import cast

import mlx.core as mx

from worker.request import GrammarState


class GrammarProcessor:
    """Logits processor that advances each row's grammar by the fed token and masks what it then forbids.

    A call blocks until the fed tokens are known. Meanwhile, and while the host fills the masks, the device computes the
    logits."""

    def __init__(self, grammars: Mapping[int, GrammarState], fed_drawn: Set[int]) -> None:
        """`grammars`: by the row's index in the batch. `fed_drawn`: rows of which the next fed token is new to the
        grammar; those fed later always are."""
        self._grammars = grammars
        self._fed_drawn = fed_drawn

    def __call__(self, logits: mx.array, fed: mx.array) -> mx.array:
        """Return the logits (rows, vocab) with -inf for the forbidden tokens. `fed`: (rows,)."""
        mx.async_eval(logits)
        tokens = cast("list[int]", fed.tolist())
        for index in self._fed_drawn:
            self._grammars[index].accept(tokens[index])
        self._fed_drawn = self._grammars.keys()
        masks = {index: grammar.bitmask() for index, grammar in self._grammars.items()}
        return masked(logits, {index: mask for index, mask in masks.items() if mask is not None})


def masked(logits: mx.array, masks: Mapping[int, bytes]) -> mx.array:
    """Return the logits (rows, vocab) with -inf for the tokens that these masks, by row, do not allow. May overwrite
    `logits`. Lazy."""
    if not masks:
        return logits
    allowed = _unpacked([*masks.values()], logits.shape[-1])
    if len(masks) == len(logits):
        return mx.where(allowed, logits, -math.inf)  # the masks are in the rows' order
    rows = mx.array([*masks])
    logits[rows] = mx.where(allowed, logits[rows], -math.inf)
    return logits


def _unpacked(masks: list[bytes], width: int) -> mx.array:
    """Return the masks as booleans (masks, width). Tokens beyond the end of a mask are not allowed."""
    size = -(-width // 32) * 4
    words = memoryview(b"".join(mask[:size].ljust(size, b"\0") for mask in masks)).cast("I")
    bits = mx.array(words)[:, None] & mx.array([1 << bit for bit in range(32)], dtype=mx.uint32)  # type: ignore[arg-type]
    return (bits != 0).reshape(len(masks), -1)[:, :width]
