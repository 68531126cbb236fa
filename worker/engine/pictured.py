"""Prefill of a prompt with images: its images go through the vision encoder, then the prompt is computed as any other.

The class has the interface of `Prefill`. Images inside the cached prefix of the prompt are not encoded."""

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
    """Encodes the images that are not cached, one at a time, then delegates to a text prefill."""

    def __init__(self, prefill: OfTokens, scene: Scene, encode: Encode) -> None:
        """`prefill`: computes the prompt once the images are encoded; it shares `scene`. `encode`: see
        `Family.encode`."""
        self.row, self.waited = prefill.row, 0
        self._prefill, self._scene, self._encode = prefill, scene, encode
        self._encoding: Encoding | None = None
        self._told: list[Outcome] = []

    @property
    def phase(self) -> Phase:
        """ "encoding" while features of images are missing, then the phase of the text prefill."""
        return "encoding" if self._missing() else self._prefill.phase

    @property
    def begun(self) -> bool:
        """True if an image is partly encoded or, after the images, if the text prefill has started."""
        return self._encoding is not None if self._missing() else self._prefill.begun

    @property
    def total(self) -> int:
        """Image tokens while images are encoded, else those of the text prefill. The other counts follow the same
        phase."""
        return self._scene.tokens if self._missing() else self._prefill.total

    @property
    def done(self) -> int:
        """Tokens of this phase that are computed or cached."""
        return self.total - self.remaining

    @property
    def remaining(self) -> int:
        """Tokens left to compute in this phase."""
        if not (missing := self._missing()):
            return self._prefill.remaining
        return sum(self._left(picture) for picture in missing)

    @property
    def images(self) -> Images:
        """The images that the prompt has still to be computed with."""
        largest = max((picture.tokens for picture in self._missing()), default=0)
        return Images(largest, self._scene.tokens, self._scene.longest)

    @property
    def cached(self) -> int:
        """Tokens taken from the prefix cache."""
        return self._prefill.cached

    def look(self) -> None:
        """Find the longest cached prefix, as `Prefill.match_prefix` does."""
        self._prefill.look()

    def skip(self) -> None:
        """Load the prefix found, unless images are still to be encoded. Blocks."""
        if not self._missing():  # before that, the loaded prefix would only occupy memory
            self._prefill.skip()

    def advance(self, tokens: int) -> int:
        """Encode or compute about `tokens` tokens. Blocks. Returns the number computed."""
        if not (missing := self._missing()):
            return self._prefill.advance(tokens)
        before, total = self.done, self.total
        computed = self._see(missing, tokens)
        self._told = [Encoded(self.row.id, before + computed, total)]
        return computed

    def news(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        told, self._told = self._told, []
        return told or self._prefill.news()

    def finish(self) -> tuple[list[Any], Drawn, int | None]:
        """Return the row's cache, its next input, and its position, as `Prefill.finish` does."""
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
