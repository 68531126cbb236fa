"""The results of all runs, and their verdicts against the bars."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from scripts.benchmarks.serve.figures import Figures
from scripts.benchmarks.serve.scenarios import MIXED_LOAD, REMINDED
from scripts.benchmarks.serve.servers import BASELINE, OURS


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one case, measured once."""

    server: str
    scenario: str
    case: str
    figures: Figures
    rate: float | None = None
    load: float | None = None
    error: str | None = None  # of the first turn that failed


@dataclass(frozen=True, slots=True)
class Result:
    """All runs of one case with one server; rate, load and figures are medians."""

    server: str
    scenario: str
    case: str
    rate: float | None
    load: float | None
    figures: Figures
    runs: tuple[Figures, ...]
    error: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        names = "server", "scenario", "case", "rate", "load", "error"
        return {
            **{name: getattr(self, name) for name in names},
            "median": self.figures.as_json(),
            "runs": [figures.as_json() for figures in self.runs],
        }


def gather(outcomes: Iterable[Outcome]) -> list[Result]:
    """Return the results of each case side by side; cases and servers are in the order of their first measurement."""
    cases = dict[tuple[str, str], dict[str, list[Outcome]]]()
    for outcome in outcomes:
        case = cases.setdefault((outcome.scenario, outcome.case), {})
        case.setdefault(outcome.server, []).append(outcome)
    return [_result(runs) for case in cases.values() for runs in case.values()]


