"""TODO worker.schedule.report"""

from dataclasses import dataclass

from worker.schedule.outcomes import Outcome


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
    num_waiting: int = 0  # for memory
    num_preempted: int = 0  # of those: they were inside before
    num_preemptions: int = 0  # in this step
    reserved: tuple[int, int] | None = None  # bytes beside the model: what those inside may need, and what there is
    memory: tuple[int, int] | None = None  # bytes beside the model: predicted, and measured since the last look
    prefix: PrefixUse = PrefixUse()
