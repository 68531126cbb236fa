"""A prompt's images, and the computation of its tokens with image features in place of embeddings."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from worker.engine.vision.encoder import FeatureCache, Features
from worker.schedule.request import GenerationRequest as Asked
from worker.schedule.request import PromptImage

PixelInputs = Sequence[tuple[tuple[int, int], Features]]  # spans of images among some tokens, with their features


class Family(Protocol):
    """The parts of a vision model that differ between families."""

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of an image."""

    @property
    def bidirectional_images(self) -> bool:
        """True if an image's tokens attend to each other, so that each image must be computed in one forward."""

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        """Build the features of an image. Lazy. Appends the output of each encoder layer to `passed`, in order."""

    def positions(self, tokens: int, pictures: Sequence[PromptImage]) -> tuple[mx.array | None, int]:
        """Return positions (axes, 1, tokens), or None if they equal the token indices; and the rope delta: the position
        of the next token minus its index."""

    def embeddings(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens (1, tokens), as (1, tokens, hidden_size). Lazy."""

    def read(
        self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, seen: PixelInputs
    ) -> None:
        """Append the embeddings `rows` to the cache, mlx-lm's cache of one row. Lazy."""


class MultimodalInputs:
    """The inputs of one prompt with images. Tokens are counted from the first of the prompt."""

    def __init__(self, family: Family, sequence: Asked, found: FeatureCache) -> None:
        """`found`: the feature cache, owned by the caller. Raises ValueError if the images do not match the
        placeholders of the prompt, or if no token follows them."""
        _check(sequence, family.placeholder)
        self._family, self._pictures, self._found = family, sequence.images, found
        self._tokens, self._space = sequence.tokens, sequence.namespace
        self._positions, self.rope_delta = family.positions(len(self._tokens), self._pictures)
        self._features: dict[bytes, Features] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all images; an image that occurs twice counts once."""
        return sum({picture.digest: picture.tokens for picture in self._pictures}.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest image."""
        return max(picture.tokens for picture in self._pictures)

    def missing(self, start: int) -> list[PromptImage]:
        """Return the images, each once, whose features are needed to compute the tokens from index `start` on and are
        not available. Takes features from the cache, and releases those no longer needed."""
        wanted = {picture.digest: picture for picture in self._pictures if picture.span[1] > start}
        self._features = {digest: features for digest, features in self._features.items() if digest in wanted}
        for digest in wanted.keys() - self._features.keys():
            if features := self._found.get(self._space, digest):
                self._features[digest] = features
        return [picture for digest, picture in wanted.items() if digest not in self._features]

    def end(self, start: int, end: int) -> int:
        """Return where a forward from `start` should end instead of `end`: before an image that must be computed in one
        piece, or after it if the forward starts with or inside that image."""
        if self._family.bidirectional_images:
            for first, last in (picture.span for picture in self._pictures):
                if first < end < last:
                    return first if start < first else last
        return end

    def add_features(self, picture: PromptImage, features: Features) -> None:
        """Hold the features of an image until its tokens are computed, and add them to the feature cache."""
        self._features[picture.digest] = features
        self._found.put(self._space, picture.digest, features)

    def read(self, cache: list[Any], places: Sequence[int]) -> None:
        """Append the tokens at these indices, in order, to the cache. Lazy. If earlier tokens are dropped, a family
        without its own positions must receive them by other means: see `SparsePrefill`."""
        tokens = mx.array([[self._tokens[place] for place in places]])
        rows, seen = self._family.embeddings(tokens), [*self._seen(places)]
        for (first, last), features in seen:
            shows = (tokens[0, first:last] == self._family.placeholder)[:, None]
            rows[0, first:last] = mx.where(shows, features.rows, rows[0, first:last])
        positions = None if self._positions is None else self._positions[:, :, mx.array([*places])]
        self._family.read(cache, tokens, rows, positions, seen)

    def _seen(self, places: Sequence[int]) -> Iterator[tuple[tuple[int, int], Features]]:
        """Yield the span of each image among these tokens, counted from the first of them, with its features."""
        for picture in self._pictures:
            first, last = (bisect_left(places, edge) for edge in picture.span)
            if first < last:
                yield (first, last), self._part(picture, places[first:last])

    def _part(self, picture: PromptImage, places: Sequence[int]) -> Features:
        features, within = self._features[picture.digest], mx.array([*places]) - picture.span[0]
        rows, *deepstack = (array[within] for array in features.arrays)
        return Features(rows, tuple(deepstack))


def _check(sequence: Asked, placeholder: int) -> None:
    edges = [edge for picture in sequence.images for edge in picture.span]
    if edges != sorted(edges) or edges[-1] >= len(sequence.tokens):
        raise ValueError("images: they must be in the order of the prompt, and a token must follow the last.")
    if any(placeholder not in sequence.prompt[slice(*picture.span)] for picture in sequence.images):
        raise ValueError("images: the prompt has no placeholder for one of them.")
