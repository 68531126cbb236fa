"""Predicted prefill time, and the time that a step has for prefill without delaying the decoding rows too much."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import get_args

from worker.schedule.fitting import LeastSquares
from worker.schedule.overruns import Overruns, StepKind
from worker.schedule.request import Lane

MIN_CHUNK, MAX_CHUNK = 16, 2048  # tokens of a chunk; above `MAX_CHUNK` a larger chunk is hardly faster
TOKENS_PER_S = 2000.0  # prefill speed assumed before any measurement
# Multiple of the target that a step may last if no row decodes: it then delays only new requests and cancellations.
ALONE_STEPS = 6
# The same for a forward that several interactive prompts share: it delays a new request more, and computes a burst of
# prompts in larger matrices. On 2 cores, tokens of prompts of 75 tokens took 4.5 ms each with six targets, 3.2 with
# fifteen.
SHARED_ALONE_STEPS = 15
# While prompts wait, a gap between two tokens of a row may last this multiple of the target, ...
GAP_STEPS = 3
# ... or at most this multiple of the decode time, if decoding alone takes more than half of that.
GAP_DECODES = 2.5
_GAP_RISE = 4.0  # seconds of a gap for each second that decoding takes beyond that half, up to `GAP_DECODES`
# Part of the longest gap that a step with drafts may take; the rest is for what is not predicted, such as rows that
# leave.
PLANNED = 0.86
# Overruns are recorded only for gaps that were planned to last half of the limit, or this share of the longest gap that
# is planned at present.
_LONG = 0.75
# Waiting prompts get the share of the time with which all are computed before the oldest has waited this many seconds.
COMPUTED_WITHIN_S = 0.5
# Rows that have joined put off their first decode step for at most this many seconds while prompts can be computed, ...
FIRST_STEP_WITHIN_S = 1.5
# ... and beyond that, for prompts that take no longer than it, while this makes first tokens earlier in the mean; at
# most this many seconds in all. `scripts/simulate --slower 1.6` needs 8 s for 32 prompts.
FIRST_STEP_AT_MOST_S = 10.0
# A chunk is worth its pass over the weights if its tokens take at least this multiple of the time of that pass.
MIN_TOKENS_TIME_PER_PASS = 1.0
_WEIGHT = 0.2  # of the newest measurement
_TOKENS_UNIT = 1e3  # tokens are counted in this unit, so that all unknowns have similar magnitude
_CHUNK_UNIT = 1e2  # and the tokens of a chunk in this one
# Prior that length costs nothing: while all prompts have the same length, the cost is assigned to tokens and rows.
_PRIOR = 0.0, 0.1
_PASS_PRIOR = 1e-3, 1e-3  # weak: two chunks of different length tell what a pass costs
_BYTES_UNIT = 1e8  # bytes are counted in this unit
_COPIED_BYTES_PER_S = 2e9  # assumed before any measurement
_GROWTH_PRIOR = 1e-3  # weak: buffers grow rarely, and one growth measures the cost well
_GUESS = 0.1  # weight of the initial guess, relative to one measurement


_LANES: tuple[Lane, ...] = get_args(Lane)


@dataclass(frozen=True, slots=True)
class Running:
    """The rows that decode."""

    rows: int
    interactive: int  # of them
    decode_s: float = 0.0  # expected seconds of their next decode step


@dataclass(frozen=True, slots=True)
class Backlog:
    """The interactive prompts that wait."""

    seconds: float = 0.0  # that computing all of them takes
    oldest_s: float = 0.0  # that the oldest has waited

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


def longest_gap_s(step_s: float, decode_s: float) -> float:
    """Return the most seconds that may pass between two tokens of a row while prompts wait. `step_s`: target of a step.

    That is `GAP_STEPS` targets while decoding takes at most half of them, and rises to `GAP_DECODES` decode times."""
    gap_s = GAP_STEPS * step_s
    return max(gap_s, min(GAP_DECODES * decode_s, gap_s + _GAP_RISE * (decode_s - half_gap_s(step_s))))


def half_gap_s(step_s: float) -> float:
    """Return half of the longest gap of rows that decode fast. Decode steps that take more may make a longer gap, and
    only gaps planned to last more are compared with their plan. `step_s`: target of a step."""
    return GAP_STEPS * step_s / 2


@dataclass(frozen=True, slots=True)
class GapLimit:
    """Limits the gap that a step makes between two tokens of its rows."""

    step_s: float  # target of a step
    elapsed_s: float = 0.0  # since the last step's report, most of which prompts have taken

    def verify_s(self, decode_s: float, *, running: bool) -> float:
        """Return the most seconds that the forwards of the step may take with drafts. `decode_s`: without. `running`:
        a decode step runs, whose tokens are delivered at the end of this one."""
        longest_s = longest_gap_s(self.step_s, decode_s)
        most_s = min(PLANNED * longest_s, longest_s - decode_s) if running else PLANNED * longest_s
        return most_s - self.elapsed_s


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Seconds that a prompt's chunk takes, and that its row takes to join the decoding rows, which copies its cache."""

    forward_s: float = 0.0  # fixed cost of a chunk: a pass over the weights
    token_s: float = 0.0  # for each token of the chunk
    before_s: float = 0.0  # for each pair of a token of the chunk and one before it
    join_s: float = 0.0  # fixed cost of a join
    joined_s: float = 0.0  # for each token of the joining row
    grown_s: float = 0.0  # for each byte of the batch's buffers that is copied to make room for the row

    def of(self, tokens: int, done: int) -> float:
        """Return the seconds that a chunk takes after `done` tokens of its prompt."""
        return self.forward_s + tokens * (self.token_s + (done + tokens / 2) * self.before_s)

    def join(self, tokens: int, growth: int = 0) -> float:
        """Return the seconds that a row of `tokens` tokens takes to join, if `growth` bytes of buffers are copied."""
        return self.join_s + tokens * self.joined_s + growth * self.grown_s

    @property
    def worthwhile(self) -> int:
        """Length in tokens of the shortest chunk that is worth its pass over the weights, between `MIN_CHUNK` and
        `MAX_CHUNK`."""
        return max(MIN_CHUNK, min(MAX_CHUNK, ceil(MIN_TOKENS_TIME_PER_PASS * self.forward_s / max(self.token_s, 1e-9))))

    def within(self, seconds: float, done: int) -> int:
        """Return the length in tokens of the longest chunk that takes at most `seconds`, after `done` tokens of its
        prompt. At most `MAX_CHUNK`; 0 if no chunk is that short."""
        spare_s, first_s = seconds - self.forward_s, self.token_s + done * self.before_s
        if spare_s <= 0:
            return 0
        # The solution of `of(tokens, done) == seconds`, written so that `before_s` may be 0.
        mean_s = (first_s + sqrt(first_s**2 + 2 * self.before_s * spare_s)) / 2
        return int(min(MAX_CHUNK, spare_s / max(mean_s, 1e-9)))


