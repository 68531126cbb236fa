"""The options of `scripts/bench speculation`."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from scripts.benchmarks.serve.options import new_file, positive
from scripts.benchmarks.speculation.checkpoints import RANDOM
from scripts.benchmarks.speculation.proposers import PROPOSERS
from scripts.benchmarks.speculation.tasks import TASKS
from tests.support.stack import TINY_CHAT

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
