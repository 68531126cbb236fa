"""Several workers of one model with `SLUICE_AFFINITY` on and off: tokens found in their caches, and first tokens."""

import argparse
import asyncio
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from scripts.benchmarks.conditions import conditions
from scripts.benchmarks.serve import clients
from scripts.benchmarks.serve.driver import drive
from scripts.benchmarks.serve.figures import Figures
from scripts.benchmarks.serve.options import above_0, new_file, positive
from scripts.benchmarks.serve.report import seconds, verdict_table
from scripts.benchmarks.serve.results import Verdict
from scripts.benchmarks.serve.workload import Chat, Texts, Turn
from tests.support.chaos.pickup import shared_bursts
from tests.support.stack import Server, WorkerProcess

SUMMARY = "several workers of one model: chats that return, with affinity on and off, and bursts"
EXAMPLES = """\
examples:
  scripts/bench fleet
      4 workers, 32 chats of 8 turns, 3 rounds (some minutes on two cores)
  scripts/bench fleet --chats 8 --turns 3 --rounds 1 --bursts 1
      a first impression
  scripts/bench fleet --workers 8 --rows 2 --json out.json
      more workers with fewer rows, all figures in a file

One server, and two fleets of workers of the bundled model: SLUICE_AFFINITY is true for one and false for the other. In
a round, each of them gets new chats of the same lengths, one fleet after the other and the other one first in every
second round; the fleet that waits is idle. Answers are short, so nearly all of the work is to compute prompts, which
grow from turn to turn. All workers share this machine's cores: a fleet that finds less computes more, and so is slower
as one would be on machines of its own, but for the order in which its workers get their time.

found: the share of all prompt tokens that a prefix cache had. The ratios are of the two fleets in the same round, and
the bars are for their medians, with 4 workers, 32 chats and 8 turns.
bursts: as in `scripts/chaos burst`, which counts by how many jobs idle workers differ: 4, 8 and 16 jobs in turn, with
affinity on, prompts of which nobody knows anything, and workers without a model, which all have the same pace. A
worker that is not woken within 8 ms is left nothing more, so workers of a model that share busy cores differ by more.
"""


@dataclass(frozen=True, slots=True)
class Size:
    """The load of a fleet."""

    workers: int = 4
    rows: int = 4  # of a worker
    chats: int = 32
    turns: int = 8
    words: int = 150  # of a turn
    think_s: float = 1.0  # median pause before a turn

    def draw(self, dice: Random) -> list[Chat]:
        """Return chats that no worker has seen. They begin within the first pause, and are the same for one seed but
        for their words."""
        texts = Texts(dice)

        def turn(at_s: float) -> Turn:
            think_s = self.think_s * dice.lognormvariate(0, 0.6)
            return Turn(texts.draw(self.words), 8, think_s, at_s)

        starts = [dice.uniform(0, self.think_s) for _ in range(self.chats)]
        return [Chat(tuple(turn(at_s) for _ in range(self.turns))) for at_s in starts]


@dataclass(frozen=True, slots=True)
class Round:
    """Figures of both fleets, of chats of the same lengths."""

    on: Figures
    off: Figures

    @property
    def found(self) -> float:
        """How many times as many tokens are found with affinity."""
        return _found(self.on) / _found(self.off)

    @property
    def first_p95(self) -> float:
        """The time to the first token with affinity, relative to that without."""
        return self.on.first.p95 / self.off.first.p95


