"""Outcomes: messages about a request that the engine returns from a step, and the report of the step itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Literal

from worker.request import Range

StopReason = Literal["stop", "length"]
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
class PromptProgress:
    """Progress in tokens before the prefill. Of `total`, `done` are read from disk (a prefix, or features of images),
    have been through the vision encoder, or were computed by the draft model of SpecPrefill."""

    phase: Literal["loading", "encoding", "scoring"]
    id: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request has its memory: its prompt is computed next, or a preempted row goes on."""

    id: str
    at: float = field(compare=False)  # time.monotonic(): the outcomes of a step are reported at its end


@dataclass(frozen=True, slots=True)
class Preempted:
    """The row had to leave for others. It is admitted again later."""

    id: str


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
    finish_reason: StopReason | None = None
    logprobs: Logprobs | None = None  # if the request wants them and there is a token
    at: float | None = field(default=None, compare=False)  # time.monotonic() when the host received it
    accepted: bool = False  # it was in a draft, so the forward that has verified it has drawn another token as well


MAX_DRAFT = 7  # tokens of a draft: with the row's next token, MLX's vector attention on Metal takes up to 8 queries
PREDICTION = "prediction"  # the proposer that copies from a request's prediction


@dataclass(frozen=True, slots=True)
class Speculated:
    """A draft of the row that a step has verified. Reported before the tokens of the step."""

    id: str
    kind: str  # of the proposer
    proposed: int  # tokens that were verified
    accepted: int  # the first of them, which were right
    kinds: tuple[str, ...] = ()  # of each proposed token, if they differ


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of one input of a job for an embedding model."""

    id: str
    index: int  # of the input
    vector: bytes  # little-endian float32


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
    Admitted
    | Preempted
    | Prefilled
    | PromptProgress
    | SpecPrefillApplied
    | SpecPrefillSkipped
    | Sampled
    | Embedded
    | Speculated
    | RowFailed
    | Refused
    | CutShort
)


# Receives the outcomes of one request, each with the number of rows that decoded in the step. Called on the event loop,
# in order.
OutcomeListener = Callable[[Outcome, int], None]


def frees_memory(outcome: Outcome) -> bool:
    """Return True if the row needs less memory from now on than is reserved for it."""
    match outcome:
        case SpecPrefillApplied() | SpecPrefillSkipped():
            return True
        case PromptProgress(phase="loading" | "encoding", done=done, total=total):
            return done == total
        case _:
            return False


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """Use of the prefix cache in one step."""

    queried: int = 0  # tokens of the prompts whose prefill has finished
    hit: int = 0  # those of them that were cached
    evicted: int = 0  # number of KV segments, state snapshots and image features
    nbytes: int = 0  # bytes held after the step
    marks: int = 0  # number of marks whose prefixes are held after it: see `PrefixTree`
    lost: tuple[str, ...] = ()  # marks whose prefixes were lost since the step before
    emptied: bool = False  # all prefixes were, at one time


@dataclass(frozen=True, slots=True)
class DraftUse:
    """Drafts that were verified in one step."""

    drafts: int = 0
    proposed: int = 0  # tokens
    accepted_at: tuple[int, ...] = ()  # accepted tokens by their position in the draft

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> "DraftUse":
        """Count the drafts among the outcomes of a step."""
        verified = [each for each in outcomes if isinstance(each, Speculated)]
        if not verified:
            return _NO_DRAFTS
        longest = max((draft.accepted for draft in verified), default=0)
        accepted_at = tuple(sum(place < draft.accepted for draft in verified) for place in range(longest))
        return cls(len(verified), sum(draft.proposed for draft in verified), accepted_at)

    @property
    def accepted(self) -> int:
        """Number of accepted tokens."""
        return sum(self.accepted_at)


_NO_DRAFTS = DraftUse()


@dataclass(frozen=True, slots=True)
class StepReport:
    """Result of one engine step."""

    outcomes: tuple[Outcome, ...]
    rows: int  # rows that were decoding when the step began
    seconds: float = 0.0  # duration of the step
    decode: tuple[int, float] = (0, 0.0)  # rows that decode after the step, and expected seconds of their next one
    num_waiting: int = 0  # requests that wait for memory
    num_preempted: int = 0  # those of them that were active before
    num_preemptions: int = 0  # in this step
    num_out_of_memory: int = 0  # rows that have lost their caches in it, since the device had no memory
    reserved: tuple[int, int] | None = None  # bytes in addition to the weights: reserved for active rows, and available
    memory: tuple[int, int] | None = None  # bytes in addition to the weights: predicted, measured; None: not compared
    prefix: PrefixUse = PrefixUse()
    # Measured seconds of a prompt's token, and of each pair of one and one before it; 0 before the first prompt.
    prompt_cost: tuple[float, float] = (0.0, 0.0)
    drafts: DraftUse = DraftUse()


class NotStored(Enum):
    """Reason why a prefix, or its end, is not on disk. The value tells people what to change."""

    NO_FOLDER = "no folder for prefixes is set; set SLUICE_PREFIX_DISK_DIR"
    TOO_SHORT = "it is too short to be cached; such a prompt is computed in one forward"
    NOT_CACHED = "it does not fit into the prefix cache in memory; raise SLUICE_PREFIX_CACHE_GB"
    QUOTA = "the folder has no space for it; raise SLUICE_PREFIX_DISK_GB, or drop or unpin other prefixes"
    DAILY_LIMIT = "the limit of bytes written in a day is reached; raise SLUICE_PREFIX_DISK_DAILY_GB, or wait"
    DISK = "the disk failed; the log has the error"


@dataclass(frozen=True, slots=True)
class StoreResult:
    """State of a prefix on disk after an attempt to store it."""

    tokens: int  # on disk, from the start of the prefix
    written_bytes: int = 0  # by this attempt
    missing: NotStored | None = None  # why the rest is not on disk; None if there is no rest
