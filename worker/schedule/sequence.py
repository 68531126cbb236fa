"""What passes between the event loop and the engine thread: frozen, and nothing of MLX in it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Lane = Literal["interactive", "batch"]
FinishReason = Literal["stop", "length"]
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
class Broken:
    """Why a grammar cannot go on."""

    why: str
    ours: bool  # a token came that was not allowed; else the grammar was too much for its limits


class Guide(Protocol):
    """Which tokens an answer may go on with: a grammar's place. It belongs to the engine thread once submitted."""

    def accept(self, token: int) -> None:
        """The answer has gone on with it. Never raises; see `broken`."""

    def allowed(self) -> bytes | None:
        """A bit for each token of the vocabulary, the lowest bit of the first byte being token 0, in whole
        32-bit words. None: any token."""

    def rewind(self) -> None:
        """To before the answer's first token."""

    @property
    def broken(self) -> Broken | None:
        """Not None where the grammar cannot go on; only the end of the sequence is allowed then."""


@dataclass(frozen=True, slots=True)
class Thinning:
    """That a prompt need not be computed whole: SpecPrefill (arXiv 2502.02789)."""

    keep: float  # share of those that may be left out and are not in the prefix cache
    thinnable: tuple[Range, ...]  # all others stay
    least: int  # tokens to compute: with fewer it is not worth it
    asked: bool  # by the request: whether or not it pays


@dataclass(frozen=True, slots=True)
class Sight:
    """An image as the model is shown it, wherever in a prompt that is."""

    digest: bytes
    text: str  # what the template's marker for an image becomes
    tokens: int  # from the first placeholder in it to the last
    placeholders: int
    seen: Mapping[str, Any] = field(compare=False, repr=False)  # by the vision tower: see `Eyes`
    nbytes: int  # of what is seen


@dataclass(frozen=True, slots=True)
class Picture:
    """An image of a prompt."""

    digest: bytes  # of what the model sees of it; equal ones are the same image
    span: Range  # of the prompt, whose tokens there say nothing but that an image is
    seen: Mapping[str, Any] = field(compare=False, repr=False)  # by the vision tower: see `Eyes`
    nbytes: int = 0  # of what is seen

    @property
    def tokens(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def key(self) -> int:
        """What tells its tokens from those of other images; no token's id."""
        return -1 - int.from_bytes(self.digest, "big")


@dataclass(frozen=True, slots=True)
class Sequence:
    """A request as the engine sees it."""

    id: str
    prompt: tuple[int, ...]  # at least one token
    max_tokens: int  # of the whole answer, at least 1
    sampling: Sampling = Sampling()
    lane: Lane = "interactive"
    delivered: tuple[int, ...] = ()  # of the answer, by an earlier attempt; fewer than max_tokens
    guide: Guide | None = None  # before the first token of the answer, the delivered ones included
    top_logprobs: int | None = None  # alternatives to report with each token; None: no logprobs at all
    space: str = ""  # whose prefixes it may use, and leaves its own to
    boundaries: tuple[int, ...] = ()  # tokens of the prompt where others are likely to part; the likeliest first
    thinning: Thinning | None = None
    kept: tuple[Range, ...] | None = None  # of the prompt, where that is decided: the others are never computed
    pictures: tuple[Picture, ...] = ()  # in the order of the prompt

    @property
    def known(self) -> tuple[int, ...]:
        """All tokens that are in the cache before the next one is drawn."""
        return self.prompt + self.delivered

    def keys(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The same, for such tokens as begin with its prompt, or are the beginning of it, and yet not the same as those
        of a prompt with other images: by these a prefix is found."""
        if not self.pictures:
            return tokens
        keys = list(tokens)
        for picture in self.pictures:
            start, end = picture.span
            keys[start:end] = [picture.key] * (min(end, len(keys)) - start)
        return tuple(keys)

    @property
    def left_out(self) -> int:
        """Tokens of the prompt that are never computed."""
        return 0 if self.kept is None else len(self.prompt) - tokens_in(self.kept)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """So many of a prompt's tokens are in the row's cache, some of them from the prefix cache."""

    id: str
    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """So many of the tokens that a prompt's images stand for have been through the vision tower."""

    id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Scored:
    """So many of a prompt's tokens has the draft been through."""

    id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Thinned:
    """By the draft's scores these tokens are kept, and the others left out."""

    id: str
    kept: tuple[Range, ...]
    seconds: float  # that the scoring took


@dataclass(frozen=True, slots=True)
class Whole:
    """The prompt is computed whole, though it might have been thinned."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logs of the row's probabilities, after penalties, bias and guide, before temperature and filters."""

    token: float
    top: tuple[tuple[int, float], ...] = ()  # (token, its own), the most probable first


@dataclass(frozen=True, slots=True)
class Sampled:
    """One step of one row. `token` is None where the end of the sequence was drawn."""

    id: str
    token: int | None
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None  # where the sequence asked for them, and there is a token
    at: float | None = field(default=None, compare=False)  # time.monotonic() when the device had computed it


@dataclass(frozen=True, slots=True)
class Faulted:
    """The row is out of the engine, and it was our fault."""

    id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The row will never fit into this worker's memory; a sentence says by how much."""

    id: str
    sentence: str


Outcome = Prefilled | Encoded | Scored | Thinned | Whole | Sampled | Faulted | Refused


class Listener(Protocol):
    def heard(self, outcome: Outcome, rows: int) -> None:
        """What a step did for the sequence, and how many rows decoded in it. On the event loop, in order."""


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """Of the prefix cache, in one step."""

    queried: int = 0  # tokens of the prompts that are through
    hit: int = 0  # those that were found
    evicted: int = 0  # runs of tokens, states, and the features of images
    nbytes: int = 0  # that it holds after the step


@dataclass(frozen=True, slots=True)
class StepReport:
    """One engine step: what happened to each row, and how many decoded together."""

    outcomes: tuple[Outcome, ...]
    rows: int
    seconds: float = 0.0
    waiting: int = 0  # for memory
    parked: int = 0  # of those: they were inside before
    preempted: int = 0  # in this step
    promised: tuple[int, int] | None = None  # bytes beside the model: what those inside may need, and what there is
    memory: tuple[int, int] | None = None  # bytes beside the model: predicted, and measured since the last look
    prefix: PrefixUse = PrefixUse()
