"""Report of an engine step, from the engine thread to the event loop."""

from collections.abc import Iterable
from dataclasses import dataclass

from worker.schedule.outcomes import Outcome, Speculated


@dataclass(frozen=True, slots=True)
class PrefixUse:
    """Use of the prefix cache in one step."""

    queried: int = 0  # tokens of the prompts whose prefill has finished
    hit: int = 0  # those of them that were cached
    evicted: int = 0  # number of KV segments, state snapshots and image features
    nbytes: int = 0  # bytes held after the step


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
    reserved: tuple[int, int] | None = None  # bytes in addition to the weights: reserved for active rows, and available
    memory: tuple[int, int] | None = None  # bytes in addition to the weights: predicted, measured; None: not compared
    prefix: PrefixUse = PrefixUse()
    drafts: DraftUse = DraftUse()
