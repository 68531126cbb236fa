"""TODO worker.schedule.outcomes"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

from worker.schedule.request import Range

FinishReason = Literal["stop", "length"]


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
class SpecPrefillApplied:
    """By the draft's scores these tokens are kept, and the others left out."""

    id: str
    kept_ranges: tuple[Range, ...]
    seconds: float  # that the scoring took


@dataclass(frozen=True, slots=True)
class SpecPrefillSkipped:
    """The prompt is computed whole, though it might have been thinned."""

    id: str
    reason: str


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
class RowFailed:
    """The row is out of the engine, and it was our fault."""

    id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The row will never fit into this worker's memory; a sentence says by how much."""

    id: str
    message: str


Outcome = Prefilled | Encoded | Scored | SpecPrefillApplied | SpecPrefillSkipped | Sampled | RowFailed | Refused


class OutcomeListener(Protocol):
    def on_outcome(self, outcome: Outcome, rows: int) -> None:
        """What a step did for the sequence, and how many rows decoded in it. On the event loop, in order."""
