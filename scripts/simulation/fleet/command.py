"""The command `scripts/simulate fleet`: its options, its tables and its bars."""

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, replace
from statistics import fmean
from typing import NamedTuple

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from scripts.benchmarks.serve.options import above_0, new_file, positive
from scripts.benchmarks.serve.report import verdict_table
from scripts.benchmarks.serve.results import Verdict
from scripts.simulation.fleet.policies import Aware, Fifo, LeastPrefill, LlmD
from scripts.simulation.fleet.run import Figures, Policy, Run, Setup
from scripts.simulation.fleet.workloads import WORKLOADS

POLICIES: dict[str, Callable[[], Policy]] = {
    "fifo": Fifo,
    "llm-d": LlmD,
    "least-prefill": LeastPrefill,
    "sluice": Aware,
}
_HELP = """\
workloads:
  chat    chats under four system prompts, 18 s between turns
  agents  agents in forty repositories, 13,000 to 40,000 tokens before the first turn, each turn seconds after the last
  rag     questions about four hundred documents
  none    prompts that have nothing in common; with 4 rows more than the workers can do
  huge    prompts that all begin with the same 20,000 tokens; the same
  mixed   chats, agents and rag together
policies:
  fifo           SLUICE_AFFINITY=false: whoever is woken first takes the oldest job
  llm-d          a router that adds scores: 3 for the prefix, 2 for the queue, 2 for free rows
  least-prefill  a router that sends a job where the least prompt work is left, half of the work before it counted
  sluice         the worker's claim, by the Python twin that a test holds equal to its Lua
Routers know all caches and loads exactly and at once. Sluice knows what workers have said of themselves, and of prompts
the marks that clients make of their bytes, from which it estimates tokens.

A worker computes 2,000 prompt tokens in a second at the beginning of a prompt and half as many at 40,000, and keeps
400,000 tokens in its cache. Sessions wait for their answers, so a slower fleet is asked less.

columns, means over the seeds:
  hit      share of the prompt tokens that a cache had
  p50 ...  seconds from the submission to the first token
  out/s    tokens of the answers that have ended
  claims   calls of claim.lua for each job
  regret   the longest that a job waited while a worker had nothing to do, less the estimated time to compute it whole:
           above 0 a worker was left idle for longer than that could be worth; the worst of all seeds

examples:
  scripts/simulate fleet
      all workloads, 8 workers of 4 rows, with the bars (two minutes on two cores)
  scripts/simulate fleet --workloads mixed --rows 16 --seeds 2
      rows are free at nearly all times
  scripts/simulate fleet --workloads mixed --crash 200 --flush 300
      a worker dies and comes back, and the server forgets who holds what
  scripts/simulate fleet --speeds 2 1 1 0.5 --json out.json
      unlike workers, with the figures in a file
The exit code is 1 if a bar is missed. Bars are for 8 equal workers of 4 rows to which nothing happens.
"""


class _Task(NamedTuple):
    workload: str
    policy: str
    setup: Setup
    seed: int


Results = Mapping[tuple[str, str], Sequence[Figures]]  # by workload and policy, one of each seed


def main(arguments: Sequence[str], console: Console) -> int:
    """Simulate, print a table for each workload, and return 0 if no bar is missed."""
    given = _parser().parse_args(arguments)
    speeds = tuple(given.speeds)
    setups = {
        workload: Setup(workload, given.workers, given.rows, speeds=speeds, crash_s=given.crash, flush_s=given.flush)
        for workload in given.workloads
    }
    tasks = [
        _Task(workload, policy, setups[workload], seed)
        for workload in given.workloads
        for policy in given.policies
        for seed in range(1, given.seeds + 1)
    ]
    results = _run(tasks, console)
    for workload in given.workloads:
        console.print(_table(workload, given, {policy: results[workload, policy] for policy in given.policies}))
    has_bars = (given.workers, given.rows, {*speeds}, given.crash, given.flush) == (8, 4, {1.0}, None, None)
    verdicts = judge(results) if has_bars else []
    if verdicts:
        console.print(verdict_table(verdicts, "fleet"))
    if given.json:
        content = {f"{workload}, {policy}": [*map(asdict, runs)] for (workload, policy), runs in results.items()}
        given.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _run(tasks: Sequence[_Task], console: Console) -> Results:
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with progress, ProcessPoolExecutor(os.cpu_count()) as pool:
        shown = progress.add_task("runs", total=len(tasks))
        futures = {pool.submit(simulate, task.setup, task.policy, task.seed): task for task in tasks}
        for _ in as_completed(futures):
            progress.advance(shown)
    found: dict[tuple[str, str], list[Figures]] = {}
    for future, task in futures.items():
        found.setdefault((task.workload, task.policy), []).append(future.result())
    return found


