"""The command `scripts/bench capacity`: its options and its tables."""

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.benchmarks.capacity import claim
from scripts.benchmarks.capacity.claim import ClaimCost
from scripts.benchmarks.capacity.load import Figures, measure
from scripts.benchmarks.capacity.process import Load
from scripts.benchmarks.conditions import conditions
from scripts.benchmarks.serve.figures import finite
from scripts.benchmarks.serve.options import above_0, new_file, positive
from scripts.benchmarks.serve.report import seconds, verdict_table
from scripts.benchmarks.serve.results import Verdict
from tests.support.stack import embedded_binary

SUMMARY = "capacity: one server under many simulated workers, and the cost of a claim"
PARTS = ("load", "claim")
EXAMPLES = """\
examples:
  scripts/bench capacity
      8, 32, 128 and 512 workers at 10 and 50 steps a second, and the cost of a claim (five minutes)
  scripts/bench capacity --part load --workers 128 --steps 10 --seconds 30
      the load that has bars
  scripts/bench capacity --part claim --server /usr/bin/redis-server /usr/bin/valkey-server
      the cost of a claim on two servers, one after the other
  scripts/bench capacity --workers 64 --rows 32 --json out.json
      workers with more rows, with all figures in a file

A worker is the worker's own queue code around an engine that appends one token to each row in each step: it claims,
appends, renews its leases and publishes its presence as a real one does. As many chats run as there are rows. Of these
sluice.Client reads --read, whose tokens are timed; a socket that drops what comes is subscribed to the others. The
server writes its changes to a file, as that of `sluice up`.

kept: the share of the load's tokens that were appended. Below 90 % the load is another: late tokens share an append.
of a token: the server's CPU time for a token, with all else that it did, which hardly depends on what else the machine
does. One core carries as many tokens a second as a second has of these times.
full: what limits the run. `server`: its one core is busy, which is its capacity. `load`: a process of the benchmark is
busy, or its event loop wakes more than 10 ms late; `machine`: all cores are busy. Then the server could do more: give
the load more --processes, or a machine with more cores and nothing else to do.
"""
_BARS_S = {"pickup p99": 0.015, "token p99": 0.020}  # at 128 workers of 16 rows and 10 steps a second


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = f"{SUMMARY}.", EXAMPLES
    parser.add_argument("--part", choices=PARTS, nargs="+", default=[*PARTS], metavar="NAME",
                        help="load, claim; default: both")  # fmt: skip
    parser.add_argument("--server", type=_binary, nargs="+", metavar="PATH",
                        help="binaries of Redis or Valkey; default: the embedded server")  # fmt: skip
    parser.add_argument("--workers", type=positive, nargs="+", default=[8, 32, 128, 512], metavar="N",
                        help="default: 8 32 128 512")  # fmt: skip
    parser.add_argument("--steps", type=above_0, nargs="+", default=[10.0, 50.0], metavar="N",
                        help="steps of a worker in a second, each a token for every row; default: 10 50")  # fmt: skip
    parser.add_argument("--rows", type=positive, default=16, metavar="N", help="rows of a worker; default: %(default)s")
    parser.add_argument("--tokens", type=positive, default=100, metavar="N",
                        help="tokens of an answer, on average; default: %(default)s")  # fmt: skip
    parser.add_argument("--read", type=positive, default=64, metavar="N",
                        help="chats that sluice.Client reads; default: %(default)s")  # fmt: skip
    parser.add_argument("--seconds", type=above_0, default=10.0, metavar="S",
                        help="measured time of a load; default: %(default)g")  # fmt: skip
    parser.add_argument("--processes", type=positive, default=max(2, (os.cpu_count() or 1) // 2), metavar="N",
                        help="of workers, and half as many of chats; default: half the cores, at least 2")  # fmt: skip
    parser.add_argument("--calls", type=_calls, default=50, metavar="N",
                        help="calls of each case of the part claim; default: %(default)s")  # fmt: skip
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures to this file")


def _calls(text: str) -> int:
    if (calls := positive(text)) < 2:
        raise argparse.ArgumentTypeError(f"{text}: the quarters of a case need at least 2 calls")
    return calls


def _binary(text: str) -> str:
    if not (found := shutil.which(text)):
        raise argparse.ArgumentTypeError(f"{text}: it is no program; give the path of redis-server or valkey-server")
    return found


def main(console: Console, given: argparse.Namespace) -> bool:
    """Measure, print the tables, and return True if all was measured and no bar is missed."""
    figures, costs = list[Figures](), list[ClaimCost]()
    complete = True
    try:
        for binary in given.server or [embedded_binary()]:
            if "claim" in given.part:
                with console.status(f"claims on {binary}"):
                    costs += (measured := claim.measure(binary, given.calls))
                console.print(_claims_table(measured), verdict_table(claim.judge(measured), measured[0].server))
            if "load" in given.part:
                for load in _loads(given):
                    with console.status(f"{load.workers} workers, {load.steps:g} steps a second, on {binary}"):
                        figures.append(measure(binary, load, given.seconds, given.processes))
    except RuntimeError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        complete = False
    verdicts = judge(figures)
    if figures:
        console.print(loads_table(figures), commands_table(figures), *notes(figures), sep="\n")
    if verdicts:
        console.print(verdict_table(verdicts, "capacity"))
    if given.json:
        _save(given.json, figures, costs)
    return complete and all(verdict.holds for verdict in [*verdicts, *_judge_claims(costs)])


def _loads(given: argparse.Namespace) -> list[Load]:
    return [
        Load(workers, given.rows, steps, given.tokens, given.read) for steps in given.steps for workers in given.workers
    ]


def judge(figures: Sequence[Figures]) -> list[Verdict]:
    """Compare the load that has bars with them; of other loads none is expected."""
    barred = [each for each in figures if (each.load.workers, each.load.rows, each.load.steps) == (128, 16, 10.0)]
    return [
        Verdict.at_most(f"{name} in ms, {each.server}, {_name(each.load)}", 1000 * bar, 1000 * value)
        for each in barred
        for (name, bar), value in zip(_BARS_S.items(), (each.pickup.p99, each.token.p99), strict=True)
    ]


def _judge_claims(costs: Sequence[ClaimCost]) -> list[Verdict]:
    servers = dict.fromkeys(cost.server for cost in costs)
    return [verdict for name in servers for verdict in claim.judge([cost for cost in costs if cost.server == name])]


def _name(load: Load) -> str:
    return f"{load.workers} x {load.rows} x {load.steps:g}/s"


def loads_table(figures: Sequence[Figures]) -> Table:
    """Return the table of all loads."""
    table = Table("load", title="One server under load: workers x rows x steps", title_justify="left")
    for name in ("server", "tokens/s", "kept", "commands/s", "CPU", "of a token", "pickup p50", "p99", "token p50",
                 "p99", "MB/s in, out", "MB", "load CPU", "late p99", "full"):  # fmt: skip
        table.add_column(name, justify="right")
    for each in figures:
        table.add_row(
            _name(each.load), each.server, f"{each.tokens_per_s:,.0f}", f"{each.kept:.0%}",
            f"{each.commands_per_s:,.0f}", f"{each.server_cpu:.2f}", f"{each.cpu_us_per_token:.0f} µs",
            seconds(each.pickup.p50), seconds(each.pickup.p99), seconds(each.token.p50), seconds(each.token.p99),
            f"{each.in_bytes_per_s / 1e6:.1f}, {each.out_bytes_per_s / 1e6:.1f}", f"{each.memory_bytes / 1e6:.0f}",
            f"{each.load_cpu:.2f}", seconds(each.lag_p99_s), each.limit or "–",
        )  # fmt: skip
    return table


def commands_table(figures: Sequence[Figures]) -> Table:
    """Return the table of the commands that took the server the most time."""
    title = "Calls a second x microseconds of a call, those of scripts with their commands"
    table = Table("load", "server", "commands", title=title, title_justify="left")
    for each in figures:
        spent = (f"{command.name} {command.calls_per_s:,.0f} x {command.us:.1f}" for command in each.commands[:5])
        table.add_row(_name(each.load), each.server, ", ".join(spent))
    return table


def notes(figures: Sequence[Figures]) -> list[str]:
    """Return what a reader has to know about what else than the server limited a run."""
    lines = list[str]()
    for each in figures:
        where = f"{_name(each.load)}, {each.server}"
        if each.failed:
            lines.append(f"[yellow]{where}: {each.failed} chats were given up, since the server did not answer[/]")
        if each.limit == "load":
            lines.append(
                f"[yellow]{where}: the benchmark is the limit, not the server: a process of it used "
                f"{each.load_cpu:.2f} cores, and its event loop woke {seconds(each.lag_p99_s)} late (p99)[/]"
            )
        if each.limit == "machine":
            lines.append(
                f"[yellow]{where}: all cores are busy, so the server is not the limit; event loops of the benchmark "
                f"woke {seconds(each.lag_p99_s)} late (p99), which is in all of its times[/]"
            )
        if each.other_cpu > 0.1:
            lines.append(
                f"[yellow]{where}: other programs used {each.other_cpu:.2f} cores: measure on an idle machine[/]"
            )
    return lines


def _claims_table(costs: Sequence[ClaimCost]) -> Table:
    title = f"{costs[0].server}: the server's time for a claim, half a second after the last one of the queue"
    table = Table("waiting, marks, workers", "running", "median", "quarters", title=title, title_justify="left")
    for cost in sorted(costs, key=lambda each: (each.waiting, each.affinity, each.marks, each.workers, each.running)):
        first, last = cost.quarters_us
        table.add_row(claim.name_of(cost), f"{cost.running:,}", f"{cost.median_us:,.0f} µs",
                      f"{first:,.0f} to {last:,.0f} µs")  # fmt: skip
    return table


def _save(file: Path, figures: Sequence[Figures], costs: Sequence[ClaimCost]) -> None:
    loads = [
        finite({**asdict(each), "cpu_us_per_token": each.cpu_us_per_token, "full": each.limit}) for each in figures
    ]
    content = {"conditions": conditions(), "loads": loads, "claims": [asdict(cost) for cost in costs]}
    file.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
