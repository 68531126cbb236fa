"""Stages of a prompt that load: a part of it from disk into the prefix cache, and the features of its images."""

import time

from worker.engine.memory import ImageDemand
from worker.engine.prefill.stage import Phase, Stage, StageProgress
from worker.engine.prefix.cache import PrefixCache, StartedLoad
from worker.engine.vision.feature_cache import Encode, EncoderRun, StoredFeatures, restored
from worker.engine.vision.inputs import MultimodalInputs
from worker.outcomes import PromptProgress
from worker.prefix_store.policy import LoadLimit
from worker.prefix_store.reader import ChainReading
from worker.request import GenerationRequest, PromptImage


class Load(Stage):
    """Waits for another thread to read the prefix, and inserts it into the prefix cache, from which the prompt is then
    loaded like any other. If it does not fit there, it is loaded into the row's own cache. Not needed if the disk holds
    no more than memory, or if computing is expected to be faster. Given up if it takes longer than that."""

    phase: Phase = "loading"
    before_prefix = True
    takes_chunk = False

    def __init__(
        self, request: GenerationRequest, tokens: int, prefix: PrefixCache, limit_of: LoadLimit, row_bytes: int
    ) -> None:
        """`tokens`: number of first tokens that may be loaded. `row_bytes`: bytes that are reserved for the row's
        cache."""
        self._id = request.id
        self._namespace = request.namespace
        self._key = request.cache_key(request.tokens[:tokens])
        self._prefix = prefix
        self._limit_of = limit_of
        self._row_bytes = row_bytes
        self._decided = False
        self._reported = False
        self._load: StartedLoad | None = None
        self._began_s = 0.0
        self._start = 0

    @property
    def total(self) -> int:
        """Tokens of the prefix in memory after the stage."""
        return len(self._load.reading.chain.tokens) if self._load else self._start

    @property
    def remaining(self) -> int:
        """Tokens left to load."""
        return self.total - self._start

    @property
    def report(self) -> PromptProgress:
        """The progress of the loading."""
        return PromptProgress("loading", self._id, self.done, self.total)

    @property
    def needed(self) -> bool:
        """True while the prefix is read."""
        return self._load is not None

    @property
    def ready(self) -> bool:
        """True if the prefix has been read or takes too long, and once before, to report that it is read."""
        return not self._reported or self._load is None or self._load.reading.done or self._is_late(self._load)

    def _is_late(self, load: StartedLoad) -> bool:
        return time.monotonic() - self._began_s >= load.limit_s

    @property
    def held_tokens(self) -> int:
        """Tokens that are read, which take as much memory as in a cache."""
        return self.remaining

    def refresh(self, start: int) -> None:
        """Decide once if the prefix is loaded, and start to read it. `start`: see `Stage.refresh`."""
        if self._decided:
            return
        self._decided = True
        self._start = min(start, len(self._key))
        self._began_s = time.monotonic()
        self._load = self._prefix.read(self._namespace, self._key, self._limit_of) or self._prefix.read_for_row(
            self._namespace, self._key, self._limit_of, self._row_bytes
        )

    def advance(self, tokens: int) -> StageProgress:
        """Insert what was read into the prefix cache, or give up. Blocks while the memory of a part is copied, if the
        prefix cache has divided it otherwise."""
        assert self._load is not None, "the stage has ended"
        self._reported = True
        load = self._load
        if load.reading.done:
            return self._insert(load)
        if not self._is_late(load):
            return StageProgress(0)
        assert self._prefix.disk is not None, "what was read is on disk"
        self._prefix.disk.store.reader.give_up(load.reading, time.monotonic() - self._began_s)
        self._load = None
        return StageProgress(0)

    def _insert(self, load: StartedLoad) -> StageProgress:
        if load.for_row:
            loaded = self._prefix.restore_row(load.reading, len(self._key))
            length = loaded[1] if loaded else 0
        else:
            loaded = None
            length = self._prefix.insert_read(load.reading)
        gained = max(0, length - self._start)
        self._start += gained
        self._load = None
        return StageProgress(gained, loaded=loaded if gained else None)


