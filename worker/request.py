"""Generation request, as the worker submits it to the engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sluice.contract.keys import Lane

Range = tuple[int, int]  # of tokens: (start, end), end excluded


def tokens_in(ranges: Iterable[Range]) -> int:
    """Return the number of tokens in ranges that do not overlap."""
    return sum(end - start for start, end in ranges)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of a row. Draw k of a row depends on (seed, k) and its own logits alone."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off; counts tokens of prompt and answer
    presence_penalty: float = 0.0  # counts tokens of the answer
    frequency_penalty: float = 0.0  # counts tokens of the answer
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EmbeddingInputs:
    """The inputs of a job for an embedding model."""

    id: str
    tokens: tuple[tuple[int, ...], ...]  # of each input
    lane: Lane
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class GrammarError:
    """Reason why a grammar cannot continue."""

    reason: str
    internal: bool  # a token was accepted that is not allowed; otherwise the grammar exceeded its limits


@dataclass(frozen=True, slots=True)
class GrammarAhead:
    """What a grammar allows at one place of an answer."""

    forced: tuple[int, ...] = ()  # tokens that must come next, as far as they are known; never an end of the sequence
    mask: bytes | None = None  # as in `GrammarState.bitmask`, if none is forced; None: not known, or any token


class GrammarState(Protocol):
    """State of a grammar after a part of an answer. Once the request is submitted, it belongs to the engine's thread;
    other threads may read `error` only."""

    def accept(self, token: int) -> None:
        """Advance by a token of the answer. Never raises; see `error`."""

    def bitmask(self) -> bytes | None:
        """Return the tokens that may come next: one bit per token of the vocabulary, token 0 in the lowest bit of the
        first byte, in whole 32-bit words. None: any token."""

    @property
    def is_free(self) -> bool:
        """True if any token may come, and at most the next one that is accepted changes that. The engine then accepts
        tokens after it has drawn the next ones, of which it draws those again that turn out to be held."""

    def reset(self) -> None:
        """Return to the state before the first token of the answer."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted; at most 16."""

    @property
    def accepted(self) -> int:
        """Number of tokens of the answer that were accepted."""

    @property
    def takes_drafts(self) -> bool:
        """False after an error, and while earlier drafts have taken too much time: then nothing is known `ahead`, and
        `valid_prefix` allows no token."""

    def ahead(self, draft: Sequence[int]) -> GrammarAhead:
        """Return what may come after a draft, which the grammar must allow. Leaves the state as it was."""

    def valid_prefix(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens, one after the other, may come next. An end of the sequence is not counted,
        nor what comes after it."""

    def masks_along(self, draft: Sequence[int]) -> list[bytes | None]:
        """Return the masks before each token of a draft and after the last, and leave the state as it was. Fewer if the
        grammar does not allow the draft, exceeds its limits or takes too much time on the way: the draft ends there."""

    @property
    def error(self) -> GrammarError | None:
        """Error of a grammar that cannot continue, else None. After an error only the end of the sequence is
        allowed."""


@dataclass(frozen=True, slots=True)
class SpecPrefillParams:
    """Parameters of SpecPrefill (arXiv 2502.02789), which computes only a part of a prompt."""

    keep: float  # share to keep of the droppable tokens that are not in the prefix cache
    droppable_ranges: tuple[Range, ...]  # ranges of the prompt; all other tokens are kept
    min_tokens: int  # tokens to compute below which SpecPrefill is not worthwhile
    requested: bool  # the request demands it, whether or not it is worthwhile


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image prepared for the vision encoder, independent of its place in a prompt."""

    digest: bytes
    text: str  # replaces the template's marker for an image
    tokens: int  # from the first placeholder in it to the last
    placeholders: int
    pixel_inputs: Mapping[str, Any] = field(compare=False, repr=False)  # of the vision encoder: see `ImageProcessor`
    nbytes: int  # of `pixel_inputs`


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image at its place in a prompt."""

    digest: bytes  # of `pixel_inputs`; images with equal digests are the same
    span: Range  # of the prompt's tokens that stand for the image
    pixel_inputs: Mapping[str, Any] = field(compare=False, repr=False)  # of the vision encoder: see `ImageProcessor`
    nbytes: int = 0  # of `pixel_inputs`

    @property
    def tokens(self) -> int:
        """Number of prompt tokens that stand for the image."""
        return self.span[1] - self.span[0]

    @property
    def key(self) -> int:
        """Negative number that replaces the image's token ids in a cache key, so that it differs from other images'."""
        return -1 - int.from_bytes(self.digest, "big")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for the engine: a prompt in tokens, and how to continue it. Frozen, since it crosses threads."""

    id: str
    prompt: tuple[int, ...]  # at least one token
    max_tokens: int  # of the whole answer, at least 1
    sampling: Sampling = Sampling()
    lane: Lane = "interactive"
    resume_tokens: tuple[int, ...] = ()  # tokens of the answer from an earlier attempt; fewer than max_tokens
    grammar: GrammarState | None = None  # in the state before the answer's first token, so before `resume_tokens`
    top_logprobs: int | None = None  # alternatives to report with each token; None: no logprobs at all
    namespace: str = ""  # of the prefix cache: prefixes are shared within a namespace only
    boundaries: tuple[int, ...] = ()  # positions at which other prompts are likely to diverge; the likeliest first
    specprefill: SpecPrefillParams | None = None
    kept_ranges: tuple[Range, ...] | None = None  # tokens of the prompt to compute, once decided; None: all
    images: tuple[PromptImage, ...] = ()  # in the order of the prompt
    max_draft: int | None = None  # most tokens of a draft; 0: no speculation; None: the worker's limit
    prediction: tuple[int, ...] = ()  # a text that the answer may copy
    grows: bool = False  # it states no limit: memory is reserved as the answer grows
    marks: tuple[tuple[str, int], ...] = ()  # names of beginnings of the prompt, each with its tokens: see `PrefixTree`

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens of the prompt and of the answer so far."""
        return self.prompt + self.resume_tokens

    def cache_key(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the key of these tokens in the prefix cache: the tokens, with those of each image replaced by the
        image's key. `tokens` must begin with the prompt, or be a prefix of it."""
        if not self.images:
            return tokens
        keys = list(tokens)
        for image in self.images:
            start, end = image.span
            keys[start:end] = [image.key] * (min(end, len(keys)) - start)
        return tuple(keys)

    @property
    def num_dropped(self) -> int:
        """Tokens of the prompt that are never computed."""
        return 0 if self.kept_ranges is None else len(self.prompt) - tokens_in(self.kept_ranges)
