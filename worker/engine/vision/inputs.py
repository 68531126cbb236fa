"""A prompt's images, and the computation of its tokens with image features in place of embeddings."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from worker.engine.vision.feature_cache import FeatureCache, Features
from worker.request import GenerationRequest, PromptImage

# Images among some tokens: the span of each as (start, end), counted from the first of these tokens, and its features.
ImageSpans = Sequence[tuple[tuple[int, int], Features]]


class Family(Protocol):
    """The parts of a vision model that differ between families."""

    @property
    def placeholder(self) -> int:
        """The token that stands for a part of an image."""

    @property
    def bidirectional_images(self) -> bool:
        """True if an image's tokens attend to each other, so that each image must be computed in one forward."""

    def encode(self, pixel_inputs: Any, layer_outputs: list[mx.array]) -> Features:
        """Build the features of an image from `PromptImage.pixel_inputs`. Lazy. Appends the output of each encoder
        layer to `layer_outputs`, in order."""

    def positions(self, tokens: int, images: Sequence[PromptImage]) -> tuple[mx.array | None, int]:
        """Return positions (axes, 1, tokens), or None if they equal the token indices; and the rope delta: the position
        of the next token minus its index."""

    def embeddings(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens (1, tokens), as (1, tokens, hidden_size). Lazy."""

    def read(
        self, cache: list[Any], tokens: mx.array, embeddings: mx.array, positions: mx.array | None, images: ImageSpans
    ) -> None:
        """Append tokens (1, tokens) to `cache`, mlx-lm's cache of one row. Lazy. `embeddings`: (1, tokens,
        hidden_size), with the features of images in place of their placeholders' embeddings. `positions`: (axes, 1,
        tokens), or None if they are those of the cache. `images`: the images among these tokens."""


class MultimodalInputs:
    """The inputs of one prompt with images. Tokens are counted from the first of the prompt."""

    def __init__(self, family: Family, request: GenerationRequest, feature_cache: FeatureCache) -> None:
        """`feature_cache` stays owned by the caller. Raises ValueError if the images do not match the
        placeholders of the prompt, or if no token follows them."""
        _check(request, family.placeholder)
        self._family = family
        self._images = request.images
        self._feature_cache = feature_cache
        self._tokens, self._namespace = request.tokens, request.namespace
        self._positions, self.rope_delta = family.positions(len(self._tokens), self._images)
        self._features: dict[bytes, Features] = {}

    @property
    def tokens(self) -> int:
        """Tokens of all images; an image that occurs twice counts once."""
        return sum({image.digest: image.tokens for image in self._images}.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest image."""
        return max(image.tokens for image in self._images)

    @property
    def last_end(self) -> int:
        """Index of the first token after the last image."""
        return self._images[-1].span[1]

    def uncached(self) -> list[PromptImage]:
        """Return the images, each once, whose features are not in the cache."""
        images = {image.digest: image for image in self._images}
        return [image for digest, image in images.items() if not self._feature_cache.has(self._namespace, digest)]

    def missing(self, start: int) -> list[PromptImage]:
        """Return the images, each once, whose features are needed to compute the tokens from index `start` on and are
        not available. Takes features from the cache, and releases those no longer needed."""
        wanted = {image.digest: image for image in self._images if image.span[1] > start}
        self._features = {digest: features for digest, features in self._features.items() if digest in wanted}
        for digest in wanted.keys() - self._features.keys():
            if features := self._feature_cache.use(self._namespace, digest):
                self._features[digest] = features
        return [image for digest, image in wanted.items() if digest not in self._features]

    def end(self, start: int, end: int) -> int:
        """Return where a forward from `start` should end instead of `end`: before an image that must be computed in one
        piece, or after it if the forward starts with or inside that image."""
        if self._family.bidirectional_images:
            for first, last in (image.span for image in self._images):
                if first < end < last:
                    return first if start < first else last
        return end

    def add_features(self, image: PromptImage, features: Features) -> None:
        """Hold the features of an image until its tokens are computed, and add them to the feature cache."""
        self._features[image.digest] = features
        self._feature_cache.put(self._namespace, image.digest, features)

    def read(self, cache: list[Any], indices: Sequence[int]) -> None:
        """Append the tokens at these indices, in order, to the cache. Lazy. If earlier tokens are dropped, a family
        without its own positions must receive them by other means: see `ComputeSpans`."""
        tokens = mx.array([[self._tokens[index] for index in indices]])
        embeddings, images = self._family.embeddings(tokens), [*self._spans_among(indices)]
        for (first, last), features in images:
            is_placeholder = (tokens[0, first:last] == self._family.placeholder)[:, None]
            embeddings[0, first:last] = mx.where(is_placeholder, features.rows, embeddings[0, first:last])
        positions = None if self._positions is None else self._positions[:, :, mx.array([*indices])]
        self._family.read(cache, tokens, embeddings, positions, images)

    def _spans_among(self, indices: Sequence[int]) -> Iterator[tuple[tuple[int, int], Features]]:
        """Yield the span of each image among these tokens, counted from the first of them, with its features."""
        for image in self._images:
            first, last = (bisect_left(indices, edge) for edge in image.span)
            if first < last:
                yield (first, last), self._part(image, indices[first:last])

    def _part(self, image: PromptImage, indices: Sequence[int]) -> Features:
        features, within = self._features[image.digest], mx.array([*indices]) - image.span[0]
        rows, *deepstack = (array[within] for array in features.arrays)
        return Features(rows, tuple(deepstack))


def _check(request: GenerationRequest, placeholder: int) -> None:
    edges = [edge for image in request.images for edge in image.span]
    if edges != sorted(edges) or edges[-1] >= len(request.tokens):
        raise ValueError("images: they must be in the order of the prompt, and a token must follow the last.")
    if any(placeholder not in request.prompt[slice(*image.span)] for image in request.images):
        raise ValueError("images: the prompt has no placeholder for one of them.")
