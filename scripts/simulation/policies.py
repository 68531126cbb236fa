"""Ways of planning a step: the worker's own, and others to compare it with."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from scripts.simulation.costs import Costs
from scripts.simulation.request import Request, Step
from worker.schedule.request import Lane
from worker.schedule.step.budget import ALONE_STEPS, Running, StepBudget
from worker.schedule.step.cost import CostEstimate
from worker.schedule.step.overruns import StepKind
from worker.schedule.step.plan import Forward, PromptState, backlog, in_order, kind_of, plan
from worker.schedule.step.waiting import FirstStep

Rule = Callable[[Iterable[PromptState], int], list[PromptState]]
_WARM_UP = (16, 64, 128) * 3  # tokens of the prompts that a worker has computed before


def _own_s(row: PromptState) -> float:
    return row.cost.chunk_s(row.remaining, row.done)


def shortest(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts by the time that they take; in one step in four, by age."""
    key = _age if step % 4 == 0 else _own_s
    return sorted(waiting, key=lambda row: (row.lane == "batch", key(row)))


def oldest(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts by age."""
    return sorted(waiting, key=lambda row: (row.lane == "batch", _age(row)))


def ratio(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts by slowdown so far: waiting time against the time that they take."""
    return sorted(waiting, key=lambda row: (row.lane == "batch", -row.waited_s / max(_own_s(row), 1e-9)))


def slack(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts by the time that they can still wait for a first token in time."""
    return sorted(waiting, key=lambda row: (row.lane == "batch", -row.waited_s - _own_s(row)))


def _age(row: PromptState) -> float:
    return -row.waited_s


@dataclass(frozen=True)
class Policy:
    """How steps are planned. The defaults are the worker's."""

    rule: Rule = in_order
    share: float | None = None  # prompts get this multiple of the decode time, at least; None: the worker's share
    packs: bool = True  # short prompts share forwards
    large: bool = True  # their forwards may take longer if no row decodes
    gathers: bool = True  # prompts that come together are computed before the first decode step
    prefill_first: bool = True  # in a step; otherwise it decodes first, and then computes prompts while there is time


_BEFORE = Policy(shortest, share=0.0, packs=False, large=False, gathers=False, prefill_first=False)
POLICIES = {
    "sluice": Policy(),
    "unpacked": Policy(packs=False),
    "small-forwards": Policy(large=False),
    "decode-at-once": Policy(gathers=False),
    "shortest": Policy(shortest),
    "oldest": Policy(oldest),
    "ratio": Policy(ratio),
    "slack": Policy(slack),
    "decode-first": Policy(prefill_first=False),
    "share-2": Policy(share=2.0),
    "before": _BEFORE,  # the worker whose measurements docs/performance.md calls `before`
    "before-2": replace(_BEFORE, share=2.0),  # the same with a share of its time for prompts
    "before-5": replace(_BEFORE, share=5.0),
}


class Planner:
    """Plans as the engine does, by costs that it learns from the simulated measurements."""

    def __init__(self, policy: Policy, costs: Costs, step_s: float) -> None:
        self.policy = policy
        self._step_s, self._costs = step_s, costs
        self._estimate = CostEstimate()
        self._budget = StepBudget(step_s, self._estimate)
        self._planned: tuple[float, StepKind] | None = None  # seconds of the gap that the step makes, if it makes one
        self._estimate.observe_forward(costs.forward_s(1, 1))
        for tokens in _WARM_UP:
            self._estimate.observe_chunk(tokens, 0, costs.forward_s(1, tokens) + costs.overheads.chunk_s)
            self._estimate.observe_join(tokens, 0, costs.overheads.join_s)

    def plan(self, waiting: Iterable[Request], running: Sequence[Request], step: Step) -> list[Forward]:
        """Return the forwards of a step."""
        rows = [self._waiting(request, step) for request in waiting]
        spare_s = self._spare_s(rows, running, step.elapsed_s)
        enough_s = inf
        if self.policy.prefill_first:
            enough_s = self._decode_s(running)
        shared_s = self._budget.shared_s(Running(len(running), 0)) if self.policy.large else 0.0
        forwards = plan(rows, spare_s, step.number, 2048, shared_s=shared_s, enough_s=enough_s, order=self.policy.rule)
        if running:
            planned_s = sum(forward.seconds for forward in forwards) + self._decode_s(running)
            self._planned = planned_s, kind_of(forwards)
        return forwards

    def delays_first_step(self, waiting: Iterable[Request], joined: Sequence[Request], delayed_s: float) -> bool:
        """Return True if the first decode step waits for another prompt. `joined`: the rows that it would compute.
        `delayed_s`: since the first of them joined."""
        cost = self._estimate.now
        interactive = [request for request in waiting if request.arrival.lane == "interactive"]
        prompts_s = (cost.chunk_s(request.total - request.done, request.done) for request in interactive)
        first = FirstStep(len(joined), delayed_s, self._budget.slowdown(self._decode_s(joined)))
        return self.policy.gathers and first.waits_for(prompts_s)

    def _waiting(self, request: Request, step: Step) -> PromptState:
        return PromptState(
            request.id,
            request.done,
            request.total - request.done,
            step.began_s - request.admitted_s,
            request.arrival.lane,
            self._estimate.now,
            pack=0 if self.policy.packs else None,
            padded=self._costs.padded,
        )

    def _spare_s(self, rows: Sequence[PromptState], running: Sequence[Request], elapsed_s: float) -> dict[Lane, float]:
        if self.policy.share is None:
            interactive = sum(request.arrival.lane == "interactive" for request in running)
            decoding = Running(len(running), interactive, self._decode_s(running))
            return self._budget.spare_s(decoding, 0.0, backlog(rows))
        if not running:
            return dict.fromkeys(("interactive", "batch"), ALONE_STEPS * self._step_s)
        decode_s = max(elapsed_s, self._decode_s(running))
        target_s = self._step_s - decode_s
        return {"interactive": max(target_s, self.policy.share * decode_s), "batch": target_s}

    def _decode_s(self, running: Sequence[Request]) -> float:
        return self._costs.forward_s(len(running), 1) if running else 0.0

    def observe_forward(self, dones: Sequence[int], tokens: int, seconds: float) -> None:
        """Record the measured seconds of a prefill forward of `tokens` tokens of each prompt. `dones`: the tokens of
        each prompt before it."""
        self._estimate.observe_chunk(tokens, sum(dones) / len(dones), seconds, rows=len(dones))

    def observe_gap(self, seconds: float) -> None:
        """Record the measured seconds of a gap."""
        if self._planned is not None:
            planned_s, kind = self._planned
            self._budget.observe_gap(planned_s, seconds, kind)
            self._planned = None

    def observe_join(self, tokens: int, seconds: float) -> None:
        """Record the measured seconds of a join of a row of `tokens` tokens."""
        self._estimate.observe_join(tokens, 0, seconds)
