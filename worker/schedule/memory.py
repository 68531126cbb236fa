"""What rows cost in bytes, before they are there."""

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from math import ceil

BUFFER_TOKENS = 256  # buffers grow in steps of this, as mlx-lm's do
# A prediction allows for prompt chunks of so many tokens. Longer ones are a matter of speed: see `longest_chunk`.
CHUNK = 256

MAX_ROWS = 512  # what SLUICE_MAX_ROWS can be
UNENDING = 1 << 32  # tokens; no device holds so many, unless the model keeps none


def padded_shape(rows: int, tokens: int, most: int = UNENDING) -> tuple[int, int]:
    """Return the size of a batch's buffers. A share to spare makes it rare that they grow, and are copied. No row can
    become longer than `most`, so beyond it nothing is to spare."""
    columns = max(tokens, min(tokens + tokens // 8, most))
    return rows + rows // 4, -(-columns // BUFFER_TOKENS) * BUFFER_TOKENS


def format_bytes(count: int) -> str:
    """Of so many bytes, for people: `3.1 GB`."""
    for unit, least in ("GB", 1e9), ("MB", 1e6), ("kB", 1e3):
        if count >= least:
            return f"{count / least:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"


@dataclass(frozen=True, slots=True)
class KVLayers:
    """Layers of one kind that keep each token, or the last `window` of them."""

    token_bytes: int  # all these layers together
    layer_bytes: int  # the largest one of them; both for each token
    window: int | None = None

    def cached_tokens(self, tokens: int) -> int:
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True, slots=True)
class ImageDemand:
    """Of rows, in tokens that they stand for; those of prompts that are through count for nothing but their bytes."""

    largest: int = 0  # of those that go through the vision tower, one after the other
    total: int = 0  # of all: what the language model gets of each is held until its prompt is through
    longest: int = 0  # of all: some models compute an image in one chunk
    prepared_bytes: int = 0  # of what the tower looks at: not MLX's, and held as long as the row is there

    def __add__(self, other: "ImageDemand") -> "ImageDemand":
        return ImageDemand(
            max(self.largest, other.largest),
            self.total + other.total,
            max(self.longest, other.longest),
            self.prepared_bytes + other.prepared_bytes,
        )

    def at(self, percent: int) -> "ImageDemand":
        """With so much of their pixels."""
        return ImageDemand(*(each * percent // 100 for each in astuple(self)))


NO_IMAGES = ImageDemand()


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """What images need, in bytes."""

    token_bytes: int = 0  # of the one that is in the tower, at the most, for each of its tokens
    pair_bytes: int = 0  # and for each pair of them: attention scores, where the device holds them
    feature_bytes: int = 0  # of what the language model gets, for each token
    whole: bool = False  # the language model computes an image in one chunk

    @classmethod
    def of(cls, few: tuple[int, int], many: tuple[int, int], feature_bytes: int) -> "EncoderCost":
        """`few`: the tokens of an image, and the bytes that it took; `many`: of a larger one, or of another of the same
        size where there is no other. Neither is predicted lower than it was."""
        (tokens, needed), (more, needed_more) = few, many
        each, each_of_more = needed / tokens, needed_more / more
        pair_bytes = max(0, ceil((each_of_more - each) / (more - tokens))) if more > tokens else 0
        left = each - pair_bytes * tokens, each_of_more - pair_bytes * more
        return cls(max(0, *map(ceil, left)), pair_bytes, feature_bytes)

    def bytes_for(self, images: ImageDemand) -> int:
        looking = images.largest * (self.token_bytes + self.pair_bytes * images.largest)
        return looking + self.feature_bytes * images.total


NO_ENCODER = EncoderCost()


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Of a model, in bytes. Lengths are in tokens, prompt and answer together."""

    weights_bytes: int
    kv_layers: tuple[KVLayers, ...] = ()
    state_bytes: int = 0  # a row's recurrent state, whatever its length
    chunk_token_bytes: int = 0  # activations, for each token of a chunk
    score_bytes: int = 0  # attention scores, for each pair of a chunk's token and one before it; 0 where none are kept
    draft_bytes: int = 0  # the weights of a draft model
    draft: "MemoryModel | None" = None  # its own
    encoder: EncoderCost = NO_ENCODER  # for images; its weights are among the others
    factor: float = 1.0  # of what comes beside the weights: see `Correction`

    @property
    def resident_bytes(self) -> int:
        return self.weights_bytes + self.draft_bytes

    def draft_tokens(self, tokens: int) -> int:
        """So many tokens in the model's cache take as much as these do in its draft's."""
        each = sum(kind.token_bytes for kind in self.kv_layers)
        return -(-self.draft.row_bytes(tokens) // each) if self.draft and each else 0

    def row_bytes(self, tokens: int) -> int:
        """A row alone, in mlx-lm's caches. They grow by whole steps from wherever they stand, so up to a step less
        one is to spare."""
        reach = tokens + BUFFER_TOKENS - 1
        return self.state_bytes + sum(kind.token_bytes * kind.cached_tokens(reach) for kind in self.kv_layers)

    def rectangle_bytes(self, lengths: Sequence[int]) -> int:
        """Rows that decode as one group, at their end: each has room for the longest."""
        rows, tokens = self._rectangle(lengths)
        return len(lengths) * self.state_bytes + rows * sum(
            k.token_bytes * k.cached_tokens(tokens) for k in self.kv_layers
        )

    def _rectangle(self, lengths: Sequence[int]) -> tuple[int, int]:
        longest = max(lengths, default=0)
        return padded_shape(len(lengths), longest, longest)

    def _copy_bytes(self, lengths: Sequence[int]) -> int:
        """When buffers grow, one layer after the other is there twice."""
        rows, tokens = self._rectangle(lengths)
        return rows * max((kind.layer_bytes * kind.cached_tokens(tokens) for kind in self.kv_layers), default=0)

    def chunk_bytes(self, chunk: int, tokens: int) -> int:
        """What a step's prompt chunk needs in passing, at the end of a row of so many tokens."""
        windows = sum(kind.token_bytes for kind in self.kv_layers if kind.window)  # stretched by the chunk
        return chunk * (self.chunk_token_bytes + windows + self.score_bytes * tokens)

    def beside_bytes(self, groups: Iterable[Sequence[int]], chunk: int = CHUNK, images: ImageDemand = NO_IMAGES) -> int:
        """The most that rows of these lengths, by group, need beside the weights. One of them may not have joined its
        group yet, and is there by itself, while its prompt advances or buffers grow. As MLX measures it: images as they
        are prepared are not its own. Not corrected by `factor`."""
        groups, seeing = [group for group in groups if group], self.encoder.bytes_for(images)
        if not groups:
            return seeing
        longest = max(map(max, groups))
        lasting = sum(map(self.rectangle_bytes, groups)) + self.row_bytes(longest)
        return lasting + seeing + max(self.chunk_bytes(min(chunk, longest), longest), *map(self._copy_bytes, groups))

    def peak_bytes(self, groups: Iterable[Sequence[int]], chunk: int = CHUNK, images: ImageDemand = NO_IMAGES) -> int:
        """With the model; where it computes an image in one chunk, none is promised less than the longest takes."""
        chunk = max(chunk, images.longest) if self.encoder.whole else chunk
        beside_bytes = round(self.factor * self.beside_bytes(groups, chunk, images))
        return self.resident_bytes + beside_bytes + images.prepared_bytes

    def max_tokens(self, limit: int) -> int:
        """The longest row that fits alone; 0 where none does, and a very large number where length costs nothing."""
        return bisect(range(1, UNENDING), limit, key=lambda tokens: self.peak_bytes([[tokens]]))

    def max_rows(self, tokens: int, limit: int) -> int:
        """So many rows of that length fit, in one group; `MAX_ROWS` where more would."""
        return bisect(range(1, MAX_ROWS + 1), limit, key=lambda rows: self.peak_bytes([[tokens] * rows]))

    def longest_chunk(self, groups: Sequence[Sequence[int]], limit: int, images: ImageDemand = NO_IMAGES) -> int:
        """How many tokens a prompt may advance by in one step; `CHUNK` at least, which was promised at admission."""
        fitting = bisect(range(1, 1 << 16), limit, key=lambda chunk: self.peak_bytes(groups, chunk, images))
        return max(CHUNK, fitting)


_NOISE_BYTES = 16_000_000  # a measurement below it says more about the allocator
_UP, _DOWN = 0.5, 0.05  # weights of the newest measurement: too little memory is worse than some unused
_LEAST, _MOST = 0.5, 4.0


@dataclass(frozen=True, slots=True)
class Correction:
    """How measurements compare with predictions."""

    factor: float = 1.0

    def exceeded(self, predicted: int, measured: int) -> "Correction":
        """One step took more than was predicted, before correction: the next decisions allow for as much at once."""
        if predicted < _NOISE_BYTES:
            return self
        return Correction(max(self.factor, min(_MOST, measured / predicted)))

    def observe(self, predicted: int, measured: int) -> "Correction":
        """Both beside the weights, and at their highest: `MemoryModel.beside_bytes` of what ran, and what it took."""
        if predicted < _NOISE_BYTES:
            return self
        ratio = min(_MOST, max(_LEAST, measured / predicted))
        weight = _UP if ratio > self.factor else _DOWN
        return Correction(self.factor + weight * (ratio - self.factor))
