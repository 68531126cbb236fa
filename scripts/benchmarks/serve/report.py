"""Tables of the results, for the terminal."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from scripts.benchmarks.serve.bare import Bare
from scripts.benchmarks.serve.figures import GOOD_FIRST_S, GOOD_GAP_S, Figures
from scripts.benchmarks.serve.results import Result, Verdict
from scripts.benchmarks.serve.scenarios import SCENARIOS

LATE_S = 0.05  # of the client; beyond it the figures describe the client too

Columns = dict[str, Callable[[Figures], str]]


def seconds(value: float) -> str:
    """Write seconds: milliseconds below a second."""
    if math.isnan(value):
        return "–"
    return f"{value * 1000:,.0f} ms" if value < 1 else f"{value:,.2f} s"


def _share(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.0%}"


_THROUGHPUT: Columns = {"tokens/s": lambda f: f"{f.tokens_per_s:.1f}", "of bare": lambda f: _share(f.of_bare)}
_FIRST: Columns = {
    "first p50": lambda f: seconds(f.first.p50),
    "p95": lambda f: seconds(f.first.p95),
    "max": lambda f: seconds(f.first.max),
}
_GAPS: Columns = {"gap p50": lambda f: seconds(f.gap.p50), "gap p99": lambda f: seconds(f.gap.p99),
                  "longest": lambda f: seconds(f.gap.max)}  # fmt: skip
_GOOD: Columns = {"good": lambda f: _share(f.good), "good/s": lambda f: f"{f.good_per_s:.2f}"}
_END: Columns = {"end p50": lambda f: seconds(f.end.p50), "end p95": lambda f: seconds(f.end.p95)}
_SLOWDOWN: Columns = {"slowdown p95": lambda f: "–" if math.isnan(f.slowdown.p95) else f"{f.slowdown.p95:.1f}"}
_TENANT: Columns = {"worst tenant": lambda f: _share(f.worst_tenant_good)}
_OFFLINE: Columns = {"offline tokens/s": lambda f: f"{f.offline_tokens_per_s:.1f}"}
_AGENTS: Columns = {
    "seconds": lambda f: f"{f.seconds:.2f}",
    "later first p50": lambda f: seconds(f.later_first.p50),
    "p95": lambda f: seconds(f.later_first.p95),
    "found": lambda f: _share(f.found),
}
_AT_ONCE = _THROUGHPUT | _FIRST | _GAPS | _END


def columns(scenario: str, *, tenants: bool = False, offline: bool = False) -> Columns:
    """Return the columns of a scenario's table; the JSON has all figures."""
    if scenario == "prompts":
        speed: Columns = {
            "seconds": lambda f: f"{f.seconds:.2f}",
            "prompt tokens/s": lambda f: f"{f.prompt_tokens / f.seconds:.0f}",
            "of bare": _THROUGHPUT["of bare"],
        }
        return speed | _FIRST
    if scenario == "agents":
        return _AGENTS | _THROUGHPUT | _GAPS
    if scenario in ("burst", "alone"):
        return _AT_ONCE
    more = (_TENANT if tenants else {}) | (_OFFLINE if offline else {})
    return _GOOD | _THROUGHPUT | _FIRST | _GAPS | _END | _SLOWDOWN | more


def tables(results: Sequence[Result], *, model: str, runs: int, tenants: bool, offline: bool) -> list[Table]:
    """Return a table for each scenario, with a row for each case and server."""
    made = list[Table]()
    for scenario, group in groupby(sorted(results, key=_order), key=lambda result: result.scenario):
        shown = columns(scenario, tenants=tenants, offline=offline)
        title = f"{model}: {scenario}, {SCENARIOS[scenario]}; median of {runs} run{'s' * (runs != 1)}"
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for name in ("case", "server"):
            table.add_column(name, no_wrap=True)
        for name in shown:
            table.add_column(name, justify="right")
        for _, same in groupby(group, key=lambda result: result.case):
            for number, result in enumerate(same):
                name = _name(result) if number == 0 or result.scenario == "highest" else ""
                table.add_row(name, result.server, *(write(result.figures) for write in shown.values()))
            table.add_section()
        made.append(table)
    return made


def _order(result: Result) -> int:
    return [*SCENARIOS].index(result.scenario)


def _name(result: Result) -> str:
    if result.scenario != "highest":
        return result.case
    return f"load {result.load or 0:.2f} ({result.rate or 0:.2f}/s)"


def notes(results: Sequence[Result]) -> list[str]:
    """Return what a reader of the tables has to know about failures and about the client."""
    lines = [f"good: first token within {GOOD_FIRST_S:g} s and no gap above {GOOD_GAP_S * 1000:.0f} ms"]
    extra = [result.figures.client_extra_s for result in results if not math.isnan(result.figures.client_extra_s)]
    if extra:
        lines.append(f"first tokens reach our clients {seconds(max(extra))} after the worker's own time, p50 at most")
    for result in results:
        where = f"{result.scenario}, {result.case}, {result.server}"
        if result.error:
            failed = sum(run.failed for run in result.runs)
            lines.append(f"{where}: {failed:.0f} turns failed; the first: {result.error}")
        if result.figures.client_late_s > LATE_S:
            lines.append(f"{where}: the client sent up to {seconds(result.figures.client_late_s)} late")
    return lines


def bare_table(bare: Bare, model: str, rates: str) -> Table:
    """Return the table of the bare forwards; `rates` says what load 1 is."""
    shapes = bare.as_json()
    title = f"{model}: milliseconds of a bare forward, rows x tokens\n{rates}"
    table = Table(*shapes, title=title, title_justify="left")
    table.add_row(*(f"{value:,.1f}" for value in shapes.values()))
    return table


def verdict_table(verdicts: Iterable[Verdict], model: str) -> Table:
    """Return the table of the bars."""
    table = Table(
        "measured", "bar", "came to", "holds", title=f"{model}: sluice against its bars", title_justify="left"
    )
    for verdict in verdicts:
        holds = "[green]yes" if verdict.holds else "[red]no"
        table.add_row(verdict.label, verdict.bar, f"{verdict.value:.2f}", holds)
    return table