def simulate(setup: Setup, policy: str, seed: int) -> Figures:
    """Run once, and return the figures."""
    return Figures.of(Run(setup, POLICIES[policy](), seed).run())


def mean(runs: Sequence[Figures]) -> Figures:
    """Return the mean of each figure, and of the regrets the worst."""
    means = Figures(*map(fmean, zip(*map(astuple, runs), strict=True)))
    return replace(means, regret_s=max(each.regret_s for each in runs))


def judge(results: Results) -> list[Verdict]:
    """Compare sluice with the bars. A bar whose workload or policies have not run is left out."""
    means = {key: mean(runs) for key, runs in results.items()}
    verdicts = list[Verdict]()

    def value(workload: str, policy: str, name: str) -> float:
        if policy != "best router":
            return float(getattr(means[workload, policy], name))
        both = [float(getattr(means[workload, router], name)) for router in ("llm-d", "least-prefill")]
        return max(both) if name == "hit" else min(both)

    for workload, name, other, bar in _BARS:
        policies = ("llm-d", "least-prefill") if other == "best router" else (other,)
        if any((workload, policy) not in means for policy in (*policies, "sluice")):
            continue
        ratio = value(workload, "sluice", name) / value(workload, other, name)
        label = f"{workload}: {name.removesuffix('_s')} / {other}"
        verdicts.append((Verdict.at_least if name == "hit" else Verdict.at_most)(label, bar, ratio))
    regrets = [each.regret_s for (_, policy), each in means.items() if policy == "sluice"]
    return [*verdicts, Verdict.at_most("regret in seconds, all workloads", 0, max(regrets))] if regrets else verdicts


# The workload, the figure, whose it is divided by, and the bar of the ratio.
_BARS = (
    ("mixed", "hit", "best router", 0.95),
    ("mixed", "hit", "fifo", 1.5),
    ("mixed", "p95_s", "best router", 1.0),
    ("mixed", "p95_s", "fifo", 0.35),
    ("none", "p95_s", "fifo", 1.05),
    ("rag", "p95_s", "fifo", 0.3),
    ("agents", "hit", "fifo", 1.2),
    ("agents", "p99_s", "least-prefill", 1.1),
)


def _table(workload: str, given: argparse.Namespace, results: Mapping[str, Sequence[Figures]]) -> Table:
    title = f"{workload}: {given.workers} workers of {given.rows} rows, {given.seeds} seeds"
    made = Table(title=title, title_justify="left")
    made.add_column("policy", no_wrap=True)
    for name in ("hit", "p50", "p95", "p99", "out/s", "claims", "regret"):
        made.add_column(name, justify="right")
    for policy, runs in results.items():
        found = mean(runs)
        made.add_row(
            policy, f"{found.hit:.3f}", *(f"{each:.2f} s" for each in (found.p50_s, found.p95_s, found.p99_s)),
            f"{found.answers_per_s:,.0f}", f"{found.claims:.1f}" if found.claims else "–", f"{found.regret_s:.2f} s",
        )  # fmt: skip
    return made


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate fleet",
        description="Simulate several workers of one model: which of them takes which job, and what its cache finds.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workloads", choices=WORKLOADS, nargs="+", default=[*WORKLOADS], metavar="NAME",
                        help="default: all")  # fmt: skip
    parser.add_argument("--policies", choices=POLICIES, nargs="+", default=[*POLICIES], metavar="NAME",
                        help="default: all")  # fmt: skip
    parser.add_argument("--workers", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--rows", type=positive, default=4, metavar="N", help="of a worker; default: %(default)s")
    parser.add_argument("--speeds", type=above_0, nargs="+", default=[1.0], metavar="X",
                        help="of the workers, repeated if there are more of these; default: 1")  # fmt: skip
    parser.add_argument("--seeds", type=positive, default=8, metavar="N", help="runs of each; default: %(default)s")
    parser.add_argument("--crash", type=above_0, metavar="S",
                        help="a worker dies after so many of the 420 seconds, and is back a minute later")  # fmt: skip
    parser.add_argument("--flush", type=above_0, metavar="S",
                        help="the server forgets who holds what after so many seconds")  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write the figures of all runs to this file")
    return parser