def _found(figures: Figures) -> float:
    return figures.cached_tokens / figures.prompt_tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = f"{SUMMARY}.", EXAMPLES
    default = Size()
    for name, value, text in (
        ("workers", default.workers, "of each fleet"), ("rows", default.rows, "of a worker"),
        ("chats", default.chats, "of a round, for each fleet"), ("turns", default.turns, "of a chat"),
        ("words", default.words, "of a turn, some 1.6 tokens each"), ("rounds", 3, "of chats"),
        ("bursts", 12, "for as many workers"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=positive, default=value, metavar="N", help=f"{text}; default: {value}")
    parser.add_argument("--think", type=above_0, default=default.think_s, metavar="S",
                        help="median pause before a turn in seconds; default: %(default)g")  # fmt: skip
    parser.add_argument("--seed", default="0", metavar="TEXT", help="the same seed gives the same chats; default: 0")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write all figures of all rounds to this file")


def main(console: Console, given: argparse.Namespace) -> bool:
    """Measure, print the tables, and return True if all was measured and no bar is missed."""
    size = Size(given.workers, given.rows, given.chats, given.turns, given.words, given.think)
    try:
        with console.status("bursts") as status, Server() as server:
            shared = asyncio.run(shared_bursts(server.url, workers=given.workers, bursts=given.bursts))
            status.update("workers start")
            with _fleets(server.url, size):
                rounds = asyncio.run(measure(server.url, size, given.rounds, given.seed, status.update))
    except RuntimeError as error:
        console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)
        return False
    bursts = [Verdict.at_least(each.label, given.bursts, float(each.value)) for each in shared]
    verdicts = [*judge(rounds), *bursts]
    console.print(table(size, rounds), verdict_table(verdicts, "fleet"))
    if given.json:
        content = {
            "conditions": conditions(),
            "bursts": {each.label: each.value for each in bursts},
            "rounds": [{"on": each.on.as_json(), "off": each.off.as_json()} for each in rounds],
        }
        given.json.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return all(verdict.holds for verdict in verdicts)


@contextmanager
def _fleets(url: str, size: Size) -> Iterator[None]:
    """Run both fleets: the models `on` and `off`. Raises RuntimeError if a worker does not start."""
    with ExitStack() as stack:
        workers = [
            WorkerProcess(url, model_name=name, max_rows=size.rows, affinity=affinity)
            for name, affinity in (("on", "true"), ("off", "false"))
            for _ in range(size.workers)
        ]
        for worker in workers:
            stack.callback(worker.stop)
            worker.start(wait=False)
        for worker in workers:
            worker.wait_ready()
        yield


async def measure(url: str, size: Size, rounds: int, seed: str, say: Callable[[str], None]) -> list[Round]:
    """Measure the fleets in turn, after a short round that is not counted. Raises RuntimeError if a turn fails."""
    small = Size(size.workers, size.rows, 2 * size.workers, 2, size.words, size.think_s)
    for name in ("on", "off"):
        say(f"{name}: warm-up")
        await _figures(url, name, small, f"{seed}, warm-up, {name}")
    measured = list[Round]()
    for number in range(rounds):
        figures = dict[str, Figures]()
        for name in ("on", "off") if number % 2 == 0 else ("off", "on"):
            say(f"round {number + 1} of {rounds}: affinity {name}")
            figures[name] = await _figures(url, name, size, f"{seed}, {number}")
        measured.append(Round(**figures))
    return measured


async def _figures(url: str, model: str, size: Size, seed: str) -> Figures:
    async with clients.queue(url, model) as send:
        answers = await drive(send, size.draw(Random(seed)), timeout_s=600.0)
    if errors := [answer.error for answer in answers if answer.error]:
        raise RuntimeError(f"affinity {model}: {len(errors)} turns failed; the first: {errors[0]}")
    return Figures.of(answers)


def judge(rounds: Sequence[Round]) -> list[Verdict]:
    """Compare the medians with their bars."""
    return [
        Verdict.at_least("tokens found, on / off", 1.3, statistics.median(each.found for each in rounds)),
        Verdict.at_most("first token p95, on / off", 0.7, statistics.median(each.first_p95 for each in rounds)),
    ]


def table(size: Size, rounds: Sequence[Round]) -> Table:
    """Return the figures of all rounds."""
    title = f"{size.workers} workers of {size.rows} rows, {size.chats} chats of {size.turns} turns"
    made = Table("round", "affinity", title=title, title_justify="left")
    for name in ("found", "first p50", "p95", "max", "seconds", "prompt tokens/s"):
        made.add_column(name, justify="right")
    for number, each in enumerate(rounds, 1):
        for name, figures in (("on", each.on), ("off", each.off)):
            first = figures.first
            made.add_row(
                str(number) if name == "on" else "", name, f"{_found(figures):.0%}", seconds(first.p50),
                seconds(first.p95), seconds(first.max), f"{figures.seconds:.1f}",
                f"{figures.prompt_tokens / figures.seconds:,.0f}", end_section=name == "off",
            )  # fmt: skip
    return made
