"""Prefill of a prompt with images: its images go through the vision encoder, then the prompt is computed as any other.

The class has the interface of `Prefill`. Images inside the cached prefix of the prompt are not encoded."""

from typing import Any

from worker.engine.batch.decode_batch import PendingTokens
from worker.engine.prefill.base import Phase, Prefill
from worker.engine.prefill.sparse import SparsePrefill
from worker.engine.prefill.specprefill import SpecPrefill
from worker.engine.vision.encoder import Encode, EncoderRun
from worker.engine.vision.inputs import MultimodalInputs
from worker.schedule.memory import ImageDemand
from worker.schedule.outcomes import Encoded, Outcome
from worker.schedule.request import PromptImage

TextPrefill = Prefill | SparsePrefill | SpecPrefill


class ImagePrefill:
    """Encodes the images that are not cached, one at a time, then delegates to a text prefill."""

    def __init__(self, prefill: TextPrefill, inputs: MultimodalInputs, encode: Encode) -> None:
        """`prefill`: computes the prompt once the images are encoded; it shares `inputs`. `encode`: see
        `Family.encode`."""
        self.row, self.waited = prefill.row, 0
        self._prefill, self._inputs, self._encode = prefill, inputs, encode
        self._encoder_run: EncoderRun | None = None
        self._outcomes: list[Outcome] = []

    @property
    def phase(self) -> Phase:
        """ "encoding" while features of images are missing, then the phase of the text prefill."""
        return "encoding" if self._missing() else self._prefill.phase

    @property
    def started(self) -> bool:
        """True if an image is partly encoded or, after the images, if the text prefill has started."""
        return self._encoder_run is not None if self._missing() else self._prefill.started

    @property
    def total(self) -> int:
        """Image tokens while images are encoded, else those of the text prefill. The other counts follow the same
        phase."""
        return self._inputs.tokens if self._missing() else self._prefill.total

    @property
    def done(self) -> int:
        """Tokens of this phase that are computed or cached."""
        return self.total - self.remaining

    @property
    def remaining(self) -> int:
        """Tokens left to compute in this phase."""
        if not (missing := self._missing()):
            return self._prefill.remaining
        return sum(self._tokens_left(image) for image in missing)

    @property
    def images(self) -> ImageDemand:
        """The images that the prompt has still to be computed with."""
        largest = max((image.tokens for image in self._missing()), default=0)
        return ImageDemand(largest, self._inputs.tokens, self._inputs.longest)

    @property
    def cached(self) -> int:
        """Tokens taken from the prefix cache."""
        return self._prefill.cached

    def match_prefix(self) -> None:
        """Find the longest cached prefix, as `Prefill.match_prefix` does."""
        self._prefill.match_prefix()

    def apply_prefix(self) -> None:
        """Load the prefix found, unless images are still to be encoded. Blocks."""
        if not self._missing():  # before that, the loaded prefix would only occupy memory
            self._prefill.apply_prefix()

    def advance(self, tokens: int) -> int:
        """Encode or compute about `tokens` tokens. Blocks. Returns the number computed."""
        if not (missing := self._missing()):
            return self._prefill.advance(tokens)
        before, total = self.done, self.total
        computed = self._encode_images(missing, tokens)
        self._outcomes = [Encoded(self.row.id, before + computed, total)]
        return computed

    def pop_outcomes(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes or self._prefill.pop_outcomes()

    def finish(self) -> tuple[list[Any], PendingTokens, int | None]:
        """Return the row's cache, its next input, and its position, as `Prefill.finish` does."""
        return self._prefill.finish()

    def _missing(self) -> list[PromptImage]:
        return self._inputs.missing(self._prefill.start)

    def _tokens_left(self, image: PromptImage) -> int:
        started = self._encoder_run and self._encoder_run.image.digest == image.digest
        return self._encoder_run.remaining if self._encoder_run and started else image.tokens

    def _encode_images(self, missing: list[PromptImage], tokens: int) -> int:
        computed = 0
        for image in missing:
            computed += self._encode_image(image, tokens - computed)
            if self._encoder_run or computed >= tokens:
                break
        return computed

    def _encode_image(self, image: PromptImage, tokens: int) -> int:
        if self._encoder_run is None or self._encoder_run.image.digest != image.digest:
            self._encoder_run = EncoderRun(image, self._encode)
        computed = self._encoder_run.advance(tokens)
        if features := self._encoder_run.features:
            self._inputs.add_features(image, features)
            self._encoder_run = None
        return computed
