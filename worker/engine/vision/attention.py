"""Bidirectional attention within images, in a network whose attention is otherwise causal."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def bidirectional(cache: Sequence[Any], tokens: int, spans: Sequence[tuple[int, int]]) -> list[Any]:
    """Wrap cache layers for one forward of `tokens` tokens, so that the tokens of each image attend to each other.
    `spans`: the images as (start, end), counted from the forward's first token. The layers themselves are shared, not
    copied."""
    if all(last - first == 1 for first, last in spans):
        return list(cache)
    together = mx.zeros((tokens, tokens), mx.bool_)
    for first, last in spans:
        together[first:last, first:last] = True
    return [_Bidirectional(layer, together) for layer in cache]


class _Bidirectional:
    """The part of a cache layer that mlx-lm's attention uses, with another mask."""

    def __init__(self, layer: Any, together: mx.array) -> None:
        self._layer, self._together = layer, together

    @property
    def offset(self) -> Any:
        return self._layer.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = self._layer.update_and_fetch(keys, values)
        return fetched

    def make_mask(self, tokens: int, **how: Any) -> mx.array:
        causal: mx.array = self._layer.make_mask(tokens, **{**how, "return_array": True})
        before = causal.shape[-1] - tokens
        return causal | mx.pad(self._together, [(0, 0), (before, 0)])
