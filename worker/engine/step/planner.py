"""Plans the prompts of each step by measured costs. Knows nothing of models, so a simulation can plan as the engine
does."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol, Self, get_args

from sluice.contract.keys import Lane
from worker.engine.step.cost import PLAIN_STEP, CostEstimate, Forward, StepKind, step_kind
from worker.engine.step.plan import Order, PackedTokens, PromptState, StepLimits, in_order, may_advance, no_copies, plan
from worker.engine.step.tuning import (
    ALONE_STEPS,
    COMPUTED_WITHIN_S,
    FIRST_STEP_AT_MOST_S,
    FIRST_STEP_WITHIN_S,
    LONG_GAP,
    MOST_OVERRUN,
    OF_GAPS,
    OF_GAPS_ALIKE,
    OVERRAN,
    OVERRAN_ALIKE,
    OVERRUN_GAPS,
    OVERRUN_MARGIN,
    OVERRUN_RANK,
    SHARED_ALONE_STEPS,
    STALL,
)

# The time that a step has for prefill: how long a gap between two tokens of a row may be, how much longer than planned
# steps last, and how much time the waiting prompts need.
#
# An overrun that repeats is expected again; a single stall of the machine is not, since no plan prevents it.


def longest_gap_s(step_s: float, decode_s: float) -> float:
    """Return the most seconds that may pass between two tokens of a row while prompts wait: three targets, or two and
    a half decode times, if that is longer. A promise of docs/settings.md. `step_s`: target of a step
    (`SLUICE_STEP_MS`)."""
    return max(3 * step_s, 2.5 * decode_s)


def half_gap_s(step_s: float) -> float:
    """Return half of the longest gap of rows that decode fast. Decode steps that take more may make a longer gap, and
    only gaps planned to last more are compared with their plan. `step_s`: target of a step."""
    return longest_gap_s(step_s, 0.0) / 2


@dataclass(frozen=True, slots=True)
class GapLimit:
    """Limits the gap that a step makes between two tokens of its rows."""

    step_s: float  # target of a step
    elapsed_s: float = 0.0  # since the last step's report, most of which prompts have taken

    def verify_s(self, decode_s: float, *, running: bool) -> float:
        """Return the most seconds that the forwards of the step may take with drafts. `decode_s`: without. `running`:
        a decode step runs, whose tokens are delivered at the end of this one."""
        longest_s = longest_gap_s(self.step_s, decode_s)
        # The rest is for what is not predicted, such as rows that leave. `scripts/bench speculation`, test_budget.
        most_s = 0.86 * longest_s
        return (min(most_s, longest_s - decode_s) if running else most_s) - self.elapsed_s


class Overruns:
    """Measured seconds of gaps relative to those planned, of the latest gaps that were planned to last long."""

    def __init__(self) -> None:
        self._gaps = deque(
            [(OVERRUN_MARGIN, PLAIN_STEP)] * OVERRUN_RANK, OVERRUN_GAPS
        )  # ratio, and the kind of the step
        self._expected: float | None = None  # by the gaps so far; None: not computed yet

    def observe(self, ratio: float, kind: StepKind = PLAIN_STEP) -> None:
        """Record a gap that lasted `ratio` times as long as planned."""
        self._gaps.append((ratio, kind))
        self._expected = None

    @property
    def expected(self) -> float:
        """The most seconds that a gap is expected to last, relative to those that are planned."""
        if self._expected is None:
            self._expected = OVERRUN_MARGIN * min(MOST_OVERRUN, sorted(self._counted())[-OVERRUN_RANK])
        return self._expected

    def _counted(self) -> list[float]:
        """Return the overruns that count: all but stalls that have not repeated. At least `OVERRUN_RANK`."""
        gaps = [*self._gaps]
        if max(ratio for ratio, _ in gaps) <= STALL:
            return [ratio for ratio, _ in gaps]
        repeating = _overran([ratio for ratio, _ in gaps[-OF_GAPS:]], OVERRAN)
        kinds = {kind for _, kind in gaps}
        alike = {
            each
            for each in kinds
            if _overran([ratio for ratio, kind in gaps if kind == each][-OF_GAPS_ALIKE:], OVERRAN_ALIKE)
        }
        since = len(gaps) - OF_GAPS if repeating else len(gaps)
        counted = [ratio for i, (ratio, kind) in enumerate(gaps) if ratio <= STALL or i >= since or kind in alike]
        return [*counted, *[OVERRUN_MARGIN] * max(0, OVERRUN_RANK - len(counted))]


def _overran(ratios: Sequence[float], least: int) -> bool:
    return sum(ratio > 1.2 for ratio in ratios) >= least


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


def delays_first_step(rows: int, delayed_s: float, slowdown: float, prompts_s: Iterable[float]) -> bool:
    """Return True if another prompt should be computed before the first decode step of rows of which none has begun its
    answer, so that no reader notices a pause. Prompts that come together take less time without decode steps between
    them: each second of them costs the joined rows a second, and saves every waiting prompt `slowdown` seconds.

    `rows`: that have joined. `delayed_s`: since the first of them joined. `slowdown`: of prompts, once these rows
    decode: see `StepBudget.slowdown`. `prompts_s`: the seconds that each waiting prompt takes."""
    waiting = [*prompts_s]
    shortest_s = min(waiting, default=inf)
    if shortest_s <= FIRST_STEP_WITHIN_S - delayed_s:
        return True
    in_time = shortest_s <= min(FIRST_STEP_WITHIN_S, FIRST_STEP_AT_MOST_S - delayed_s)
    return in_time and rows < len(waiting) * slowdown


_LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True, slots=True)
class DecodingRows:
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
        longest_s = longest_gap_s(self._step_s, 0.0) / self.overrun
        if planned_s >= min(half_gap_s(self._step_s), LONG_GAP * longest_s):
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

    def shared_s(self, running: DecodingRows) -> float:
        """Return the seconds that a step's first forward may take, although they exceed `spare_s`, if several
        interactive prompts share it; 0 if rows decode."""
        return 0.0 if running.rows else SHARED_ALONE_STEPS * self._step_s

    def spare_s(self, running: DecodingRows, elapsed_s: float, backlog: Backlog) -> dict[Lane, float]:
        """Return the seconds that each lane's prompts may take in a step; 0 or less leaves no time. Both lanes share
        the step: time that interactive prompts take is not left for offline ones. `elapsed_s`: seconds of the step so
        far, before the next decode step. `backlog`: the interactive prompts that wait."""
        if not running.rows:
            return dict.fromkeys(_LANES, ALONE_STEPS * self._step_s)
        taken_s = elapsed_s + running.decode_s
        target_s = self._step_s - taken_s
        most_s = longest_gap_s(self._step_s, running.decode_s) / self.overrun - taken_s
        if not running.interactive:  # no gap that a reader notices
            cost = self._costs.now
            least_s = cost.chunk_s(cost.worthwhile, 0)
            return {"interactive": max(target_s, most_s), "batch": max(target_s, min(least_s, most_s))}
        return {"interactive": max(target_s, min(backlog.share_s(running.decode_s), most_s)), "batch": target_s}


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
        if len(running) <= 2 * running.most_measured:
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
        `delays_first_step`. `delayed_s`: seconds since the first of these rows joined. `waiting`: for each
        interactive prompt that can be computed, the tokens that remain and the tokens that it holds."""
        cost = self._costs.now
        slowdown = self._budget.slowdown(self._decode_s(running))
        prompts_s = (cost.rest_s(remaining, done) for remaining, done in waiting)
        return delays_first_step(len(running), delayed_s, slowdown, prompts_s)
