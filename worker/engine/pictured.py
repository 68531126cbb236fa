"""A prompt with images: each goes through the vision tower, unless it is known, and then the prompt is as any other.

It has the face of `Prefill`. Images that lie within what the prefix cache has of the prompt are not even looked at.
"""

from typing import Any

from worker.engine.encoding import Encode, Encoding
from worker.engine.prefill import Phase, Prefill
from worker.engine.rows import Drawn
from worker.engine.scene import Scene
from worker.engine.sparse import SparsePrefill
from worker.engine.thinning import ThinnedPrefill
from worker.schedule.memory import Images
from worker.schedule.sequence import Encoded, Outcome, Picture

OfTokens = Prefill | SparsePrefill | ThinnedPrefill


class PicturedPrefill:
    def __init__(self, prefill: OfTokens, scene: Scene, encode: Encode) -> None:
        """`prefill`: what follows, with the same scene."""
        self.row, self.waited = prefill.row, 0
        self._prefill, self._scene, self._encode = prefill, scene, encode
        self._encoding: Encoding | None = None
        self._told: list[Outcome] = []

    @property
    def phase(self) -> Phase:
        return "encoding" if self._missing() else self._prefill.phase

    @property
    def begun(self) -> bool:
        return self._encoding is not None if self._missing() else self._prefill.begun

    @property
    def total(self) -> int:
        """Of the images while they are encoded, and so are the others."""
        return self._scene.tokens if self._missing() else self._prefill.total

    @property
    def done(self) -> int:
        return self.total - self.remaining

    @property
    def remaining(self) -> int:
        """Tokens to compute."""
        if not (missing := self._missing()):
            return self._prefill.remaining
        return sum(self._left(picture) for picture in missing)

    @property
    def images(self) -> Images:
        """That the prompt has still to be computed with."""
        largest = max((picture.tokens for picture in self._missing()), default=0)
        return Images(largest, self._scene.tokens, self._scene.longest)

    @property
    def cached(self) -> int:
        return self._prefill.cached

    def look(self) -> None:
        self._prefill.look()

    def skip(self) -> None:
        if not self._missing():  # until then nothing need be in memory
            self._prefill.skip()

    def advance(self, tokens: int) -> int:
        """Blocks until about so many are computed; says how many they were."""
        if not (missing := self._missing()):
            return self._prefill.advance(tokens)
        before, total = self.done, self.total
        computed = self._see(missing, tokens)
        self._told = [Encoded(self.row.id, before + computed, total)]
        return computed

    def news(self) -> list[Outcome]:
        """What came of it."""
        told, self._told = self._told, []
        return told or self._prefill.news()

    def finish(self) -> tuple[list[Any], Drawn, int | None]:
        return self._prefill.finish()

    def _missing(self) -> list[Picture]:
        return self._scene.missing(self._prefill.start)

    def _left(self, picture: Picture) -> int:
        begun = self._encoding and self._encoding.picture.digest == picture.digest
        return self._encoding.remaining if self._encoding and begun else picture.tokens

    def _see(self, missing: list[Picture], tokens: int) -> int:
        computed = 0
        for picture in missing:
            computed += self._look_at(picture, tokens - computed)
            if self._encoding or computed >= tokens:
                break
        return computed

    def _look_at(self, picture: Picture, tokens: int) -> int:
        if self._encoding is None or self._encoding.picture.digest != picture.digest:
            self._encoding = Encoding(picture, self._encode)
        computed = self._encoding.advance(tokens)
        if features := self._encoding.features:
            self._scene.show(picture, features)
            self._encoding = None
        return computed
