"""The command `scripts/bench gateway`: its options, its tables and its JSON."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.conditions import conditions
from scripts.benchmarks.front import idle
from scripts.benchmarks.front.burst import STEP_MS, STREAMS, Burst, Case, Measured, measure
from scripts.benchmarks.front.idle import Idle
from scripts.benchmarks.serve.options import positive
from scripts.benchmarks.serve.results import Verdict

SUMMARY = "overhead of the HTTP gateway, and what an idle stream costs it"
_MAX_LATER_MS = 5.0
_MIN_RATE = 0.97
_MAX_IDLE_KB = 100.0
_GAP_S = 0.05
_CPU = ("client_us", "front_us", "worker_us", "server_us")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.description = (
        f"{SUMMARY}. {STREAMS} streamed chats go through the queue alone (sluice.Client) and through the gateway, in "
        f"turn, on an engine with {STREAMS} rows and a step of {STEP_MS:g} ms, and on the tiny model."
    )
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="bursts by each way; default: 5")
    parser.add_argument(
        "--tokens", type=positive, default=100, metavar="N", help="tokens of each answer; default: %(default)s"
    )
    parser.add_argument("--only", choices=("paced", "tiny", "idle"), nargs="+", default=["paced", "tiny", "idle"],
                        metavar="PART", help="paced, tiny or idle; default: all")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")


def main(console: Console, options: argparse.Namespace) -> bool:
    """Run the benchmark, print its tables, and return True if every value is within its limit."""
    measured = list[Measured]()
    if "paced" in options.only:
        measured += measure(_cases(options.tokens, is_paced=True), options.runs)
    if "tiny" in options.only:
        measured += measure(_cases(options.tokens, is_paced=False), options.runs)
    streams = idle.measure() if "idle" in options.only else None
    verdicts = _verdicts(measured, streams)
    if measured:
        console.print(_table(measured, options.runs))
    if streams:
        console.print(f"CPU time of the gateway for each idle stream: {streams.cpu_us_per_s:.0f} µs in each second.")
    if verdicts:
        console.print(_bars(verdicts))
    if options.json:
        _write(options.json, measured, streams, verdicts)
    return all(each.holds for each in verdicts)


def _cases(tokens: int, *, is_paced: bool) -> list[Case]:
    engine = "paced" if is_paced else "tiny model"
    return [
        Case(f"{engine}, {_GAP_S * 1000:g} ms apart", _GAP_S, is_paced, tokens),
        Case(f"{engine}, all at once", 0.0, is_paced, tokens),
    ]


def _verdicts(measured: Sequence[Measured], streams: Idle | None) -> list[Verdict]:
    verdicts = list[Verdict]()
    for each in measured:
        if each.case.is_paced:
            later_ms = 1000 * each.later_s
            label = f"{each.case.name}: first token p50, gateway later by (ms)"
            verdicts.append(Verdict(label, f"≤ {_MAX_LATER_MS:g}", later_ms, later_ms <= _MAX_LATER_MS))
            verdicts.append(Verdict.at_least(f"{each.case.name}: tokens/s, gateway / queue", _MIN_RATE, each.rate))
    if streams:
        each_kb = streams.bytes_each / 1000
        label = f"memory of each of {streams.streams:,} idle streams (kB)"
        verdicts.append(Verdict(label, f"≤ {_MAX_IDLE_KB:g}", each_kb, 0 < each_kb <= _MAX_IDLE_KB))
    return verdicts


def _table(measured: Sequence[Measured], runs: int) -> Table:
    title = f"{STREAMS} streams, medians of {runs} bursts; CPU time in µs for each token"
    columns = "chats", "by", "first token p50", "last first token", "tokens/s", "client", "gateway", "worker", "server"
    table = Table(*columns, title=title, title_justify="left")
    for each in measured:
        for name, bursts in ("queue", each.queue), ("gateway", each.front):
            table.add_row(each.case.name if name == "queue" else "", name, *_cells(Burst.median(bursts)))
    return table


def _cells(burst: Burst) -> list[str]:
    times = [f"{1000 * seconds:.1f} ms" for seconds in (burst.first_s, burst.last_first_s)]
    return [*times, f"{burst.tokens_per_s:.1f}", *(f"{getattr(burst, name):.0f}" for name in _CPU)]


def _bars(verdicts: Sequence[Verdict]) -> Table:
    table = Table("measured", "bar", "figure", "holds", title="The gateway against its bars", title_justify="left")
    for each in verdicts:
        table.add_row(each.label, each.bar, f"{each.value:.2f}", "[green]yes[/]" if each.holds else "[red]no[/]")
    return table


def _write(file: Path, measured: Sequence[Measured], streams: Idle | None, verdicts: Sequence[Verdict]) -> None:
    written = {
        **conditions(),
        "bursts": [asdict(each) for each in measured],
        "idle": asdict(streams) if streams else None,
        "bars": [asdict(each) for each in verdicts],
    }
    file.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
