"""Ways of reserving memory for answers, compared without a model: the worker's admission on a virtual clock."""

import heapq
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from rich.table import Table

from sluice.contract.keys import Lane
from worker.engine.admission.classes import Decoding
from worker.engine.admission.decision import AdmissionLimits, RowEstimate, group_lengths
from worker.engine.admission.grouping import StepCost
from worker.engine.admission.plan import NO_GROUP, AdmissionPlan, AnswerLengths, in_groups, plan_admission
from worker.engine.admission.tuning import QUANTILE
from worker.engine.memory import BUFFER_TOKENS, KVLayers, MemoryModel

CONTEXT = 32_768  # tokens
FULL_ROWS = 2  # that fit into memory as long as the context: short memory shows what rules differ in
# A model with 8 billion parameters in 4 bits on a laptop with 400 GB/s: its weights, and 128 KiB for each token.
COSTS = MemoryModel(weights_bytes=4_500_000_000, kv_layers=(KVLayers(131_072, 4_096),), vocab=150_000)
STEP = StepCost(group_s=0.012, row_s=0.000_4, cell_s=3.3e-7)
PREFILL_TOKENS_PER_S = 4_000.0  # most of a prompt is cached
COPY_BYTES_PER_S = 50e9
# Tokens, as logs of chats have them: (median, sigma of the logarithm).
PROMPT, ANSWER = (900, 1.1), (300, 1.1)
LONG, LONG_ANSWER = 0.02, (8_000, 28_000)  # share of answers that are much longer: reasoning, whole files
TICK = 16  # tokens of each row between two plans
MAX_ROWS = 64


@dataclass(frozen=True)
class Rule:
    """How memory is reserved for an answer whose request states no limit."""

    limit: int | None = None  # the answer is cut to this, which is reserved; None: it is not cut
    quantile: float | None = None  # reserved for recent answers, and grown; None: the limit is reserved in full


RULES = {
    "in full": Rule(),
    "1,024, cut": Rule(limit=1_024),
    **{f"{share:.0%} of recent": Rule(quantile=share) for share in (0.5, 0.7, QUANTILE, 0.9, 0.95)},
}


@dataclass(slots=True)
class Row:
    """A request, and what it has."""

    id: str
    at_s: float
    prompt: int
    answer: int  # in the end
    limit: int
    lane: Lane = "interactive"
    stated: bool = False  # its request states the limit, which is reserved for it
    reserved: int = 0
    drawn: int = 0
    group: int = NO_GROUP
    overtaken: int = 0
    preempted: bool = False
    held: bool = False  # its cache is saved while it waits
    first_s: float | None = None
    ended_s: float = 0.0


@dataclass(frozen=True)
class Figures:
    """Figures of a run."""

    tokens_per_s: float
    rows: float  # mean
    first_p50_s: float
    first_p95_s: float
    end_p50_s: float
    preempted: float  # for each 100 answers
    again_percent: float  # tokens that are computed again, of all tokens
    cut_percent: float
    overtaken: float  # most rows that came later and began before one


