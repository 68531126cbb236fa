"""The tables of the results."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from scripts.benchmarks.serve.report import seconds
from scripts.benchmarks.speculation.cost import WIDTHS, Cost
from scripts.benchmarks.speculation.figures import Result

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
