"""scripts/simulate [fleet] [options]: simulates ways of planning the engine's steps, or a fleet of workers."""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple
from functools import partial
from math import inf
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.simulation.arrivals import Arrival, burst, from_trace, means, poisson
from scripts.simulation.costs import MODELS, Costs
from scripts.simulation.figures import Bound, Figures
from scripts.simulation.fleet import command as fleet
from scripts.simulation.machine import NONE, Disturbance, Machine
from scripts.simulation.policies import POLICIES, Planner, Policy
from tests.support import growing_memory

DEFAULT_MODELS = ("plain", "hybrid")
LOADS = (0.5, 0.75, 0.8, 1.0, 1.5, 2.0)
BURSTS = (8, 32)
SECONDS = 40.0  # in which requests arrive

Arrive = Callable[[int], Sequence[Arrival]]  # the requests of a run, by seed


def simulate(
    arrivals: Sequence[Arrival],
    policy: Policy,
    costs: Costs,
    *,
    step_s: float,
    seed: int,
    disturbance: Disturbance = NONE,
) -> Figures:
    """Run the requests to their end, and return what their clients saw."""
    machine = Machine(arrivals, Planner(policy, costs, step_s), costs, seed, disturbance)
    machine.run()
    return Figures.of(machine, costs)


def scenarios(costs: Costs, options: argparse.Namespace) -> Iterator[tuple[str, Arrive]]:
    """Yield a name and the arrivals of each scenario."""
    if options.trace:
        recorded = from_trace(options.trace)
        yield options.trace.name, lambda seed: recorded
        return
    for number in options.bursts:
        yield f"{number} at once", partial(burst, number)
    for load in options.loads:
        rate = load * capacity(costs)
        yield f"load {load:g} ({rate:.2f}/s)", partial(poisson, rate, options.seconds)


def capacity(costs: Costs) -> float:
    """Return the requests per second in open arrival for which the bare forwards need all of the time."""
    return costs.capacity(*means())


def main() -> int:
    """Simulate all scenarios, and print a table for each model; with `fleet` as the first argument several workers."""
    if sys.argv[1:2] == ["fleet"]:
        return fleet.main(sys.argv[2:], Console(width=110))
    options = _parser().parse_args()
    if options.memory:
        Console(width=140).print(growing_memory.table(options.runs))
        return 0
    console, results = Console(width=130), dict[str, dict[str, dict[str, dict[str, float]]]]()
    for model in options.models:
        costs = MODELS[model].slower(options.slower)
        table = Table("", "policy", *_COLUMNS, title=f"{model}: medians of {options.runs} runs", title_justify="left")
        for name, arrive in scenarios(costs, options):
            for policy in options.policies:
                figures = _medians(arrive, POLICIES[policy], costs, options)
                results.setdefault(model, {}).setdefault(name, {})[policy] = figures.as_dict()
                table.add_row(name, policy, *_cells(figures))
            bound = _bound(arrive, costs, options)
            results[model][name][_BOUND] = asdict(bound)
            table.add_row(name, _BOUND, _bound_cell(bound), end_section=True)
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", "utf-8")
    return 0


def _medians(arrive: Arrive, policy: Policy, costs: Costs, options: argparse.Namespace) -> Figures:
    seeds, disturbance = range(1, options.runs + 1), Disturbance(stalls_per_s=options.stalls)
    return Figures.median(
        [
            simulate(arrive(seed), policy, costs, step_s=options.step_ms / 1000, seed=seed, disturbance=disturbance)
            for seed in seeds
        ]
    )


def _bound(arrive: Arrive, costs: Costs, options: argparse.Namespace) -> Bound:
    """Return the means of what is possible in the same runs."""
    runs = [astuple(Bound.of(arrive(seed), costs)) for seed in range(1, options.runs + 1)]
    return Bound(*(statistics.fmean(values) for values in zip(*runs, strict=True)))


_BOUND = "possible"  # the row of what no policy can exceed
_COLUMNS = "good", "first p50", "p95", "max", "longest gap", "tokens/s", "slowdown p95", "tokens/forward"


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        f"{figures.good_percent:.0f} %",
        f"{figures.first_p50_s:.2f} s",
        f"{figures.first_p95_s:.2f} s",
        f"{figures.first_max_s:.2f} s",
        f"{figures.longest_gap_s * 1000:.0f} ms",
        f"{figures.tokens_per_s:.1f}",
        f"{figures.slowdown_p95:.1f}",
        f"{figures.tokens_per_forward:.0f}",
    )


def _bound_cell(bound: Bound) -> str:
    """Return the share of good answers that is possible with all arrivals known, and on an idle machine."""
    return f"{bound.together:.0f}, {bound.alone:.0f} %"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate",
        description="Simulate bursts and open arrival with the worker's own planning and measured costs of two models.",
        epilog="`scripts/simulate fleet --help`: several workers instead, and which of them takes which job",
    )
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=["sluice"], help="default: sluice")
    parser.add_argument(
        "--models", choices=MODELS, nargs="+", default=DEFAULT_MODELS, help=f"default: {' '.join(DEFAULT_MODELS)}"
    )
    parser.add_argument("--bursts", type=_count, nargs="*", default=BURSTS, metavar="N", help="default: 8 32")
    parser.add_argument(
        "--loads",
        type=_positive,
        nargs="*",
        default=LOADS,
        metavar="X",
        help="rates, in multiples of what the bare forwards could do; default: 0.5 0.75 0.8 1 1.5 2",
    )
    parser.add_argument("--seconds", type=_positive, default=SECONDS, metavar="S", help="of arrivals; default: 40")
    parser.add_argument("--runs", type=_count, default=5, metavar="N", help="runs with other seeds; default: 5")
    parser.add_argument("--step-ms", type=_positive, default=100.0, metavar="MS", help="SLUICE_STEP_MS; default: 100")
    parser.add_argument("--slower", type=_positive, default=1.0, metavar="X", help="multiple of all measured times")
    parser.add_argument(
        "--stalls", type=_rate, default=0.0, metavar="X", help="stalls of the machine for each second of its work"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="replay this instead: JSON lines of at_s, prompt, answer"
    )
    parser.add_argument(
        "--memory", action="store_true", help="compare ways of reserving memory for answers without a limit instead"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures to this file")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _rate(text: str) -> float:
    return 0.0 if _number(text) == 0 else _positive(text)


def _positive(text: str) -> float:
    if not 0 < _number(text) < inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return float(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


if __name__ == "__main__":
    sys.exit(main())
