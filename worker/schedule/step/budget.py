"""The time that a step has for prefill without delaying the decoding rows too much."""

from dataclasses import dataclass
from math import inf
from typing import get_args

from worker.schedule.request import Lane
from worker.schedule.step.cost import CostEstimate
from worker.schedule.step.forward import PLAIN_STEP, StepKind
from worker.schedule.step.gap import GAP_STEPS, half_gap_s, longest_gap_s
from worker.schedule.step.overruns import Overruns
from worker.schedule.step.waiting import Backlog

# Multiple of the target that a step may last if no row decodes: it then delays only new requests and cancellations.
ALONE_STEPS = 6
# The same for a forward that several interactive prompts share: it delays a new request more, and computes a burst of
# prompts in larger matrices. On 2 cores, tokens of prompts of 75 tokens took 4.5 ms each with six targets, 3.2 with
# fifteen.
SHARED_ALONE_STEPS = 15
# Overruns are recorded only for gaps that were planned to last half of the limit, or this share of the longest gap that
# is planned at present.
_LONG = 0.75

_LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True, slots=True)
class Running:
    """The rows that decode."""

    rows: int
    interactive: int  # of them
    decode_s: float = 0.0  # expected seconds of their next decode step


class StepBudget:
    """Limits the time that prompts take in a step, by the measured times of prefill and decoding."""

    def __init__(self, step_s: float, costs: CostEstimate) -> None:
        """`step_s`: target seconds of a step. `costs`: what chunks of prefill cost. It stays owned by the caller, who
        lets it learn."""
        self._step_s = step_s
        self._costs = costs
        self._overruns = Overruns()

    def observe_gap(self, planned_s: float, seconds: float, kind: StepKind = PLAIN_STEP) -> None:
        """Record the measured seconds of a gap between two tokens, which was planned to last `planned_s`. Short ones,
        which could not become too long, are ignored. `kind`: of the step that has made it; by default no row joined,
        and no forward was shared."""
        longest_s = GAP_STEPS * self._step_s / self.overrun
        if planned_s >= min(half_gap_s(self._step_s), _LONG * longest_s):
            self._overruns.observe(seconds / planned_s, kind)

    @property
    def overrun(self) -> float:
        """The most seconds that a long gap is expected to last, relative to those that are planned."""
        return self._overruns.expected

    def slowdown(self, decode_s: float) -> float:
        """Return the seconds by which each second of prompts takes longer next to interactive rows whose decode step
        takes `decode_s`: for every chunk, such a step and another pass over the weights. Infinite if they leave no time
        for prompts."""
        cost_s = decode_s + self._costs.now.forward_s
        left_s = longest_gap_s(self._step_s, decode_s) / self.overrun - cost_s
        return cost_s / left_s if left_s > 0 else inf

    def shared_s(self, running: Running) -> float:
        """Return the seconds that a step's first forward may take, although they exceed `spare_s`, if several
        interactive prompts share it; 0 if rows decode."""
        return 0.0 if running.rows else SHARED_ALONE_STEPS * self._step_s

    def spare_s(self, running: Running, elapsed_s: float, backlog: Backlog) -> dict[Lane, float]:
        """Return the seconds that each lane's prompts may take in a step; 0 or less leaves no time. Both lanes share
        the step: time that interactive prompts take is not left for offline ones. `elapsed_s`: seconds of the step so
        far, before the next decode step. `backlog`: the interactive prompts that wait."""
        if not running.rows:
            return dict.fromkeys(_LANES, ALONE_STEPS * self._step_s)
        taken_s = elapsed_s + running.decode_s
        target_s = self._step_s - taken_s
        most_s = longest_gap_s(self._step_s, running.decode_s) / self.overrun - taken_s
        cost = self._costs.now
        least_s = cost.chunk_s(cost.worthwhile, 0)
        if not running.interactive:  # no gap that a reader notices
            return {"interactive": max(target_s, most_s), "batch": max(target_s, min(least_s, most_s))}
        wanted_s = max(backlog.share_s(running.decode_s), least_s)
        return {"interactive": max(target_s, min(wanted_s, most_s)), "batch": target_s}