class StepBudget:
    """Keeps the time of a step near its target, by the measured times of prefill and decoding."""

    def __init__(self, step_s: float, tokens_per_s: float = TOKENS_PER_S, *, least: int = MIN_CHUNK) -> None:
        """`step_s`: target seconds of a step. `tokens_per_s`: prefill speed assumed before any measurement. `least`:
        tokens of the shortest chunk that is measured; shorter chunks mostly measure overhead."""
        self._step_s = step_s
        self._least = least
        self._tokens, self._joins = LeastSquares(_PRIOR), LeastSquares((*_PRIOR, _GROWTH_PRIOR))
        self._passes = LeastSquares(_PASS_PRIOR)  # seconds of chunks by their passes and tokens
        # Current time of a token relative to its long-term average. It follows changes of the device quickly, while the
        # cost of a token's position is measured only by long prompts, which are rare.
        self._pace = 1.0
        self._overruns = Overruns()
        self._tokens.observe((_GUESS, 0.0), _GUESS / tokens_per_s)
        self._joins.observe((_GUESS, 0.0, 0.0), 0.0)
        self._joins.observe((0.0, 0.0, _GUESS), _GUESS * _BYTES_UNIT / _COPIED_BYTES_PER_S)
        self._forward_s = 0.0  # seconds of a pass over the weights
        self._most_forward_s = 0.0  # upper limit of that

    def observe_chunk(self, tokens: int, done: float, seconds: float, *, cuts: int = 0, rows: int = 1) -> None:
        """Record the measured seconds of a chunk of `tokens`, after `done` tokens of its prompt. `cuts`: number of cuts
        within the chunk, each of which took another pass over the weights. `rows`: number of prompts that computed such
        a chunk in one forward; `done` is their mean then."""
        if rows * tokens >= self._least:
            self._observe_passes(1 + cuts, rows * tokens, (done + tokens / 2) / _TOKENS_UNIT, seconds)
        seconds -= cuts * self._forward_s
        if rows * tokens < self._least or seconds <= 0:
            return
        token_s = max(seconds - self._forward_s, seconds / 2) / (rows * tokens)
        before = (done + tokens / 2) / _TOKENS_UNIT
        usual_s, before_s = self._tokens.costs()
        pace = token_s / max(usual_s + before * before_s, 1e-9)
        self._tokens.observe((1.0, before), token_s / self._pace)
        pace = min(pace, 2 * self._pace)
        self._pace += _WEIGHT * (pace - self._pace)

    def _observe_passes(self, passes: int, tokens: int, before: float, seconds: float) -> None:
        """Learn from a chunk what a pass over the weights costs. `before`: tokens before it, in `_TOKENS_UNIT`."""
        _, before_s = self._tokens.costs()
        self._passes.observe((passes, tokens / _CHUNK_UNIT), seconds / self._pace - tokens * before * before_s)
        self._forward_s = min(self._most_forward_s, self._pace * self._passes.costs()[0])

    def observe_forward(self, seconds: float) -> None:
        """Record the estimated seconds of a decode step of one row: a pass over the weights takes at most as long."""
        self._most_forward_s = seconds
        self._forward_s = min(seconds, self._forward_s or seconds)

    def observe_join(self, tokens: int, growth: int, seconds: float) -> None:
        """Record the measured seconds of a row's join. `tokens`: its length; `growth`: bytes of buffers copied."""
        self._joins.observe((1.0, tokens / _TOKENS_UNIT, growth / _BYTES_UNIT), seconds)

    @property
    def cost(self) -> PromptCost:
        """Current estimate of the prefill and join costs."""
        token_s, before_s = (self._pace * cost for cost in self._tokens.costs())
        join_s, joined_s, grown_s = self._joins.costs()
        return PromptCost(
            self._forward_s, token_s, before_s / _TOKENS_UNIT, join_s, joined_s / _TOKENS_UNIT, grown_s / _BYTES_UNIT
        )

    def observe_gap(self, planned_s: float, seconds: float, kind: StepKind | None = None) -> None:
        """Record the measured seconds of a gap between two tokens, which was planned to last `planned_s`. Short ones,
        which could not become too long, are ignored. `kind`: of the step that has made it; None: it computed no more
        than a chunk."""
        longest_s = GAP_STEPS * self._step_s / self.overrun
        if planned_s >= min(half_gap_s(self._step_s), _LONG * longest_s):
            self._overruns.observe(seconds / planned_s, kind or StepKind())

    @property
    def overrun(self) -> float:
        """The most seconds that a long gap is expected to last, relative to those that are planned."""
        return self._overruns.expected

    def slowdown(self, decode_s: float) -> float:
        """Return the seconds by which each second of prompts takes longer next to interactive rows whose decode step
        takes `decode_s`: for every chunk, such a step and another pass over the weights. Infinite if they leave no time
        for prompts."""
        cost_s = decode_s + self.cost.forward_s
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
        least_s = self.cost.of(self.cost.worthwhile, 0)
        if not running.interactive:  # no gap that a reader notices
            return {"interactive": max(target_s, most_s), "batch": max(target_s, min(least_s, most_s))}
        wanted_s = max(backlog.share_s(running.decode_s), least_s)
        return {"interactive": max(target_s, min(wanted_s, most_s)), "batch": target_s}
