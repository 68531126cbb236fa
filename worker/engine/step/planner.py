"""Plans the prompts of each step by measured costs. Knows nothing of models, so a simulation can plan as the engine
does."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from worker.engine.step.budget import Backlog, DecodingRows, FirstStep, StepBudget
from worker.engine.step.cost import CostEstimate, Forward, StepKind, step_kind
from worker.engine.step.plan import Order, PackedTokens, PromptState, StepLimits, in_order, may_advance, no_copies, plan
from worker.engine.step.tuning import FAR_MORE


class RunningRows(Protocol):
    """The decoding rows, as far as a plan depends on them."""

    def __len__(self) -> int:
        """Return the number of rows that decode."""

    @property
    def num_interactive(self) -> int:
        """Number of them that are interactive."""

    @property
    def started(self) -> bool:
        """True if the answer of one of them has begun."""

    @property
    def step_s(self) -> float:
        """Expected seconds of their next decode step, without those of copying buffers."""

    @property
    def most_measured(self) -> int:
        """Most rows of a decode step that was measured."""

    @property
    def step_copy_bytes(self) -> int:
        """Bytes of their buffers that are copied in that step, since they are full."""

    def join_copy_bytes(self, length: int) -> int:
        """Return the bytes of other rows that are copied when a row of `length` tokens joins."""

    def added_step_s(self, length: int) -> float:
        """Return the expected seconds that their decode step takes longer once a row of `length` tokens has joined."""


LimitsRule = Callable[[StepLimits, DecodingRows], StepLimits]


def _as_found(limits: StepLimits, rows: DecodingRows) -> StepLimits:
    return limits


class StepPlanner:
    """Decides which prompts advance in a step, and by how much; remembers how long gaps lasted, relative to their
    plans."""

    def __init__(
        self,
        step_s: float,
        costs: CostEstimate,
        *,
        order: Order = in_order,
        limits: LimitsRule = _as_found,
        packed_tokens: PackedTokens = no_copies,
    ) -> None:
        """`step_s`: target seconds of a step. `costs`: of prefill, stays owned by the caller, who lets it learn.
        `limits` may replace the limits that a step with these decoding rows would have. `packed_tokens`: see `plan`."""
        self._costs = costs
        self._budget = StepBudget(step_s, costs)
        self._order, self._packed_tokens = order, packed_tokens
        self._limits_rule = limits
        self._step = 0
        self._planned: tuple[float, StepKind] | None = None  # seconds of the gap that the step makes, if it makes one

    def begin_step(self) -> None:
        """Count a step: `plan` may be called several times in it."""
        self._step += 1

    def plan(
        self, prompts: Sequence[PromptState], running: RunningRows, elapsed_s: float, longest: int
    ) -> list[Forward]:
        """Return the forwards to compute in this step. `elapsed_s`: seconds since the last step's report. `longest`:
        most tokens of a forward."""
        prompts, rows = may_advance(prompts), self._decoding(running)
        limits = self._limits_rule(self._limits(prompts, rows, elapsed_s), rows)
        forwards = plan(prompts, limits, self._step, longest, order=self._order, packed_tokens=self._packed_tokens)
        if rows.rows:
            planned_s = elapsed_s + sum(forward.seconds for forward in forwards) + rows.decode_s
            self._planned = planned_s, step_kind(forwards)
        return forwards

    def _limits(self, prompts: Iterable[PromptState], rows: DecodingRows, elapsed_s: float) -> StepLimits:
        spare_s = self._budget.spare_s(rows, elapsed_s, Backlog.of(prompts))
        return StepLimits(spare_s, self._budget.shared_s(rows), enough_s=rows.decode_s)

    def _decoding(self, running: RunningRows) -> DecodingRows:
        """Return the rows of which one has begun its answer; none if none has, since no reader notices a pause then."""
        if not running.started:
            return DecodingRows(0, 0)
        copying_s = running.step_copy_bytes * self._costs.now.grown_s
        return DecodingRows(len(running), running.num_interactive, self._decode_s(running) + copying_s)

    def _decode_s(self, running: RunningRows) -> float:
        """Return the expected seconds of the next decode step, without those of copying buffers. With far more rows
        than were ever measured, it takes at least as long as a chunk of as many tokens: both multiply the weights with
        as many."""
        if len(running) <= FAR_MORE * running.most_measured:
            return running.step_s
        return max(running.step_s, self._costs.now.chunk_s(len(running), 0))

    def observe_gap(self, seconds: float) -> None:
        """Record the measured seconds between the reports of this step and of the last one."""
        if self._planned is not None:
            planned_s, kind = self._planned
            self._budget.observe_gap(planned_s, seconds, kind)
            self._planned = None

    def delays_first_step(self, running: RunningRows, delayed_s: float, waiting: Iterable[tuple[int, int]]) -> bool:
        """Return True if rows of which none has begun its answer should wait for another interactive prompt: see
        `FirstStep`. `delayed_s`: seconds since the first of these rows joined. `waiting`: for each
        interactive prompt that can be computed, the tokens that remain and the tokens that it holds."""
        cost = self._costs.now
        first = FirstStep(len(running), delayed_s, self._budget.slowdown(self._decode_s(running)))
        return first.waits_for(cost.rest_s(remaining, done) for remaining, done in waiting)