def _result(runs: Sequence[Outcome]) -> Result:
    first = runs[0]
    figures = tuple(run.figures for run in runs)
    return Result(
        first.server,
        first.scenario,
        first.case,
        _median(run.rate for run in runs),
        _median(run.load for run in runs),
        Figures.median(figures),
        figures,
        next((run.error for run in runs if run.error), None),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


# The bars


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure against its bar."""

    label: str
    bar: str
    value: float
    holds: bool

    @classmethod
    def at_least(cls, label: str, least: float, value: float) -> "Verdict":
        """Return the verdict on a value that has to be large."""
        return cls(label, f"≥ {least:g}", value, value >= least)

    @classmethod
    def at_most(cls, label: str, most: float, value: float) -> "Verdict":
        """Return the verdict on a value that has to be small."""
        return cls(label, f"≤ {most:g}", value, value <= most)


Value = Callable[[Figures], float]
tokens_per_s: Value = attrgetter("tokens_per_s")
first_p50: Value = attrgetter("first.p50")
first_max: Value = attrgetter("first.max")
gap_max: Value = attrgetter("gap.max")

# By case of a burst: relative to the best other server.
_BURST: dict[str, tuple[tuple[str, Value, float], ...]] = {
    "32 at once": (
        ("tokens/s", tokens_per_s, 1.15),
        ("first token p50", first_p50, 0.5),
        ("last first token", first_max, 0.9),
        ("longest gap", gap_max, 0.3),
    ),
    "8 at once": (
        ("tokens/s", tokens_per_s, 1.05),
        ("first token p50", first_p50, 0.75),
        ("last first token", first_max, 0.95),
    ),
    "4 at once": (("tokens/s", tokens_per_s, 1.05),),
}
_AGENTS: tuple[tuple[str, Value, float], ...] = (
    ("time", attrgetter("seconds"), 0.85),
    ("first token of later turns p50", attrgetter("later_first.p50"), 1.0),
    ("first token of later turns p95", attrgetter("later_first.p95"), 1.0),
)
_REMINDED = 1.05  # time with a system message in each turn, relative to that without
_ALONE = ("tokens/s", tokens_per_s, 1.0), ("first token p50", first_p50, 0.95)
_GOOD = ((0.5, 0.97), (0.75, 0.9))  # load, share of good answers
_SATURATED = (1.0, 1.5, 2.0)  # loads


def judge(results: Sequence[Result], *, plain: bool = True) -> list[Verdict]:
    """Return the verdicts on our worker. A bar without the measurements that it needs is left out.

    `plain`: the model has attention in every layer; a bar of four chats at once is for such a model only.
    """
    ours = [result for result in results if result.server == OURS]
    peers = [result for result in results if result.server not in (OURS, BASELINE)]
    baseline = [result for result in results if result.server == BASELINE]
    return [
        *(verdict for result in ours for verdict in _against_best(result, _same(result, peers), plain)),
        *(verdict for result in ours for verdict in _by_itself(result)),
        *(verdict for result in ours for verdict in _reminded(result, ours)),
        *_steady([result for result in ours if result.scenario == "open"]),
        *(verdict for result in ours for verdict in _against_baseline(result, _same(result, baseline))),
    ]


def _same(result: Result, others: Iterable[Result]) -> list[Result]:
    return [other for other in others if (other.scenario, other.case) == (result.scenario, result.case)]


def _against_best(result: Result, peers: Sequence[Result], plain: bool) -> list[Verdict]:
    if not peers:
        return []
    match result.scenario:
        case "burst" if plain or result.case != "4 at once":
            return [_relative(result, peers, *bar) for bar in _BURST.get(result.case, ())]
        case "alone":
            return [_relative(result, peers, *bar) for bar in _ALONE]
        case "agents":
            return [_relative(result, peers, *bar) for bar in _AGENTS]
        case "prompts":
            return [_relative(result, peers, "time", attrgetter("seconds"), 0.85)]
        case "open" if _at(result, *_SATURATED):
            return [_relative(result, peers, "tokens/s", tokens_per_s, 1.25)]
        case "highest":
            best = max(peer.rate or 0.0 for peer in peers)
            value = (result.rate or 0.0) / best if best else math.inf
            return [Verdict.at_least("highest rate with 90 % good × best", 3, value)]
    return []


def _relative(result: Result, peers: Sequence[Result], label: str, value: Value, bar: float) -> Verdict:
    """Compare a figure with the best of the others; tokens per second are the only one that is best when large."""
    others = [value(peer.figures) for peer in peers]
    name = f"{result.scenario}, {result.case}: {label} × best"
    if value is tokens_per_s:
        return Verdict.at_least(name, bar, value(result.figures) / max(others))
    return Verdict.at_most(name, bar, value(result.figures) / min(others))


def _by_itself(result: Result) -> list[Verdict]:
    name = f"{result.scenario}, {result.case}"
    if result.scenario == "prompts":
        return [Verdict.at_least(f"{name}: share of the packed bare forward", 0.9, result.figures.of_bare)]
    if result.scenario != "open":
        return []
    return [
        Verdict.at_least(f"{name}: share of good answers", share, result.figures.good)
        for load, share in _GOOD
        if _at(result, load)
    ]


def _reminded(result: Result, ours: Iterable[Result]) -> list[Verdict]:
    """Compare the time with a system message in each turn with that of the same case without."""
    case = result.case.removesuffix(REMINDED)
    without = [each for each in ours if (each.scenario, each.case) == (result.scenario, case) and each is not result]
    name = f"{result.scenario}, {result.case}: time × without"
    return [Verdict.at_most(name, _REMINDED, result.figures.seconds / each.figures.seconds) for each in without]


def _steady(results: Sequence[Result]) -> list[Verdict]:
    """Beyond saturation the throughput stays near its highest."""
    highest = max((tokens_per_s(result.figures) for result in results), default=0.0)
    return [
        Verdict.at_least(f"open, {result.case}: tokens/s × our highest", 0.97, tokens_per_s(result.figures) / highest)
        for result in results
        if _at(result, *_SATURATED)
    ]


def _against_baseline(result: Result, baseline: Sequence[Result]) -> list[Verdict]:
    if result.scenario != "mixed" or not baseline:
        return []
    value = result.figures.slowdown.p95 / baseline[0].figures.slowdown.p95
    return [Verdict.at_most(f"mixed, load {MIXED_LOAD:g}: slowdown p95 × baseline", 0.333, value)]


def _at(result: Result, *loads: float) -> bool:
    return result.load is not None and any(math.isclose(result.load, load, rel_tol=0.01) for load in loads)
