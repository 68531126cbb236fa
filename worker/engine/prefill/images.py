"""The stage of a prompt in which its images go through the vision encoder."""

from worker.engine.prefill.stage import Ended, Phase, Progress, Stage
from worker.engine.vision.encoder import Encode, EncoderRun
from worker.engine.vision.inputs import MultimodalInputs
from worker.schedule.memory import ImageDemand
from worker.schedule.outcomes import Encoded
from worker.schedule.request import PromptImage


class EncodeImages(Stage):
    """Encodes the images whose features are not cached, one at a time. Images inside the cached prefix of the prompt
    are not encoded; if a part of that prefix is evicted, the stage may be needed again."""

    phase: Phase = Encoded.phase
    exclusive = True  # an encoder's activations take memory
    before_prefix = True
    takes_chunk = False

    def __init__(self, id: str, inputs: MultimodalInputs, encode: Encode) -> None:
        """`id`: of the request. `inputs`: receives the features; shared with the stage that computes the prompt.
        `encode`: see `Family.encode`."""
        self._id = id
        self._inputs = inputs
        self._encode = encode
        self._missing = inputs.missing(0)  # images to encode, as of the last refresh
        self._encoder_run: EncoderRun | None = None

    @property
    def total(self) -> int:
        """Tokens of all images; an image that occurs twice counts once."""
        return self._inputs.tokens

    @property
    def remaining(self) -> int:
        """Image tokens left to encode."""
        return sum(self._tokens_left(image) for image in self._missing)

    @property
    def report(self) -> Encoded:
        """The progress of the encoding."""
        return Encoded(self._id, self.done, self.total)

    @property
    def needed(self) -> bool:
        """True while features of images are missing."""
        return bool(self._missing)

    @property
    def started(self) -> bool:
        """True if an image is partly encoded."""
        return self._encoder_run is not None

    @property
    def images(self) -> ImageDemand:
        """The images that the prompt has still to be computed with."""
        return ImageDemand(
            largest=max((image.tokens for image in self._missing), default=0),
            total=self._inputs.tokens,
            longest=self._inputs.longest,
        )

    def refresh(self, start: int) -> None:
        """Encode only images that end after index `start` and whose features are not available yet: another prompt may
        have encoded some of them."""
        self._missing = self._inputs.missing(start)

    def advance(self, tokens: int) -> Progress | Ended:
        """Encode about `tokens` tokens, at least one layer of one image. Blocks."""
        computed = 0
        while self._missing:
            computed += self._encode_first(tokens - computed)
            if self._encoder_run or computed >= tokens:
                break
        return Progress(computed) if self.needed else Ended(computed)

    def _tokens_left(self, image: PromptImage) -> int:
        run = self._encoder_run
        return run.remaining if run and run.image.digest == image.digest else image.tokens

    def _encode_first(self, tokens: int) -> int:
        """Encode the first missing image by about `tokens` tokens. Returns the number computed."""
        image = self._missing[0]
        if self._encoder_run is None or self._encoder_run.image.digest != image.digest:
            self._encoder_run = EncoderRun(image, self._encode)
        computed = self._encoder_run.advance(tokens)
        if features := self._encoder_run.features:
            self._inputs.add_features(image, features)
            self._missing.pop(0)
            self._encoder_run = None
        return computed