class LoadImages(Stage):
    """Waits for another thread to read the features of the images that are needed and on disk, all together. Not needed
    if encoding them is expected to be faster. What is not read when encoding would be done is left to `EncodeImages`.

    It begins when the prefix is loaded, and before any image is encoded. A load that has begun ends in `advance` only,
    although another prompt may have encoded the image meanwhile: a step is planned for the stage that it finds."""

    phase: Phase = "loading"
    before_prefix = True
    takes_chunk = False

    def __init__(
        self,
        request: GenerationRequest,
        inputs: MultimodalInputs,
        stored: StoredFeatures,
        limit_of: LoadLimit,
        load: Stage,
        token_bytes: int,
    ) -> None:
        """`inputs`: receives the features. `stored`: the features on disk. `load`: the stage that loads the prefix;
        images in it are not needed. `token_bytes`: of a token in the model's own cache."""
        self._request = request
        self._inputs = inputs
        self._stored = stored
        self._limit_of = limit_of
        self._load = load
        self._token_bytes = token_bytes
        self._decided = False
        self._reported = False
        self._readings: list[tuple[PromptImage, ChainReading]] = []
        self._total = 0
        self._began_s = self._limit_s = 0.0

    @property
    def total(self) -> int:
        """Tokens of the images that were chosen to be loaded."""
        return self._total

    @property
    def remaining(self) -> int:
        """Tokens of the images that are left to load."""
        return sum(image.tokens for image, _ in self._readings)

    @property
    def report(self) -> PromptProgress:
        """The progress of the loading."""
        return PromptProgress("loading", self._request.id, self.done, self.total)

    @property
    def needed(self) -> bool:
        """True while features are read."""
        return bool(self._readings)

    @property
    def ready(self) -> bool:
        """True if the features have been read or take too long, and once before, to report that they are read."""
        return not self._reported or self._waited_s >= self._limit_s or all(each.done for _, each in self._readings)

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def held_tokens(self) -> int:
        """Tokens that take as much memory as what is read."""
        return -(-sum(reading.chain.nbytes for _, reading in self._readings) // max(1, self._token_bytes))

    def refresh(self, start: int) -> None:
        """Decide once if the images that end after index `start` are loaded, and start to read them."""
        if self._decided or self._load.needed:
            return
        self._decided = True
        missing = self._inputs.missing(max(start, self._load.total))
        found = [(image, chain) for image in missing if (chain := self._stored.find(self._request.namespace, image))]
        limit_s = self._limit_of(self._stored.size_of([chain for _, chain in found])) if found else None
        if limit_s is not None:
            self._began_s, self._limit_s = time.monotonic(), limit_s
            self._readings = [(image, self._stored.store.reader.read(chain)) for image, chain in found]
            self._total = self.remaining

    def advance(self, tokens: int) -> StageProgress:
        """Take the features that were read, and give up the others if they take too long."""
        if not self._reported:
            self._reported = True
            return StageProgress(0)
        loaded, readings = 0, self._readings
        self._readings = []
        for image, reading in readings:
            if not reading.done:
                self._stored.store.reader.give_up(reading, self._waited_s)
            elif features := restored(reading):
                self._inputs.add_features(image, features)
                loaded += image.tokens
        return StageProgress(loaded)


class EncodeImages(Stage):
    """Encodes the images whose features are not cached, one at a time. Images inside the cached prefix of the prompt
    are not encoded; if a part of that prefix is evicted, the stage may be needed again."""

    phase: Phase = "encoding"
    exclusive = True  # an encoder's activations take memory
    before_prefix = True
    takes_chunk = False

    def __init__(self, id: str, inputs: MultimodalInputs, encode: Encode) -> None:
        """`id`: of the request. `inputs`: receives the features; shared with the stage that computes the prompt.
        `encode`: see `Family.encode`."""
        self._id = id
        self._inputs = inputs
        self._encode = encode
        self._missing = inputs.uncached()  # images to encode, as of the last refresh
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
    def report(self) -> PromptProgress:
        """The progress of the encoding."""
        return PromptProgress("encoding", self._id, self.done, self.total)

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

    def advance(self, tokens: int) -> StageProgress:
        """Encode about `tokens` tokens, at least one layer of one image. Blocks."""
        computed = 0
        while self._missing:
            computed += self._encode_first(tokens - computed)
            if self._encoder_run or computed >= tokens:
                break
        return StageProgress(computed)

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
