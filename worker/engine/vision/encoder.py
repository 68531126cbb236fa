"""Encode an image with the vision encoder, layer by layer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.request import PromptImage


@dataclass(frozen=True, slots=True)
class Features:
    """The language model's input for one image: a row for each token of its span."""

    rows: mx.array  # (tokens, hidden_size), used instead of the tokens' embeddings
    deepstack: tuple[mx.array, ...] = ()  # the same shape; element i is added to the output of text layer i

    @property
    def tokens(self) -> int:
        """Tokens of the image's span."""
        return self.rows.shape[0]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        """All arrays, `rows` first."""
        return (self.rows, *self.deepstack)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def is_finite(self) -> bool:
        """True if all values are finite. Blocks."""
        return all(bool(mx.isfinite(array).all()) for array in self.arrays)


Encode = Callable[[Any, list[mx.array]], Features]


class EncoderRun:
    """The run of one image through the encoder. The graph is built at once and evaluated one encoder layer at a time,
    so that a large image delays other work by one layer at most."""

    def __init__(self, image: PromptImage, encode: Encode) -> None:
        """`encode`: build the lazy features from the pixel inputs, and append the output of each encoder layer to the
        list it is given."""
        self.image = image
        layer_outputs = list[mx.array]()
        self._features = encode(image.pixel_inputs, layer_outputs)
        self._pending: list[tuple[mx.array, ...]] = [*((layer,) for layer in layer_outputs), self._features.arrays]
        self._stages = len(self._pending)

    @property
    def remaining(self) -> int:
        """Tokens of the image's span left to compute; 0 only at the end."""
        return self._tokens_in(len(self._pending))

    def advance(self, tokens: int) -> int:
        """Compute about `tokens` tokens in whole layers, at least one layer. Blocks. Returns the number computed."""
        before = self.remaining
        while self._pending:
            mx.eval(self._pending.pop(0))
            if before - self._tokens_in(len(self._pending) - 1) > tokens:
                break
        return before - self.remaining

    def _tokens_in(self, stages: int) -> int:
        """Return the tokens that correspond to `stages` remaining stages, rounded up."""
        return -(-self.image.tokens * stages // self._stages)

    @property
    def features(self) -> Features | None:
        """The features, computed, or None until the encoder is done."""
        return None if self._pending else self._features