class Machine:
    """Runs requests to their end under a rule. Their ids are numbers, in the order of arrival."""

    def __init__(self, rows: Sequence[Row], rule: Rule, full_rows: float = FULL_ROWS, context: int = CONTEXT) -> None:
        """`full_rows`: that fit into memory as long as `context`."""
        self._rule = rule
        one, two = (COSTS.peak_bytes([[context] * number]) for number in (1, 2))
        self.limits = AdmissionLimits(COSTS, one + round((full_rows - 1) * (two - one)), MAX_ROWS)
        self._lengths = AnswerLengths(rule.quantile or QUANTILE)
        self._arriving = [(row.at_s, int(row.id), row) for row in rows]
        heapq.heapify(self._arriving)
        self.waiting: list[Row] = []
        self.active: list[Row] = []  # the oldest first
        self._rows = rows
        self.now_s = self._row_s = 0.0
        self._preemptions = self._again = self._overtaken = 0

    def run(self) -> Figures:
        """Run until all have ended."""
        while self.plan():
            self.decode()
        return self._figures()

    def plan(self) -> AdmissionPlan | None:
        """Plan what has arrived, apply the plan, and return it; None if all requests have ended."""
        if not (self._arriving or self.waiting or self.active):
            return None
        if not (self.waiting or self.active):
            self.now_s = max(self.now_s, self._arriving[0][0])
        while self._arriving and self._arriving[0][0] <= self.now_s:
            self.waiting.append(heapq.heappop(self._arriving)[2])
        plan = self._plan()
        self._apply(plan)
        return plan

    def _plan(self) -> AdmissionPlan:
        return plan_admission(
            [self.estimate(row) for row in self.waiting],
            [self.estimate(row) for row in self.active],
            self._decoding(),
            (),
            self.limits,
        )

    def _decoding(self) -> Decoding:
        numbers = sorted({row.group for row in self.active})
        for row in self.active:
            row.group = numbers.index(row.group)
        groups = [[row for row in self.active if row.group == number] for number in range(len(numbers))]
        lengths = [[row.prompt + row.drawn for row in group] for group in groups]
        return Decoding(STEP, lengths, [[row.prompt + row.reserved for row in group] for group in groups])

    def estimate(self, row: Row) -> RowEstimate:
        """Return the estimate of a row that waits or is active."""
        waits, grows = row.group == NO_GROUP, self._rule.quantile is not None and not row.stated
        likely = min(row.limit, self._lengths.likely(row.lane, row.drawn))
        must_grow = row.reserved < min(row.limit, row.drawn + TICK)
        least = min(row.limit, row.drawn + BUFFER_TOKENS) if must_grow else 0
        reserved = row.reserved
        if waits:
            least = row.drawn + 1
            reserved = likely if grows else row.limit
        held = COSTS.row_bytes(row.prompt + row.drawn) if waits and row.held else 0
        return RowEstimate(
            row.id, row.lane, row.prompt, reserved, row.group, row.overtaken, row.preempted, held,
            grows=grows, least=least, likely=likely, age=int(row.id),
        )  # fmt: skip

    def _apply(self, plan: AdmissionPlan) -> None:
        rows = {row.id: row for row in (*self.waiting, *self.active)}
        for id in plan.drop_caches:
            rows[id].held = False
        for id, overtaken in plan.overtaken.items():
            rows[id].overtaken = overtaken
            self._overtaken = max(self._overtaken, overtaken)
        assert not plan.refuse
        assert not plan.growth.cut
        for id in plan.preempt:
            self._preempt(rows[id])
        for id, tokens in plan.reserve.items():
            rows[id].reserved = tokens
        for id in plan.growth.move:
            rows[id].group = 1 + max(row.group for row in self.active)
            self.now_s += COSTS.row_bytes(rows[id].prompt + rows[id].drawn) / COPY_BYTES_PER_S
        for id in plan.admit:
            self._admit(rows[id])

    def _preempt(self, row: Row) -> None:
        self._preemptions += 1
        self.active.remove(row)
        row.group, row.overtaken = NO_GROUP, 0
        row.preempted = row.held = True
        waiting = sorted((row, *(each for each in self.waiting if each.preempted)), key=lambda row: int(row.id))
        self.waiting = [*waiting, *(each for each in self.waiting if not each.preempted)]
        reserved = COSTS.peak_bytes([[each.prompt + each.reserved] for each in self.active])
        for each in reversed(waiting):
            if self._held_bytes() + reserved > self.limits.max_bytes:
                each.held = False

    def _held_bytes(self) -> int:
        return sum(COSTS.row_bytes(row.prompt + row.drawn) for row in self.waiting if row.held)

    def _admit(self, row: Row) -> None:
        self.waiting.remove(row)
        tokens = row.prompt + row.drawn
        if row.held:
            self.now_s += COSTS.row_bytes(tokens) / COPY_BYTES_PER_S
        else:
            self.now_s += tokens / PREFILL_TOKENS_PER_S
            self._again += tokens if row.preempted else 0
        row.held = False
        (estimate,) = in_groups([self.estimate(row).reserving(row.reserved)], self._decoding(), ())
        beside = [self.estimate(each) for each in self.active]
        fits = COSTS.peak_bytes(group_lengths([*beside, estimate])) <= self.limits.max_bytes
        row.group = estimate.group if fits else 1 + max(each.group for each in self.active)
        self.active = sorted((*self.active, row), key=lambda row: int(row.id))

    def decode(self) -> None:
        """Let each active row draw `TICK` tokens."""
        if not self.active:
            return
        lengths = self._decoding().lengths
        seconds = TICK * STEP.step_s(lengths)
        self.now_s += seconds
        self._row_s += seconds * len(self.active)
        for row in [*self.active]:
            row.first_s = self.now_s if row.first_s is None else row.first_s
            row.drawn = min(row.answer, row.limit, row.drawn + TICK)
            if row.drawn == min(row.answer, row.limit):
                row.ended_s = self.now_s
                self.active.remove(row)
                self._lengths.observe(row.lane, row.drawn)

    def _figures(self) -> Figures:
        rows, last_s = self._rows, self.now_s
        firsts = [(row.first_s or 0.0) - row.at_s for row in rows]
        drawn, computed = sum(row.drawn for row in rows), sum(row.prompt + row.drawn for row in rows)
        return Figures(
            drawn / last_s,
            self._row_s / last_s,
            statistics.median(firsts),
            statistics.quantiles(firsts, n=20, method="inclusive")[-1],
            statistics.median(row.ended_s - row.at_s for row in rows),
            100 * self._preemptions / len(rows),
            100 * self._again / computed,
            100 * sum(row.answer > row.limit for row in rows) / len(rows),
            self._overtaken,
        )


