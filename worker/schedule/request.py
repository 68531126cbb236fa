"""TODO worker.schedule.request"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Lane = Literal["interactive", "batch"]
Range = tuple[int, int]  # of tokens: the first, and the one behind the last


def tokens_in(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a row's tokens are drawn. Draw k of a row depends on (seed, k) and its own logits alone."""

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off
    min_p: float = 0.0  # 0 is off
    repetition_penalty: float = 1.0  # 1 is off; over prompt and answer
    presence_penalty: float = 0.0  # over the answer
    frequency_penalty: float = 0.0  # over the answer
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GrammarError:
    """Why a grammar cannot go on."""

    reason: str
    ours: bool  # a token came that was not allowed; else the grammar was too much for its limits


class GrammarState(Protocol):
    """Which tokens an answer may go on with: a grammar's place. It belongs to the engine thread once submitted."""

    def accept(self, token: int) -> None:
        """The answer has gone on with it. Never raises; see `broken`."""

    def bitmask(self) -> bytes | None:
        """A bit for each token of the vocabulary, the lowest bit of the first byte being token 0, in whole
        32-bit words. None: any token."""

    def reset(self) -> None:
        """To before the answer's first token."""

    @property
    def error(self) -> GrammarError | None:
        """Not None where the grammar cannot go on; only the end of the sequence is allowed then."""


@dataclass(frozen=True, slots=True)
class SpecPrefillParams:
    """That a prompt need not be computed whole: SpecPrefill (arXiv 2502.02789)."""

    keep: float  # share of those that may be left out and are not in the prefix cache
    droppable_ranges: tuple[Range, ...]  # all others stay
    min_tokens: int  # tokens to compute: with fewer it is not worth it
    requested: bool  # by the request: whether or not it pays


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """An image as the model is shown it, wherever in a prompt that is."""

    digest: bytes
    text: str  # what the template's marker for an image becomes
    tokens: int  # from the first placeholder in it to the last
    placeholders: int
    pixel_inputs: Mapping[str, Any] = field(compare=False, repr=False)  # by the vision tower: see `ImageProcessor`
    nbytes: int  # of what is seen


@dataclass(frozen=True, slots=True)
class PromptImage:
    """An image of a prompt."""

    digest: bytes  # of what the model sees of it; equal ones are the same image
    span: Range  # of the prompt, whose tokens there say nothing but that an image is
    pixel_inputs: Mapping[str, Any] = field(compare=False, repr=False)  # by the vision tower: see `ImageProcessor`
    nbytes: int = 0  # of what is seen

    @property
    def tokens(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def key(self) -> int:
        """What tells its tokens from those of other images; no token's id."""
        return -1 - int.from_bytes(self.digest, "big")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as the engine sees it."""

    id: str
    prompt: tuple[int, ...]  # at least one token
    max_tokens: int  # of the whole answer, at least 1
    sampling: Sampling = Sampling()
    lane: Lane = "interactive"
    resume_tokens: tuple[int, ...] = ()  # of the answer, by an earlier attempt; fewer than max_tokens
    grammar: GrammarState | None = None  # before the first token of the answer, the delivered ones included
    top_logprobs: int | None = None  # alternatives to report with each token; None: no logprobs at all
    namespace: str = ""  # whose prefixes it may use, and leaves its own to
    boundaries: tuple[int, ...] = ()  # tokens of the prompt where others are likely to part; the likeliest first
    specprefill: SpecPrefillParams | None = None
    kept_ranges: tuple[Range, ...] | None = None  # of the prompt, where that is decided: the others are never computed
    images: tuple[PromptImage, ...] = ()  # in the order of the prompt

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that are in the cache before the next one is drawn."""
        return self.prompt + self.resume_tokens

    def cache_key(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The same, for such tokens as begin with its prompt, or are the beginning of it, and yet not the same as those
        of a prompt with other images: by these a prefix is found."""
        if not self.images:
            return tokens
        keys = list(tokens)
        for picture in self.images:
            start, end = picture.span
            keys[start:end] = [picture.key] * (min(end, len(keys)) - start)
        return tuple(keys)

    @property
    def num_dropped(self) -> int:
        """Tokens of the prompt that are never computed."""
        return 0 if self.kept_ranges is None else len(self.prompt) - tokens_in(self.kept_ranges)
