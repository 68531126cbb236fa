"""The tables of the results."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from rich.box import SIMPLE_HEAD
from rich.table import Table

from scripts.benchmarks.serve.report import seconds
from scripts.benchmarks.serve.results import Verdict
from scripts.benchmarks.speculation.cost import WIDTHS, Cost
from scripts.benchmarks.speculation.figures import Result
from worker.engine.step.planner import longest_gap_s

_NO_LOSS = 0.97  # of the speed without drafts
_FREE_TEXT_ROWS = (8, 16)
_speed = "× tokens/s", attrgetter("speed")
_cpu_speed = "× tokens per CPU second", attrgetter("cpu_speed")  # a few per cent are less than a machine's stalls
_per_forward = "tokens a forward", attrgetter("tokens_per_forward")


@dataclass(frozen=True, slots=True)
class _Bar:
    """The least value of a figure in some cases."""

    task: str
    proposer: str
    rows: tuple[int, ...]
    figure: tuple[str, Callable[[Result], float]]
    least: float

    def judge(self, results: Sequence[Result]) -> Iterator[Verdict]:
        """Yield a verdict for each result that the bar is for."""
        label, value = self.figure
        for result in results:
            case = result.case
            if (case.task, case.proposer) == (self.task, self.proposer) and case.rows in self.rows:
                yield Verdict.at_least(f"{case.name}: {label}", self.least, value(result))


_COPYING = [
    bar
    for task, proposer in (("recall", "copies"), ("edit", "prediction"))
    for bar in (
        _Bar(task, proposer, (1, 2, 4), _per_forward, 2.5),
        _Bar(task, proposer, (1, 2), _speed, 1.5),
        _Bar(task, proposer, (4,), _speed, 1.25),
    )
]
_FORCED = [
    bar
    for task, proposer in (("json", "grammar"), ("tools", "copies"))
    for bar in (_Bar(task, proposer, (1, 2, 4), _per_forward, 4.0), _Bar(task, proposer, (1, 2, 4), _speed, 1.5))
]
_HEAD = [
    _Bar("mixed", "mtp-fixed", (1,), _per_forward, 2.0),
    _Bar("mixed", "mtp", (1,), _speed, 1.1),
]


def judge(results: Sequence[Result], step_s: float) -> list[Verdict]:
    """Return the verdicts. A bar without the measurements that it needs is left out. `step_s`: target of a step."""
    return [
        *(verdict for result in results if _gains_nothing(result) for verdict in _without_gain(result, step_s)),
        *(verdict for bar in (*_COPYING, *_FORCED, *_HEAD) for verdict in bar.judge(results)),
        *_network_never_slows("mtp", results),
        *_network_never_slows("draft", results),
    ]


def _gains_nothing(result: Result) -> bool:
    """Return True if there is nothing to copy, or nothing that pays with as many rows. A head's drafts in `count` are
    nearly all right, so `all` has something to gain there."""
    case = result.case
    if case.task == "count":
        return case.proposer == "copies"
    return case.task == "free" and case.proposer in ("copies", "all") and case.rows in _FREE_TEXT_ROWS


def _without_gain(result: Result, step_s: float) -> Iterator[Verdict]:
    name = result.case.name
    label, value = _cpu_speed
    yield Verdict.at_least(f"{name}: {label}", _NO_LOSS, value(result))
    bound_s = longest_gap_s(step_s, result.case.rows / result.plain_tokens_per_s)
    yield Verdict.at_most(f"{name}: longest gap, s", bound_s, result.gap_s)


def _network_never_slows(proposer: str, results: Sequence[Result]) -> Iterator[Verdict]:
    if own := [result for result in results if result.case.proposer == proposer]:
        slowest = min(own, key=attrgetter("speed"))
        yield Verdict.at_least(f"{proposer}, slowest case ({slowest.case.name}): × tokens/s", _NO_LOSS, slowest.speed)


_COLUMNS = (
    "tokens/forward", "accepted", "tokens/s, off", "on", "× tokens/s", "× by CPU", "× with prompts", "host, off", "on",
    "longest gap, off", "on",
)  # fmt: skip
NOTES = (
    "× tokens/s: with drafts relative to without, decode steps alone; × with prompts: of the whole time",
    "× by CPU: tokens per second of CPU time; host: CPU time of the engine's thread per token",
    "tokens/forward: of a row; accepted: tokens of drafts that were right",
)


def line(result: Result) -> str:
    """Return the result in one line, to be printed as soon as it is known."""
    return (
        f"{result.case.name}: {result.tokens_per_forward:.2f} tokens a forward, {result.tokens_per_s:,.0f} tokens/s, "
        f"× {result.speed:.2f}, by CPU time × {result.cpu_speed:.2f}"
    )


def results_table(results: Sequence[Result], model: str, runs: int) -> Table:
    """Return the table of the tasks, with a row for each case."""
    title = f"{model}: drafts against none, the same tokens in all; medians of {runs} pair{'s' * (runs != 1)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in ("task", "rows", "proposer"):
        table.add_column(name, no_wrap=True, justify="right" if name == "rows" else "left")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for _, same in groupby(results, key=lambda result: result.case.task):
        for number, result in enumerate(same):
            table.add_row(
                "" if number else result.case.task, str(result.case.rows), result.case.proposer, *_cells(result)
            )
        table.add_section()
    return table


def _cells(result: Result) -> Iterable[str]:
    return (
        f"{result.tokens_per_forward:.2f}",
        _share(result.accepted_share),
        f"{result.plain_tokens_per_s:,.0f}",
        f"{result.tokens_per_s:,.0f}",
        f"{result.speed:.2f}",
        f"{result.cpu_speed:.2f}",
        f"{result.whole_speed:.2f}",
        _ms(result.plain_host_s),
        _ms(result.host_s),
        seconds(result.plain_gap_s),
        seconds(result.gap_s),
    )


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1000 * seconds:.1f} ms"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"


def cost_table(costs: Sequence[Cost], model: str) -> Table:
    """Return the table of the verify forwards."""
    title = f"{model}: a forward that verifies drafts, in plain steps of as many rows, by its tokens per row"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("rows", justify="right")
    table.add_column("plain step", justify="right")
    for width in WIDTHS:
        table.add_column(str(width), justify="right")
    for cost in costs:
        cells = (f"{cost.relative[width]:.2f}" for width in WIDTHS)
        table.add_row(str(cost.rows), f"{1000 * cost.plain_s:.1f} ms", *cells)
    return table
