"""`scripts/bench prefix --disk`: what a load costs, what it costs other rows, and how much it finds."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.disk import bits, conversations, gaps, hits, images, restart, start
from scripts.benchmarks.disk.figures import Figure
from scripts.benchmarks.engine import prompt
from scripts.benchmarks.models import hybrid_checkpoint, random_checkpoint
from scripts.benchmarks.quality import TAIL, case_of
from scripts.benchmarks.serve.options import above_0, positive
from scripts.benchmarks.vision import vision_checkpoint
from scripts.stack import TINY_CHAT
from scripts.tiny_chat.evaluate import Answerer
from worker.engine.model.load import Model, open_model

GB = 1e9
_TEXTS = 20  # of some 1,500 tokens, in which the tiny model finds a code
Part = Callable[[Path, argparse.Namespace], Iterator[Figure]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `scripts/bench prefix`."""
    parser.add_argument("--disk", action="store_true", help="measure the prefix cache on disk instead")
    disk = parser.add_argument_group(
        "with --disk",
        "The defaults took eleven minutes on two cores that had other work too. Prompts take most of "
        "it: the time grows with --tokens and --conversations. On a machine in use the figures mean nothing.",
    )
    disk.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART",
                      help=f"what to measure, of {', '.join(PARTS)}; default: everything")  # fmt: skip
    disk.add_argument("--tokens", type=positive, default=4000, metavar="N",
                      help="tokens of the long conversation; default: 4000")  # fmt: skip
    disk.add_argument("--runs", type=positive, default=5, metavar="N",
                      help="restarts, of which figures are medians; default: 5")  # fmt: skip
    disk.add_argument("--hits", type=positive, default=40, metavar="N",
                      help="hits in memory with the disk tier and without it; default: 40")  # fmt: skip
    disk.add_argument("--gigabytes", type=above_0, default=2.0, metavar="X",
                      help="written and read while rows decode; default: 2")  # fmt: skip
    disk.add_argument("--conversations", type=positive, default=1000, metavar="N",
                      help="conversations over a budget of a tenth of them; default: 1000")  # fmt: skip
    disk.add_argument("--folder", type=Path, metavar="FOLDER",
                      help="measure the disk of this folder; default: that of temporary files")  # fmt: skip
    disk.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")


def main(console: Console, given: argparse.Namespace) -> bool:
    """Run the benchmark, print its table, and return True if every value is within its bar."""
    figures = list[Figure]()
    table = Table("measured", "bar", "came to", "holds", title="The prefix cache on disk", title_justify="left")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=given.folder) as name:
        for figure in measure(Path(name), given):
            figures.append(figure)
            console.print(f"[dim]{time.perf_counter() - began:4.0f} s  {figure.measured}: {figure.text}[/]")
            holds = {True: "[green]yes", False: "[red]no", None: ""}[figure.holds]
            table.add_row(figure.measured, figure.bar, figure.text, holds)
    console.print(table)
    if given.json:
        given.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1, ensure_ascii=False), "utf-8")
    return all(figure.holds is not False for figure in figures)


def measure(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    """Measure the chosen parts."""
    for part in given.parts:
        yield from PARTS[part](folder / part, given)


def _opened(checkpoint: Path) -> Model:
    model = open_model(str(checkpoint))
    model.tokenizer.eos_token_ids = []  # a random model may sample one at any time
    return model


def _kv(folder: Path) -> Model:
    return _opened(random_checkpoint(folder / "model", hidden=512, layers=8))


def _hybrid(folder: Path) -> Model:
    return _opened(hybrid_checkpoint(folder / "model", hidden=512, layers=8))


def _restarts(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    for kind, open_kind in (("KV", _kv), ("hybrid", _hybrid)):
        yield from restart.figures(kind, open_kind(folder / kind), folder / kind / "prefixes", given.tokens, given.runs)


def _hits(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    for kind, open_kind in (("KV", _kv), ("hybrid", _hybrid)):
        yield hits.figure(kind, open_kind(folder / kind), folder / kind / "prefixes", given.hits)


def _gaps(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    yield from gaps.figures(_kv(folder), folder / "prefixes", int(given.gigabytes * GB))


def _start(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    yield from start.figures(folder / "prefixes")


def _conversations(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    model = _opened(random_checkpoint(folder / "model", hidden=256, layers=4))
    yield from conversations.figures(model, folder / "prefixes", given.conversations)


def _bits(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    history = prompt(given.tokens, seed=0)
    random = [bits.Turn(history, prompt(restart.TURN, seed=number)) for number in range(1, given.runs + 1)]
    for kind, open_kind in (("KV", _kv), ("hybrid", _hybrid)):
        label = f"{kind}, {given.tokens:,} tokens"
        yield from bits.figures(label, open_kind(folder / kind), folder / kind / "prefixes", random)
    answerer = Answerer(TINY_CHAT)
    texts = [case_of(number, answerer).prompt for number in range(_TEXTS)]
    asked = [bits.Turn(text[:-TAIL], text[-TAIL:]) for text in texts]
    yield from bits.figures(f"tiny-chat, {_TEXTS} texts", _opened(TINY_CHAT), folder / "tiny-chat", asked)
    yield from gaps.figures(_kv(folder), folder / "gaps", int(given.gigabytes * GB), bits=8)


def _images(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    yield from images.figures(_opened(vision_checkpoint(folder / "model")), folder / "prefixes", given.runs)


PARTS: dict[str, Part] = {
    "restart": _restarts, "hits": _hits, "gaps": _gaps, "start": _start, "conversations": _conversations,
    "bits": _bits, "images": _images,
}  # fmt: skip
