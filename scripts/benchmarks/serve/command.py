"""The command `scripts/bench serve`: its progress bar and its output."""

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.benchmarks.conditions import THREADS, conditions
from scripts.benchmarks.serve import bare, report
from scripts.benchmarks.serve.figures import Figures
from scripts.benchmarks.serve.options import MODELS, contenders_of, options_of, scenarios_of
from scripts.benchmarks.serve.results import Outcome, Result, Verdict, gather, judge
from scripts.benchmarks.serve.runner import Runner
from scripts.benchmarks.serve.scenarios import Options, turn_s
from scripts.benchmarks.serve.servers import Contender, NotServing
from scripts.benchmarks.serve.workload import Texts

_WIDTH = 165


def main(given: argparse.Namespace) -> bool:
    """Measure each model, print the tables, and return True if no bar is missed."""
    console = Console(width=_WIDTH)
    os.environ[THREADS] = "1"  # read by the child processes
    try:
        session = Session(console, given, contenders_of(given), options_of(given), scenarios_of(given))
    except ValueError as error:
        return _failed(console, error)
    try:
        return session.run()
    except NotServing as error:
        return _failed(console, error)


def _failed(console: Console, error: Exception) -> bool:
    console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
    return False


class Session:
    """Measures all models of one call, and keeps what the JSON file gets."""

    def __init__(
        self,
        console: Console,
        given: argparse.Namespace,
        contenders: Sequence[Contender],
        options: Options,
        scenarios: Sequence[str],
    ) -> None:
        self._console = console
        self._given = given
        self._contenders = contenders
        self._options = options
        self._scenarios = scenarios
        self._models = dict[str, Any]()
        self._complete = True

    def run(self) -> bool:
        """Measure, print and write the JSON after each model; return True if all was measured and no bar is missed."""
        verdicts = [verdict for name in self._given.model for verdict in self._model(name)]
        return self._complete and all(verdict.holds for verdict in verdicts)

    def _model(self, name: str) -> list[Verdict]:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-bench-")))
            checkpoint = MODELS[name](folder) if name in MODELS else Path(name).resolve()
            forwards = self._bare(name, checkpoint)
            results = gather(asyncio.run(self._measure(checkpoint, forwards)))
        verdicts = judge(results, plain=name == "plain")
        self._print(name, results, verdicts)
        self._save(name, forwards, results, verdicts)
        return verdicts

    def _bare(self, name: str, checkpoint: Path) -> bare.Bare:
        texts = Texts(Random("length"))
        with self._console.status(f"{name}: measuring bare forwards"):
            try:
                forwards = bare.measure(checkpoint, (texts.draw(10), texts.draw(200)))
            except (ValueError, OSError) as error:
                raise NotServing(f"--model: mlx-lm cannot load {name} ({error}); give another one") from None
        rate = 1 / turn_s(self._options.mix, forwards)
        load = f"load 1: {rate:.2f} arrivals per second of open arrival"
        self._console.print(report.bare_table(forwards, name, load))
        return forwards

    async def _measure(self, checkpoint: Path, forwards: bare.Bare) -> list[Outcome]:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("")
            runner = Runner(
                self._options,
                self._scenarios,
                forwards,
                checkpoint,
                self._given.seed,
                self._given.timeout,
                before=lambda text: progress.update(task, description=text),
            )
            progress.update(task, total=self._given.runs * sum(map(runner.count, self._contenders)))
            outcomes = list[Outcome]()
            try:
                async for outcome in runner.run(self._contenders, self._given.runs):
                    outcomes.append(outcome)
                    progress.advance(task)
                    self._console.print(f"[dim]{_line(outcome)}[/]", highlight=False)
            except NotServing as error:
                if not outcomes:
                    raise
                self._complete = False  # what was measured before is still worth a table
                _failed(self._console, error)
        return outcomes

    def _print(self, name: str, results: Sequence[Result], verdicts: Sequence[Verdict]) -> None:
        made = report.tables(
            results,
            model=name,
            runs=self._given.runs,
            tenants=self._given.tenants > 1,
            offline=self._given.offline > 0,
        )
        for table in made:
            self._console.print(table)
        for note in report.notes(results):
            self._console.print(f"  {note}", highlight=False)
        if verdicts:
            self._console.print(report.verdict_table(verdicts, name))

    def _save(self, name: str, forwards: bare.Bare, results: Sequence[Result], verdicts: Sequence[Verdict]) -> None:
        if not self._given.json:
            return
        self._models[name] = {
            "bare_ms": forwards.as_json(),
            "load_1_rate": 1 / turn_s(self._options.mix, forwards),
            "results": [result.as_json() for result in results],
            "bars": [{"label": v.label, "bar": v.bar, "value": v.value, "holds": v.holds} for v in verdicts],
        }
        written = {**conditions(), "seed": self._given.seed, "models": self._models}
        self._given.json.write_text(json.dumps(written, indent=2) + "\n", "utf-8")


def _line(outcome: Outcome) -> str:
    figures: Figures = outcome.figures
    return (
        f"{outcome.server}, {outcome.scenario}, {outcome.case}: {figures.tokens_per_s:.1f} tokens/s, first token p50 "
        f"{report.seconds(figures.first.p50)}, max {report.seconds(figures.first.max)}, longest gap "
        f"{report.seconds(figures.gap.max)}, good {figures.good:.0%}"
    )