def requests(number: int, rate: float | None, seed: int, rule: Rule) -> Iterator[Row]:
    """Yield requests that arrive at once, or `rate` per second."""
    dice, at_s = Random(seed), 0.0
    for index in range(number):
        at_s += dice.expovariate(rate) if rate else 0.0
        prompt, answer = (1 + int(median * dice.lognormvariate(0, sigma)) for median, sigma in (PROMPT, ANSWER))
        answer = dice.randint(*LONG_ANSWER) if dice.random() < LONG else answer
        prompt = min(prompt, CONTEXT // 2)
        room = CONTEXT - prompt
        yield Row(str(index), at_s, prompt, min(answer, room), min(room, rule.limit or room))


def table(runs: int) -> Table:
    """Return the medians of several runs for each rule."""
    columns = "tokens/s", "rows", "first p50", "p95", "end p50", "preempted", "again", "cut", "overtaken"
    shown = Table("", "reserved", *columns, title=f"memory: medians of {runs} runs", title_justify="left")
    for name, number, rate in ("200 at once", 200, None), ("0.5/s", 400, 0.5):
        for rule_name, rule in RULES.items():
            each = [Machine([*requests(number, rate, seed, rule)], rule).run() for seed in range(1, runs + 1)]
            shown.add_row(name, rule_name, *_cells(each))
        shown.add_section()
    return shown


def _cells(runs: Sequence[Figures]) -> Iterator[str]:
    for name, unit, digits in (
        ("tokens_per_s", "", 0), ("rows", "", 1), ("first_p50_s", " s", 1), ("first_p95_s", " s", 1),
        ("end_p50_s", " s", 1), ("preempted", " in 100", 1), ("again_percent", " %", 1), ("cut_percent", " %", 1),
        ("overtaken", "", 0),
    ):  # fmt: skip
        yield f"{statistics.median(getattr(run, name) for run in runs):.{digits}f}{unit}"
