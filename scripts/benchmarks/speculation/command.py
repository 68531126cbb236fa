"""The command `scripts/bench speculation`: its progress bar and its output."""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from scripts.benchmarks.conditions import conditions
from scripts.benchmarks.serve.options import new_file, positive
from scripts.benchmarks.serve.report import verdict_table
from scripts.benchmarks.serve.results import Verdict
from scripts.benchmarks.speculation import cost, report
from scripts.benchmarks.speculation.cost import Cost
from scripts.benchmarks.speculation.figures import Case, NotAnswered, Result, TokensDiffer
from scripts.benchmarks.speculation.proposers import PROPOSERS
from scripts.benchmarks.speculation.report import judge
from scripts.benchmarks.speculation.runner import RANDOM, STEP_S, Comparison, answers, cases, random_model
from scripts.benchmarks.speculation.tasks import TASKS, Requests
from tests.support.stack import TINY_CHAT
from worker.engine.checkpoint import read_json
from worker.engine.model.drafter import with_drafter, with_head
from worker.engine.model.load import Model, open_model
from worker.engine.speculation.mtp_load import find_head
from worker.errors import CannotStart

SUMMARY = "speculation: tokens per forward and per second with drafts against none, and what a verify forward costs"
ROWS = (1, 2, 4, 8, 16)
PARTS = ("tasks", "cost")
EXAMPLES = """\
examples:
  scripts/bench speculation
      all tasks, rows and proposers, and the cost of verify forwards (half an hour on two cores)
  scripts/bench speculation --task recall --rows 1 4 --proposer copies --runs 3 --part tasks
      a first impression in half a minute
  scripts/bench speculation --part cost --model ~/models/Qwen3-4B-4bit
      how much wider forwards cost on this machine, in plain steps
  scripts/bench speculation --task json tools --json out.json
      what schemas and repeated tool calls gain, with the figures of every run in a file
  scripts/bench speculation --part tasks --random-model plain --task count free --rows 8 --proposer idle copies
      what drafts cost where they gain nothing, by a model whose steps take as long as those of real ones

Each case has two engines of the same model, one that verifies drafts and one that does not. They answer the same chats
in turn, in the other order every other time, after a pair that warms up; figures are medians of the pairs. Answers must
be equal token by token: the first difference ends the benchmark. For that the weights are computed in fp32.
Only proposers that can have an effect on a task are measured with it.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    tasks = _listed((name, task.about) for name, task in TASKS.items())
    proposers = _listed((name, drafts.about) for name, drafts in PROPOSERS.items())
    parser.description = f"{SUMMARY}.\n\ntasks:\n{tasks}\n\nproposers:\n{proposers}"
    parser.epilog = EXAMPLES
    parser.add_argument("--model", type=_folder, default=TINY_CHAT, metavar="FOLDER",
                        help="a checkpoint; default: models/tiny-chat, which knows all tasks")  # fmt: skip
    parser.add_argument("--random-model", choices=RANDOM, metavar="KIND",
                        help="instead: random weights, plain or hybrid, whose steps take tens of ms; "
                        "for the tasks edit, free and count")  # fmt: skip
    parser.add_argument("--mtp-model", type=_folder, metavar="FOLDER",
                        help="the checkpoint with the MTP head; default: the model itself, if it has one")  # fmt: skip
    parser.add_argument("--draft-model", type=_folder, metavar="FOLDER",
                        help="a smaller model, which draft is measured with; default: none")  # fmt: skip
    parser.add_argument("--task", choices=TASKS, nargs="+", default=[*TASKS], metavar="NAME", help="default: all")
    parser.add_argument("--rows", type=positive, nargs="+", default=[*ROWS], metavar="N",
                        help="answers at once; default: 1 2 4 8 16")  # fmt: skip
    parser.add_argument("--proposer", choices=PROPOSERS, nargs="+", default=[*PROPOSERS], metavar="NAME",
                        help="default: all that the model has")  # fmt: skip
    parser.add_argument("--part", choices=PARTS, nargs="+", default=[*PARTS], metavar="NAME",
                        help="tasks, cost; default: both")  # fmt: skip
    parser.add_argument("--runs", type=positive, default=5, metavar="N", help="pairs of runs; default: %(default)s")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures of all runs to this file")


def _listed(entries: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"  {name:<10} {about}" for name, about in entries)


def _folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text}: it has no config.json; give the folder of a checkpoint")
    return path


_WIDTH = 165


def main(given: argparse.Namespace) -> bool:
    """Measure, print the tables, and return True if all answers were equal and no bar is missed."""
    console = Console(width=_WIDTH)
    try:
        with random_model(given.random_model) if given.random_model else nullcontext(given.model) as given.model:
            with console.status(f"loading {given.model}"):
                model = open_in_fp32(given.model, given.mtp_model, given.draft_model)
            return Session(console, given, model).run()
    except CannotStart as error:
        return _failed(console, error)


def _failed(console: Console, error: Exception) -> bool:
    console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
    return False


def open_in_fp32(folder: Path, head: Path | None, draft: Path | None) -> Model:
    """Load a model, its MTP head, if it has one, and its draft model, if one is given, to compute in fp32. In lower
    precision the rounding of wider forwards changes tokens. Raises `CannotStart`."""
    model = open_model(str(folder), vision=False)
    if model.drafting.max_draft == 0:
        reason = model.drafting.unsupported_reason
        raise CannotStart(f"--model: its rows take no drafts, since {reason}; give another one.")
    model.network.set_dtype(mx.float32)
    if head is None and find_head(folder, read_json(folder, "config.json")):
        head = folder
    if head:
        model = with_head(model, str(folder), str(head))
    return with_drafter(model, str(draft), None) if draft else model


class Session:
    """Measures all cases of one call, and keeps what the JSON file gets."""

    def __init__(self, console: Console, given: argparse.Namespace, model: Model) -> None:
        self._console = console
        self._given, self._model = given, model
        self._results = list[Result]()
        self._costs = list[Cost]()

    def run(self) -> bool:
        """Measure, print, and write the JSON; return True if all was measured and no bar is missed."""
        planned = self._cases()
        complete = True
        try:
            self._measure_tasks(planned)
        except (TokensDiffer, NotAnswered) as error:
            complete = _failed(self._console, error)  # what was measured before is still worth a table
        else:
            self._measure_costs()
        verdicts = judge(self._results, STEP_S)
        self._print(verdicts)
        self._save(verdicts, complete)
        return complete and all(verdict.holds for verdict in verdicts)

    def _cases(self) -> list[Case]:
        given = self._given
        present = [name for name in ("head", "drafter") if getattr(self._model, name)]
        if "tasks" not in given.part:
            return []
        tasks = [task for task in given.task if TASKS[task].any_model or not given.random_model]
        planned = [*cases(tasks, given.rows, given.proposer, present)]
        if not planned:
            raise CannotStart(f"--proposer {' '.join(given.proposer)}: none can have an effect here; give another one.")
        if not self._model.head:
            self._console.print("[dim]the model has no MTP head, so none is measured[/]")
        return planned

    def _measure_tasks(self, planned: Sequence[Case]) -> None:
        """Measure the cases. Raises `TokensDiffer` and `NotAnswered`."""
        runs = self._given.runs
        progress = self._progress(len(planned) * (runs + 1))
        answer = partial(answers, self._model)
        requests = closing(Requests(self._model, answer, random_weights=bool(self._given.random_model)))
        with progress as (describe, advance), requests as made:
            for case in planned:
                describe(case.name)
                self._results.append(Comparison(self._model, made, case).measure(runs, advance))
                self._console.print(f"[dim]{report.line(self._results[-1])}[/]", highlight=False)

    def _measure_costs(self) -> None:
        if "cost" not in self._given.part:
            return
        with self._progress(len(self._given.rows) * (cost.ROUNDS + 1)) as (describe, advance):
            for rows in self._given.rows:
                describe(f"forwards of {rows} rows")
                self._costs.append(cost.measure(self._model, rows, advance))

    @contextmanager
    def _progress(self, total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
        """Show a progress bar. Yields functions that set its description and advance it by one."""
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=total)

            def describe(text: str) -> None:
                progress.update(task, description=text)

            yield describe, partial(progress.advance, task)

    def _print(self, verdicts: Sequence[Verdict]) -> None:
        name = self._given.model.name
        if self._results:
            self._console.print(report.results_table(self._results, name, self._given.runs))
            for note in report.NOTES:
                self._console.print(f"  {note}", highlight=False)
        if self._costs:
            self._console.print(report.cost_table(self._costs, name))
        if verdicts:
            self._console.print(verdict_table(verdicts, name))

    def _save(self, verdicts: Sequence[Verdict], complete: bool) -> None:
        if not self._given.json:
            return
        written = {
            **conditions(),
            "model": str(self._given.model),
            "complete": complete,
            "results": [result.as_json() for result in self._results],
            "verify_cost": [each.as_json() for each in self._costs],
            "bars": [{"label": v.label, "bar": v.bar, "value": v.value, "holds": v.holds} for v in verdicts],
        }
        self._given.json.write_text(json.dumps(written, indent=2) + "\n", "utf-8")
