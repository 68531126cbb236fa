"""Outcomes: messages about a request that the engine returns from a step."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from worker.schedule.request import Range

FinishReason = Literal["stop", "length"]
Phase = Literal["loading", "encoding", "scoring", "prefill"]  # of a prompt, before its row decodes


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill progress in tokens: `done` of `total` are in the row's cache, `cached` of them from the prefix cache."""

    phase: ClassVar[Phase] = "prefill"
    id: str
    done: int
    total: int
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """Progress of a prefix, or of the features of images, that are read from disk: `done` of `total` tokens are in
    memory."""

    phase: ClassVar[Phase] = "loading"
    id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """Image encoding progress: `done` of the `total` image tokens of a prompt have been through the vision encoder."""

    phase: ClassVar[Phase] = "encoding"
    id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Scored:
    """SpecPrefill progress: the draft model has computed `done` of the `total` tokens of a prompt."""

    phase: ClassVar[Phase] = "scoring"
    id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class SpecPrefillApplied:
    """SpecPrefill has dropped the tokens of a prompt outside `kept_ranges`, by the draft's scores."""

    id: str
    kept_ranges: tuple[Range, ...]
    seconds: float  # time of the scoring


@dataclass(frozen=True, slots=True)
class SpecPrefillSkipped:
    """All tokens of the prompt are computed, although the request allowed SpecPrefill. `reason`: why."""

    id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the probabilities, after penalties, bias and grammar, before temperature and filters."""

    token: float  # of the drawn token
    top: tuple[tuple[int, float], ...] = ()  # (token, logprob), the most probable first


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of one row in one step. `token` is None if an end-of-sequence token was drawn."""

    id: str
    token: int | None
    finish_reason: FinishReason | None = None
    logprobs: Logprobs | None = None  # if the request wants them and there is a token
    at: float | None = field(default=None, compare=False)  # time.monotonic() when the host received it
    accepted: bool = False  # it was in a draft, so the forward that has verified it has drawn another token as well


@dataclass(frozen=True, slots=True)
class Speculated:
    """A draft of the row that a step has verified. Reported before the tokens of the step."""

    id: str
    kind: str  # of the proposer
    proposed: int  # tokens that were verified
    accepted: int  # the first of them, which were right
    kinds: tuple[str, ...] = ()  # of each proposed token, if they differ


@dataclass(frozen=True, slots=True)
class RowFailed:
    """The row was removed after a failure of the engine."""

    id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The row does not fit into this worker's memory even alone; `message` tells the client what to change."""

    id: str
    message: str


@dataclass(frozen=True, slots=True)
class CutShort:
    """The row outgrows this worker's memory even alone, so its answer ends with the tokens that follow, if any: its
    request states no limit."""

    id: str


Outcome = (
    Prefilled
    | Loaded
    | Encoded
    | Scored
    | SpecPrefillApplied
    | SpecPrefillSkipped
    | Sampled
    | Speculated
    | RowFailed
    | Refused
    | CutShort
)


class OutcomeListener(Protocol):
    """Receiver of the outcomes of one request."""

    def on_outcome(self, outcome: Outcome, rows: int) -> None:
        """Handle an outcome of the request. Called on the event loop, in order. `rows`: rows that decoded in the
        step."""


def frees_memory(outcome: Outcome) -> bool:
    """Return True if the row needs less memory from now on than is reserved for it."""
    match outcome:
        case SpecPrefillApplied() | SpecPrefillSkipped():
            return True
        case Encoded(done=done, total=total) | Loaded(done=done, total=total):
            return done == total
        case _:
            return False
