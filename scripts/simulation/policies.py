"""Ways of planning a step: the worker's own, and others to compare it with."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf

from scripts.simulation.arrivals import Request
from scripts.simulation.costs import Costs
from worker.engine.step.cost import CostEstimate, Forward
from worker.engine.step.plan import Order, PromptState, StepLimits, in_order
from worker.engine.step.planner import DecodingRows, StepPlanner
from worker.engine.step.tuning import MAX_CHUNK

_WARM_UP = (16, 64, 128) * 3  # tokens of the prompts that a worker has computed before


def shortest(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts by the time that they take; in one step in four, by age."""
    key = _age if step % 4 == 0 else _alone_s
    return sorted(waiting, key=lambda row: (row.lane == "batch", key(row)))


def oldest(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts by age."""
    return sorted(waiting, key=lambda row: (row.lane == "batch", _age(row)))


def ratio(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts by slowdown so far: waiting time against the time that they take."""
    return sorted(waiting, key=lambda row: (row.lane == "batch", -row.waited_s / max(row.alone_s, 1e-9)))


def slack(waiting: Iterable[PromptState], step: int) -> list[PromptState]:
    """Return the prompts by the time that they can still wait for a first token in time."""
    return sorted(waiting, key=lambda row: (row.lane == "batch", -row.waited_s - row.alone_s))


def _alone_s(row: PromptState) -> float:
    return row.alone_s


def _age(row: PromptState) -> float:
    return -row.waited_s


@dataclass(frozen=True)
class Policy:
    """How steps are planned. The defaults are the worker's."""

    rule: Order = in_order
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
    "before": _BEFORE,  # the worker at commit 533d2e2, whose measured bursts the tests compare with simulated ones
    "before-2": replace(_BEFORE, share=2.0),  # the same with a share of its time for prompts
    "before-5": replace(_BEFORE, share=5.0),
}


class Rows:
    """The decoding rows, as the planner sees them: their steps take what was measured."""

    step_copy_bytes = 0

    def __init__(self, requests: Sequence[Request], costs: Costs, *, started: bool) -> None:
        """`started`: the answer of one of them has begun."""
        self._requests, self._costs = requests, costs
        self.started = started
        self.most_measured = len(requests)
        self.num_interactive = sum(request.arrival.lane == "interactive" for request in requests)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def step_s(self) -> float:
        return self._costs.forward_s(len(self), 1) if len(self) else 0.0

    def join_copy_bytes(self, length: int) -> int:
        return 0

    def added_step_s(self, length: int) -> float:
        return self._costs.forward_s(len(self) + 1, 1) - self.step_s if self.started else 0.0


class Planner:
    """Plans with the worker's planner, by costs of prompts that it learns from the simulated measurements, and with
    what a policy does otherwise. Not simulated: the prefix cache, memory, copies of buffers, and that attention takes
    longer for long prompts."""

    def __init__(self, policy: Policy, costs: Costs, step_s: float) -> None:
        self.policy = policy
        self._measured, self._target_s = costs, step_s
        self._estimate = CostEstimate()
        self._steps = StepPlanner(step_s, self._estimate, order=policy.rule, limits=self._limits)
        self._estimate.observe_forward(costs.forward_s(1, 1))
        for tokens in _WARM_UP:
            self._estimate.observe_chunk(tokens, 0, costs.forward_s(1, tokens) + costs.overheads.chunk_s)
            self._estimate.observe_join(tokens, 0, costs.overheads.join_s)

    def plan(
        self, waiting: Iterable[Request], running: Sequence[Request], now_s: float, *, started: bool
    ) -> list[Forward]:
        """Return the forwards of a step. `started`: the answer of a running request has begun."""
        self._steps.begin_step()
        rows = Rows(running, self._measured, started=started)
        added_s = rows.added_step_s(0)
        return self._steps.plan([self._state_of(request, now_s, added_s) for request in waiting], rows, 0.0, MAX_CHUNK)

    def _limits(self, found: StepLimits, rows: DecodingRows) -> StepLimits:
        """Return the worker's limits, as far as the policy has none of its own."""
        if not self.policy.large:
            found = replace(found, shared_s=0.0)
        if not self.policy.prefill_first:
            found = replace(found, enough_s=inf)
        if self.policy.share is None or not rows.rows:
            return found
        target_s = self._target_s - rows.decode_s
        return replace(
            found, spare_s={"interactive": max(target_s, self.policy.share * rows.decode_s), "batch": target_s}
        )

    def delays_first_step(self, waiting: Iterable[Request], joined: Sequence[Request], delayed_s: float) -> bool:
        """Return True if the first decode step waits for another prompt. `joined`: the rows that it would compute.
        `delayed_s`: since the first of them joined."""
        if not self.policy.gathers:
            return False
        interactive = [request for request in waiting if request.arrival.lane == "interactive"]
        tokens = [(request.total - request.done, request.done) for request in interactive]
        return self._steps.delays_first_step(Rows(joined, self._measured, started=False), delayed_s, tokens)

    def _state_of(self, request: Request, now_s: float, added_s: float) -> PromptState:
        return PromptState(
            request.id,
            request.done,
            request.total - request.done,
            now_s - request.admitted_s,
            request.arrival.lane,
            self._estimate.now,
            added_decode_s=added_s,
            pack=0 if self.policy.packs else None,
            padded=self._measured.padded,
        )

    def observe_forward(self, dones: Sequence[int], tokens: int, seconds: float) -> None:
        """Record the measured seconds of a prefill forward of `tokens` tokens of each prompt. `dones`: the tokens of
        each prompt before it."""
        self._estimate.observe_chunk(tokens, sum(dones) / len(dones), seconds, rows=len(dones))

    def observe_join(self, tokens: int, seconds: float) -> None:
        """Record the measured seconds of a join of a row of `tokens` tokens."""
        self._estimate.observe_join(tokens, 0, seconds)

    def observe_gap(self, seconds: float) -> None:
        """Record the measured seconds of a gap."""
        self._steps.observe_gap(seconds)
