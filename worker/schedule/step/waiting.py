"""How much time waiting prompts need in a step, and how long joined rows delay their first decode step for them."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Self

from worker.schedule.step.prompt import PromptState

# Waiting prompts get the share of the time with which all are computed before the oldest has waited this many seconds.
COMPUTED_WITHIN_S = 0.5
# Rows that have joined put off their first decode step for at most this many seconds while prompts can be computed, ...
FIRST_STEP_WITHIN_S = 1.5
# ... and beyond that, for prompts that take at most `FIRST_STEP_WITHIN_S` each, while this makes first tokens earlier
# in the mean; at most this many seconds in all. `scripts/simulate --slower 1.6` needs 8 s for 32 prompts.
FIRST_STEP_AT_MOST_S = 10.0


@dataclass(frozen=True, slots=True)
class Backlog:
    """The interactive prompts that wait."""

    seconds: float = 0.0  # that computing all of them takes
    oldest_s: float = 0.0  # that the oldest has waited

    @classmethod
    def of(cls, waiting: Iterable[PromptState]) -> Self:
        """Return the backlog of these prompts, each computed in forwards of its own. Offline ones do not count."""
        rows = [row for row in waiting if row.lane == "interactive"]
        return cls(sum(row.alone_s for row in rows), max((row.waited_s for row in rows), default=0.0))

    def share_s(self, decode_s: float) -> float:
        """Return the seconds that prompts need beside a decode step of `decode_s` to be computed in time: see
        `COMPUTED_WITHIN_S`. Infinite if all of the time is not enough."""
        left_s = COMPUTED_WITHIN_S - self.oldest_s
        return inf if self.seconds >= left_s else decode_s * self.seconds / (left_s - self.seconds)


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first decode step of rows of which none has begun its answer, so that no reader notices a pause."""

    rows: int  # that have joined
    delayed_s: float  # since the first of them joined
    slowdown: float  # of prompts, once these rows decode: see `StepBudget.slowdown`

    def waits_for(self, prompts_s: Iterable[float]) -> bool:
        """Return True if another prompt should be computed before the step. `prompts_s`: the seconds that each waiting
        prompt takes. Prompts that come together take less time without decode steps between them: each second of them
        costs the joined rows a second, and saves every waiting prompt `slowdown` seconds."""
        waiting = [*prompts_s]
        shortest_s = min(waiting, default=inf)
        if shortest_s <= FIRST_STEP_WITHIN_S - self.delayed_s:
            return True
        in_time = shortest_s <= min(FIRST_STEP_WITHIN_S, FIRST_STEP_AT_MOST_S - self.delayed_s)
        return in_time and self.rows < len(waiting) * self.slowdown
