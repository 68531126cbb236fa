"""The stages of a prompt in which the features of its images are loaded from disk, or computed."""

import time
from dataclasses import dataclass

from worker.engine.prefill.stage import Ended, Phase, Progress, Stage
from worker.engine.vision.encoder import Encode, EncoderRun
from worker.engine.vision.features import StoredFeatures, restored
from worker.engine.vision.inputs import MultimodalInputs
from worker.prefix_store.reader import Reading
from worker.schedule.cache.disk import LoadLimit
from worker.schedule.memory import ImageDemand
from worker.schedule.outcomes import Encoded, Loaded
from worker.schedule.request import PromptImage


@dataclass(frozen=True, slots=True)
class _ImageLoad:
    """The features of an image, which are being read."""

    image: PromptImage
    reading: Reading
    began_s: float  # as time.monotonic()
    limit_s: float  # after which the image is encoded instead

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def ready(self) -> bool:
        """True if the features have been read or take too long."""
        return self.reading.done or self.waited_s >= self.limit_s


class LoadImages(Stage):
    """Waits for another thread to read the features of images. Images whose features are not on disk, or are expected
    to be encoded faster, are left to `EncodeImages`, and so are those whose load takes longer than that."""

    phase: Phase = Loaded.phase
    before_prefix = True
    takes_chunk = False

    def __init__(
        self, id: str, inputs: MultimodalInputs, stored: StoredFeatures, limit_of: LoadLimit, load: Stage
    ) -> None:
        """`id`: of the request. `inputs`: receives the features. `stored`: the features on disk. `load`: the stage that
        loads the prefix, in which images may be."""
        self._id = id
        self._inputs = inputs
        self._stored = stored
        self._limit_of = limit_of
        self._load = load
        self._decided = set[bytes]()  # digests of images
        self._loads: list[_ImageLoad] = []
        self._reported = False
        self._total = 0

    @property
    def total(self) -> int:
        """Tokens of the images that were chosen to be loaded."""
        return self._total

    @property
    def remaining(self) -> int:
        """Tokens of the images that are left to load."""
        return sum(load.image.tokens for load in self._loads)

    @property
    def report(self) -> Loaded:
        """The progress of the loading."""
        return Loaded(self._id, self.done, self.total)

    @property
    def needed(self) -> bool:
        """True while features are read."""
        return bool(self._loads)

    @property
    def ready(self) -> bool:
        """True if the features of an image have been read or take too long, and once before, to report that they are
        read."""
        return not self._reported or any(load.ready for load in self._loads)

    def refresh(self, start: int) -> None:
        """Decide for each image that ends after index `start` once if it is loaded, and start to read it, unless the
        prefix is still being loaded."""
        if self._load.needed:
            return
        missing = {image.digest: image for image in self._inputs.missing(start)}
        self._loads = [load for load in self._loads if load.image.digest in missing]  # others were encoded meanwhile
        undecided = [image for digest, image in missing.items() if digest not in self._decided]
        for image in undecided:
            self._decided.add(image.digest)
            if load := self._started(image):
                self._loads.append(load)
                self._total += image.tokens

    def _started(self, image: PromptImage) -> _ImageLoad | None:
        namespace = self._inputs.namespace
        if (chain := self._stored.find(namespace, image)) is None:
            return None
        limit_s = self._limit_of(self._stored.size_of(chain, image))
        return None if limit_s is None else _ImageLoad(image, self._stored.read(chain), time.monotonic(), limit_s)

    def advance(self, tokens: int) -> Progress | Ended:
        """Take the features that were read, and give up what takes too long."""
        self._reported = True
        loaded = 0
        for load in [load for load in self._loads if load.ready]:
            self._loads.remove(load)
            if not load.reading.done:
                self._stored.give_up(load.reading, load.waited_s)
            elif features := restored(load.reading):
                self._inputs.add_features(load.image, features)
                loaded += load.image.tokens
        return Progress(loaded) if self._loads else Ended(loaded)


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
