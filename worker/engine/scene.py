"""A prompt's images, and how its tokens are computed with what the model sees of them in their places."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import mlx.core as mx

from worker.engine.encoding import FeatureCache, Features
from worker.schedule.sequence import Picture
from worker.schedule.sequence import Sequence as Asked

Seen = Sequence[tuple[tuple[int, int], Features]]  # which of some tokens are an image's, and its features


class Family(Protocol):
    @property
    def placeholder(self) -> int:
        """The token that stands where an image is."""

    @property
    def whole(self) -> bool:
        """An image's tokens see one another, so they are computed at once."""

    def encode(self, seen: Any, passed: list[mx.array]) -> Features:
        """Lazily. `passed` gets what each layer of the vision tower puts out, in order."""

    def positions(self, tokens: int, pictures: Sequence[Picture]) -> tuple[mx.array | None, int]:
        """(axes, 1, tokens), or None where a token's position is its place; and how far the next token's is from it."""

    def embeddings(self, tokens: mx.array) -> mx.array:
        """(1, tokens, width)"""

    def read(self, cache: list[Any], tokens: mx.array, rows: mx.array, positions: mx.array | None, seen: Seen) -> None:
        """Lazily: these rows are in the cache, upstream's of one, behind what is there."""


class Scene:
    """Of one prompt, alone in its cache. Tokens are counted from the prompt's first."""

    def __init__(self, family: Family, sequence: Asked, found: FeatureCache) -> None:
        """Raises ValueError where the images are not where the prompt has room for them."""
        _check(sequence, family.placeholder)
        self._family, self._pictures, self._found = family, sequence.pictures, found
        self._tokens, self._space = sequence.known, sequence.space
        self._positions, self.rope_delta = family.positions(len(self._tokens), self._pictures)
        self._features: dict[bytes, Features] = {}

    @property
    def tokens(self) -> int:
        """That images stand for; an image that is there twice counts once."""
        return sum({picture.digest: picture.tokens for picture in self._pictures}.values())

    @property
    def longest(self) -> int:
        """Tokens that one of them stands for."""
        return max(picture.tokens for picture in self._pictures)

    def missing(self, start: int) -> list[Picture]:
        """Images without whose features the tokens from there on cannot be computed, each once."""
        wanted = {picture.digest: picture for picture in self._pictures if picture.span[1] > start}
        self._features = {digest: features for digest, features in self._features.items() if digest in wanted}
        for digest in wanted.keys() - self._features.keys():
            if features := self._found.find(self._space, digest):
                self._features[digest] = features
        return [picture for digest, picture in wanted.items() if digest not in self._features]

    def end(self, start: int, end: int) -> int:
        """Where to stop that begins at `start` and would stop at `end`: before an image that must be computed at once,
        or behind it where there is nothing else to compute."""
        if self._family.whole:
            for first, last in (picture.span for picture in self._pictures):
                if first < end < last:
                    return first if start < first else last
        return end

    def show(self, picture: Picture, features: Features) -> None:
        self._features[picture.digest] = features
        self._found.keep(self._space, picture.digest, features)

    def read(self, cache: list[Any], places: Sequence[int]) -> None:
        """Lazily: the tokens there, in order, are in the cache then, behind what is in it. Where some before them are
        left out, a family without positions of its own has to be told them: see `SparsePrefill`."""
        tokens = mx.array([[self._tokens[place] for place in places]])
        rows, seen = self._family.embeddings(tokens), [*self._seen(places)]
        for (first, last), features in seen:
            shows = (tokens[0, first:last] == self._family.placeholder)[:, None]
            rows[0, first:last] = mx.where(shows, features.rows, rows[0, first:last])
        positions = None if self._positions is None else self._positions[:, :, mx.array([*places])]
        self._family.read(cache, tokens, rows, positions, seen)

    def _seen(self, places: Sequence[int]) -> Iterator[tuple[tuple[int, int], Features]]:
        """Which of these tokens are images', counted from the first, and their features."""
        for picture in self._pictures:
            first, last = (bisect_left(places, edge) for edge in picture.span)
            if first < last:
                yield (first, last), self._part(picture, places[first:last])

    def _part(self, picture: Picture, places: Sequence[int]) -> Features:
        features, within = self._features[picture.digest], mx.array([*places]) - picture.span[0]
        rows, *deepstack = (array[within] for array in features.arrays)
        return Features(rows, tuple(deepstack))


def _check(sequence: Asked, placeholder: int) -> None:
    edges = [edge for picture in sequence.pictures for edge in picture.span]
    if edges != sorted(edges) or edges[-1] >= len(sequence.known):
        raise ValueError("Images come in the order of the prompt, and a token is behind them.")
    if any(placeholder not in sequence.prompt[slice(*picture.span)] for picture in sequence.pictures):
        raise ValueError("An image is where the prompt has no room for one.")
