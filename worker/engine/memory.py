"""Memory of a model and its rows: what a step needs, and what active rows need when others are added."""

from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from itertools import starmap
from math import ceil
from operator import ge
from typing import Protocol

BUFFER_TOKENS = 256  # buffers grow in steps of this many tokens, as mlx-lm's do
# Tokens of a prompt chunk that every prediction allows for. Longer chunks are only faster: see `longest_chunk`.
CHUNK = 256

DRAWN_AT_ONCE = 1 << 21  # logits that tokens are sampled from at once
# Bytes for each logit of a forward, and for each of those that are sampled from at once: measured on a CPU, with all
# filters, penalties, grammars and logprobs, in float32 and bfloat16.
_LOGIT_BYTES, _SAMPLING_BYTES = 24, 32

MAX_ROWS = 512  # upper limit of SLUICE_MAX_ROWS
UNLIMITED_TOKENS = 1 << 32  # tokens; more than any device holds, unless the model caches none

Shape = tuple[int, int]  # of a group that is not empty: its rows, and the length of the longest at its end in tokens


def padded_shape(rows: int, tokens: int, max_tokens: int = UNLIMITED_TOKENS) -> tuple[int, int]:
    """Return the shape (rows, tokens) of a batch's buffers. The padding makes it rare that they grow, which copies
    them. No row becomes longer than `max_tokens`, so tokens are padded beyond it only to whole buffer steps."""
    columns = max(tokens, min(tokens + tokens // 8, max_tokens))
    return rows + rows // 4, -(-columns // BUFFER_TOKENS) * BUFFER_TOKENS


def format_bytes(count: int) -> str:
    """Return a readable size, such as `3.1 GB`."""
    for unit, least in ("GB", 1e9), ("MB", 1e6), ("kB", 1e3):
        if count >= least:
            return f"{count / least:.1f}".removesuffix(".0") + f" {unit}"
    return f"{count} B"


@dataclass(frozen=True, slots=True)
class KVLayers:
    """Layers of one kind that cache the keys and values of every token, or of the last `window` tokens."""

    token_bytes: int  # for each token, all these layers together
    layer_bytes: int  # for each token, the largest of these layers
    window: int | None = None  # tokens; None: all

    def cached_tokens(self, tokens: int, spare: int = 0) -> int:
        """Return the number of tokens that these layers cache for a row of `tokens`. `spare`: tokens that they hold in
        addition to the window."""
        return tokens if self.window is None else min(tokens, self.window + spare)


@dataclass(frozen=True, slots=True)
class ImageDemand:
    """Memory demand of the images of rows. Sizes are in prompt tokens. Images of finished prefills count only with
    their `prepared_bytes`."""

    largest: int = 0  # tokens of the largest image still to be encoded; images are encoded one after the other
    total: int = 0  # tokens of all images: the features of each are held until its prefill has finished
    longest: int = 0  # tokens of the longest image: some models compute an image in one chunk
    prepared_bytes: int = 0  # pixel inputs of the vision encoder: outside MLX's memory, held until the row ends

    def __add__(self, other: "ImageDemand") -> "ImageDemand":
        return ImageDemand(
            max(self.largest, other.largest),
            self.total + other.total,
            max(self.longest, other.longest),
            self.prepared_bytes + other.prepared_bytes,
        )

    def at(self, percent: int) -> "ImageDemand":
        """Return the demand if all images had `percent` of their pixels."""
        return ImageDemand(*(each * percent // 100 for each in astuple(self)))


NO_IMAGES = ImageDemand()


@dataclass(frozen=True, slots=True)
class EncoderCost:
    """Memory of the vision encoder and of its features, in bytes, and its speed."""

    token_bytes: int = 0  # at most, while an image is encoded, for each of its tokens
    pair_bytes: int = 0  # likewise for each pair of its tokens: attention scores, if the device materializes them
    feature_bytes: int = 0  # features for the language model, for each token
    single_chunk: bool = False  # the language model computes an image in one chunk
    tokens_per_s: float = 100.0  # of an image that is encoded, as measured at start

    @classmethod
    def of(cls, small: tuple[int, int], large: tuple[int, int], feature_bytes: int) -> "EncoderCost":
        """Return the cost that fits two measurements and predicts neither lower than measured. `small`: tokens of an
        image and the bytes that it took; `large`: the same for a larger image, or for one of the same size if there is
        no larger one."""
        (tokens, small_bytes), (large_tokens, large_bytes) = small, large
        each, large_each = small_bytes / tokens, large_bytes / large_tokens
        pair_bytes = max(0, ceil((large_each - each) / (large_tokens - tokens))) if large_tokens > tokens else 0
        linear = each - pair_bytes * tokens, large_each - pair_bytes * large_tokens
        return cls(max(0, *map(ceil, linear)), pair_bytes, feature_bytes)

    def bytes_for(self, images: ImageDemand) -> int:
        """Return the peak bytes of encoding the images, with the features of all of them."""
        encoding_bytes = images.largest * (self.token_bytes + self.pair_bytes * images.largest)
        return encoding_bytes + self.feature_bytes * images.total


NO_ENCODER = EncoderCost()


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Memory of a model and of its rows, in bytes. Lengths are in tokens, prompt and answer together."""

    weights_bytes: int
    kv_layers: tuple[KVLayers, ...] = ()
    state_bytes: int = 0  # recurrent state of a row, independent of its length
    state_layer_bytes: int = 0  # the largest layer's part of it
    chunk_token_bytes: int = 0  # activations, for each token of a chunk
    score_bytes: int = 0  # attention scores, for each pair of a chunk's token and one before it; 0 if not materialized
    vocab: int = 0  # logits of a token
    draft_bytes: int = 0  # the weights of draft models
    draft: "MemoryModel | None" = None  # of the draft model of SpecPrefill
    drafter: "MemoryModel | None" = None  # of the draft model whose drafts are verified, with a row for each row
    encoder: EncoderCost = NO_ENCODER  # for images; its weights are in `weights_bytes`
    max_draft: int = 0  # tokens that a forward may verify for a row beyond the first
    draft_states: int = 2  # recurrent states of a row that exist while drafts are verified
    factor: float = 1.0  # applied to all memory except weights and pixel inputs: see `Calibration`

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the layers that cache every token."""
        return sum(kind.token_bytes for kind in self.kv_layers if kind.window is None)

    @property
    def resident_bytes(self) -> int:
        """Bytes of the weights, the draft model's included."""
        return self.weights_bytes + self.draft_bytes

    def draft_tokens(self, tokens: int) -> int:
        """Return the number of tokens in the model's own cache that take as many bytes as a row of `tokens` in the
        draft's cache; 0 without a draft."""
        each = sum(kind.token_bytes for kind in self.kv_layers)
        return -(-self.draft.row_bytes(tokens) // each) if self.draft and each else 0

    def row_bytes(self, tokens: int) -> int:
        """Return the bytes of a single row in mlx-lm's caches. They grow in whole steps from any length, so up to one
        token less than a step is unused."""
        reach = tokens + BUFFER_TOKENS - 1
        return self.state_bytes + sum(kind.token_bytes * kind.cached_tokens(reach) for kind in self.kv_layers)

    def rectangle_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes of rows that decode as one group, at their end: each has room for the longest."""
        return self.group_bytes(len(lengths), max(lengths, default=0))[0]

    def group_bytes(self, rows: int, longest: int) -> tuple[int, int]:
        """Return the bytes of a group of `rows`, of which the longest has `longest` tokens at its end, and the extra
        bytes while its buffers grow: one layer at a time exists twice."""
        padded, tokens = padded_shape(rows, longest + self.max_draft, longest + self.max_draft)
        cached = [(kind, kind.cached_tokens(tokens, self.max_draft)) for kind in self.kv_layers]
        copied = padded * max((kind.layer_bytes * count for kind, count in cached), default=0)
        held = padded * sum(kind.token_bytes * count for kind, count in cached)
        held += rows * (self.state_bytes + self._draft_state_bytes)
        if self.drafter:
            drafter_bytes, drafter_copied = self.drafter.group_bytes(rows, longest)
            return held + drafter_bytes, max(copied, drafter_copied)
        return held, copied

    @property
    def _draft_state_bytes(self) -> int:
        """Bytes of a row's states beyond the first, which exist only while drafts are verified."""
        if not self.max_draft:
            return 0
        # A recurrence without a kernel holds 8 arrays of the size of a layer's state at once, measured on a CPU.
        return (self.draft_states - 1) * self.state_bytes + 8 * self.state_layer_bytes

    def slack_bytes(self, groups: Iterable[Sequence[int]], buffers: Iterable[int]) -> int:
        """Return the bytes that buffers have beyond the needs of rows of these lengths: they do not shrink at once when
        rows leave. `groups`: lengths in tokens by group; `buffers`: allocated bytes by group."""
        # Buffers hold no states of drafts: compared with the reservation for these too, they would seem to have less.
        needed = [self.rectangle_bytes(group) - len(group) * self._draft_state_bytes for group in groups]
        return sum(max(0, held - least) for held, least in zip(buffers, needed, strict=True))

    def chunk_bytes(self, chunk: int, tokens: int) -> int:
        """Return the temporary bytes of a prompt chunk of `chunk` tokens at the end of a row of `tokens`."""
        windows = sum(kind.token_bytes for kind in self.kv_layers if kind.window)  # which the chunk extends
        return chunk * (self.chunk_token_bytes + windows + self.score_bytes * tokens)

    def most_drawn(self, rows: int) -> int:
        """Return the most tokens that a step draws: one for each row, and one after each token of a draft."""
        return max(rows, min(rows * (1 + self.max_draft), CHUNK))

    def logit_bytes(self, drawn: int) -> int:
        """Return the temporary bytes of drawing this number of tokens from their logits."""
        logits = drawn * self.vocab
        return _LOGIT_BYTES * logits + _SAMPLING_BYTES * min(logits, max(self.vocab, DRAWN_AT_ONCE))

    def packed_tokens(self, rows: int, tokens: int, done: int) -> int:
        """Return the tokens of a single prompt's chunk that takes as many temporary bytes as chunks of `tokens` tokens
        of `rows` prompts in one forward. `done`: tokens that the longest of these holds. What they hold is copied into
        one array layer by layer, and their states are held twice."""
        cached_bytes = (kind.layer_bytes * (kind.cached_tokens(done) + tokens) for kind in self.kv_layers if done)
        copied = self.state_bytes + max(cached_bytes, default=0)
        return rows * (tokens + ceil(copied / max(1, self.chunk_token_bytes)))

    def working_bytes(
        self,
        groups: Iterable[Sequence[int]],
        chunk: int = CHUNK,
        images: ImageDemand = NO_IMAGES,
        drawn: int | None = None,
    ) -> int:
        """Return the peak bytes in addition to the weights, for rows of these lengths at their end, by group. Includes
        one row that has not joined its group yet and has a cache of its own, while its prompt advances or buffers grow.
        Counts MLX's memory only, so without pixel inputs. Not corrected by `factor`. `drawn`: tokens that are drawn in
        the step; None: `most_drawn`."""
        return self._working_bytes(_shapes(groups), chunk, images, drawn)

    def _working_bytes(self, shapes: Sequence[Shape], chunk: int, images: ImageDemand, drawn: int | None = None) -> int:
        if not shapes:
            return self.encoder.bytes_for(images)
        cached_bytes, copied = zip(*starmap(self.group_bytes, shapes), strict=True)
        longest, total = max(longest for _, longest in shapes), sum(map(cells, shapes))
        most = self.most_drawn(sum(rows for rows, _ in shapes)) if drawn is None else drawn
        return self.step_bytes(sum(cached_bytes), max(copied), longest, min(chunk, total), images, most)

    def step_bytes(
        self, cached_bytes: int, copied: int, longest: int, chunk: int, images: ImageDemand, drawn: int
    ) -> int:
        """Return `working_bytes` of groups whose buffers take `cached_bytes` bytes, of which growing the largest takes
        `copied` more, and whose longest row has `longest` tokens at its end. `chunk`: tokens of a prompt chunk, or of
        those of several prompts in one forward. `drawn`: tokens that are drawn."""
        # The device may begin a chunk before it has freed the logits of the last decode step.
        step = max(self.chunk_bytes(chunk, longest), copied) + self.logit_bytes(drawn)
        if self.drafter:  # it computes one prompt at a time, which then joins the others in its batch
            cached_bytes += self.drafter.row_bytes(longest)
            step = max(step, self.drafter.chunk_bytes(CHUNK, longest))
        return cached_bytes + self.row_bytes(longest) + self.encoder.bytes_for(images) + step

    def peak_bytes(self, groups: Iterable[Sequence[int]], chunk: int = CHUNK, images: ImageDemand = NO_IMAGES) -> int:
        """Return the predicted peak bytes with the weights and the pixel inputs, corrected by `factor`. If the model
        computes an image in one chunk, the chunk is at least as long as the longest image."""
        return self._peak_bytes(_shapes(groups), chunk, images)

    def _peak_bytes(self, shapes: Sequence[Shape], chunk: int = CHUNK, images: ImageDemand = NO_IMAGES) -> int:
        return self.corrected_bytes(self._working_bytes(shapes, self.chunk_with(images, chunk), images), images)

    def chunk_with(self, images: ImageDemand, chunk: int = CHUNK) -> int:
        """Return the tokens of a chunk that may contain an image: see `peak_bytes`."""
        return max(chunk, images.longest) if self.encoder.single_chunk else chunk

    def corrected_bytes(self, working_bytes: int, images: ImageDemand) -> int:
        """Return the peak bytes that `working_bytes` stand for, with the weights and the pixel inputs."""
        return self.resident_bytes + round(self.factor * working_bytes) + images.prepared_bytes

    def max_tokens(self, limit: int) -> int:
        """Return the length of the longest row that fits alone: 0 if none fits, nearly `UNLIMITED_TOKENS` if length
        costs nothing."""
        return bisect(range(1, UNLIMITED_TOKENS), limit, key=lambda tokens: self._peak_bytes([(1, tokens)]))

    def max_rows(self, tokens: int, limit: int) -> int:
        """Return the number of rows of this length that fit in one group, at most `MAX_ROWS`."""
        return bisect(range(1, MAX_ROWS + 1), limit, key=lambda rows: self._peak_bytes([(rows, tokens)]))

    def longest_chunk(self, groups: Sequence[Sequence[int]], limit: int, images: ImageDemand = NO_IMAGES) -> int:
        """Return the most tokens of a forward of one or several prompts; at least `CHUNK`, which admission has
        reserved."""
        shapes = _shapes(groups)
        fitting = bisect(range(1, 1 << 16), limit, key=lambda chunk: self._peak_bytes(shapes, chunk, images))
        return max(CHUNK, fitting)


def cells(shape: Shape) -> int:
    """Return the tokens of a group's rows, if each were as long as the longest."""
    rows, longest = shape
    return rows * longest


def _shapes(groups: Iterable[Sequence[int]]) -> list[Shape]:
    return [(len(group), max(group)) for group in groups if group]


class _Occupant(Protocol):
    """A row as `Occupancy` needs it."""

    @property
    def tokens(self) -> int:
        """Length at its end in tokens, prompt and answer together."""

    @property
    def group(self) -> int:
        """Number of the group that it decodes in, or will decode in."""

    @property
    def images(self) -> ImageDemand:
        """Images that are not yet computed."""


class Occupancy:
    """Active rows, by group. Peaks are those of `MemoryModel.peak_bytes` for the same rows.

    A peak never falls when a row is added or becomes longer, so a row that does not fit does not fit later either,
    unless rows leave.
    """

    def __init__(self, costs: MemoryModel, rows: Iterable[_Occupant] = ()) -> None:
        self._costs = costs
        self._groups = dict[int, Shape]()
        self._images = NO_IMAGES
        self._rows = 0  # number of rows
        self._longest = 0  # tokens of the longest row at its end
        self._total = 0  # tokens of all rows, if each were as long as the longest of its group
        for row in rows:
            self._count(row)
        self._bytes = {group: costs.group_bytes(*shape) for group, shape in self._groups.items()}
        self._cached_bytes = sum(cached_bytes for cached_bytes, _ in self._bytes.values())  # of all buffers
        self._copy_bytes = max((copied for _, copied in self._bytes.values()), default=0)  # while one of them grows

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._rows

    def copy(self) -> "Occupancy":
        """Return an independent copy."""
        other = Occupancy(self._costs)
        other._groups = dict(self._groups)
        other._bytes = dict(self._bytes)
        other._images = self._images
        other._rows = self._rows
        other._longest = self._longest
        other._total = self._total
        other._cached_bytes, other._copy_bytes = self._cached_bytes, self._copy_bytes
        return other

    def add(self, row: _Occupant) -> None:
        """Add an active row."""
        self._bytes[row.group], self._cached_bytes, self._copy_bytes = self._joined(row)
        self._count(row)

    def peak_with(self, row: _Occupant) -> int:
        """Return the predicted peak bytes with one more row."""
        costs, images = self._costs, self._with_images(row)
        _, cached_bytes, copied = self._joined(row)
        longest = max(self._longest, row.tokens)
        chunk = min(costs.chunk_with(images), self._total_with(row))
        drawn = costs.most_drawn(self._rows + 1)
        working_bytes = costs.step_bytes(cached_bytes, copied, longest, chunk, images, drawn)
        return costs.corrected_bytes(working_bytes, images)

    def _count(self, row: _Occupant) -> None:
        self._total = self._total_with(row)
        self._groups[row.group] = self._shape_with(row)
        self._rows += 1
        self._longest = max(self._longest, row.tokens)
        self._images = self._with_images(row)

    def _shape_with(self, row: _Occupant) -> Shape:
        rows, longest = self._groups.get(row.group, (0, 0))
        return rows + 1, max(longest, row.tokens)

    def _total_with(self, row: _Occupant) -> int:
        return self._total - cells(self._groups.get(row.group, (0, 0))) + cells(self._shape_with(row))

    def _joined(self, row: _Occupant) -> tuple[tuple[int, int], int, int]:
        """Return the bytes of the row's group with the row, of all buffers then, and of the largest copy."""
        after = self._costs.group_bytes(*self._shape_with(row))
        before, _ = self._bytes.get(row.group, (0, 0))
        return after, self._cached_bytes - before + after[0], max(self._copy_bytes, after[1])

    def _with_images(self, row: _Occupant) -> ImageDemand:
        return self._images if row.images is NO_IMAGES else self._images + row.images


@dataclass(frozen=True, slots=True)
class StepDemand:
    """Sizes from which the memory of a step is predicted, besides the saved caches of waiting rows."""

    lengths: Sequence[Sequence[int]]  # of the rows, in tokens, by group; each row in prefill is a group of its own
    buffers: Sequence[int]  # allocated bytes of the decoding groups, which come first in `lengths`
    chunk: int = 0  # tokens of the longest chunk
    images: ImageDemand = NO_IMAGES
    drawn: int = 0  # tokens that decoding rows draw

    def covers(self, other: "StepDemand") -> bool:
        """Return True if at least as much memory is predicted for this step as for the other, whatever the model: all
        groups have as many rows, and nothing is shorter or smaller."""
        return (
            [*map(len, self.lengths)] == [*map(len, other.lengths)]
            and len(self.buffers) == len(other.buffers)
            and all(map(ge, _longest(self), _longest(other)))
            and all(map(ge, self.buffers, other.buffers))
            and self.chunk >= other.chunk
            and self.drawn >= other.drawn
            and self.images == other.images
        )


@dataclass(slots=True)
class StepCounts:
    """Counts of what a step has done so far, for its report and for the comparison of its memory."""

    began: float = 0.0
    rows: int = 0  # that decoded at its beginning
    evicted: int = 0  # prefixes and images evicted before it
    preempted: int = 0  # rows
    out_of_memory: int = 0  # rows whose caches were given up, since the device had no memory
    longest_chunk: int = 0  # tokens
    images: ImageDemand = NO_IMAGES  # encoded
    queried_tokens: int = 0  # of prompts whose prefill has finished
    hit_tokens: int = 0  # of these, from the prefix cache
    # Of the rows that take memory: by group, each row in prefill being one; and bytes of the decoding groups' buffers.
    lengths: list[list[int]] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)

    def demand(self, drafted: int) -> StepDemand:
        """Return what the step is predicted to take memory for. `drafted`: tokens of a forward that verified drafts."""
        # A decoding row needs as much as one token of a chunk, and as one for each token of a draft.
        drawn = max(sum(map(len, self.lengths[: len(self.buffers)])), drafted)
        return StepDemand(self.lengths, self.buffers, max(self.longest_chunk, drawn), self.images, drawn)


def _longest(demand: StepDemand) -> Iterator[int]:
    """Return the length of the longest row of each group."""
    return (max(group, default=0) for group in demand.lengths)
