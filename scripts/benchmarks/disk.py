"""The prefix cache on disk: what a load costs, what it costs other rows, and how much it finds."""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.disk_worker import ANSWER, Worker
from scripts.benchmarks.engine import prompt
from scripts.benchmarks.models import hybrid_checkpoint, random_checkpoint
from scripts.benchmarks.serve.options import above_0, positive
from worker.engine.cache.disk import _allocate
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.prefix_store.format import Place, Tensor
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewPlace
from worker.schedule.request import GenerationRequest

GB = 1e9
USER = 40  # tokens of a turn
_DONTNEED: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)  # macOS has none: there pages stay in memory


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its bar."""

    measured: str
    value: float
    text: str  # the value as it is printed
    bar: str = ""
    holds: bool | None = None  # None without a bar


def at_most(measured: str, value: float, bar: float, detail: str = "") -> Figure:
    """Return the figure of a ratio that has to be at most `bar`."""
    return Figure(measured, value, f"{value:.2f}{detail}", f"≤ {bar:g}", value <= bar)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `scripts/bench prefix`."""
    parser.add_argument("--disk", action="store_true", help="measure the prefix cache on disk instead")
    disk = parser.add_argument_group("with --disk")
    disk.add_argument("--tokens", type=positive, default=4000, metavar="N",
                      help="tokens of the long conversation; 28000 takes hours on a CPU; default: 4000")  # fmt: skip
    disk.add_argument("--runs", type=positive, default=3, metavar="N", help="default: 3; figures are medians")
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
    with tempfile.TemporaryDirectory(prefix="sluice-bench-", dir=given.folder) as name:
        for figure in _figures(Path(name), given):
            figures.append(figure)
            console.print(f"[dim]{figure.measured}: {figure.text}[/]")  # the whole takes minutes
            holds = {True: "[green]yes", False: "[red]no", None: ""}[figure.holds]
            table.add_row(figure.measured, figure.bar, figure.text, holds)
    console.print(table)
    if given.json:
        given.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1, ensure_ascii=False))
    return all(figure.holds is not False for figure in figures)


def _figures(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    models = {
        "KV": _opened(random_checkpoint(folder / "model", hidden=512, layers=8)),
        "hybrid": _opened(hybrid_checkpoint(folder / "model", hidden=512, layers=8)),
    }
    small = _opened(random_checkpoint(folder / "model", hidden=256, layers=4))
    for kind, model in models.items():
        yield from _restarts(kind, model, folder / kind, given.tokens, given.runs)
    for kind, model in models.items():
        yield from _warm_hits(kind, model, folder / f"{kind} warm")
    yield from _gaps(models["KV"], folder / "gaps", int(given.gigabytes * GB))
    yield from _found(small, folder / "found", given.conversations)


def _opened(checkpoint: Path) -> Model:
    model = open_model(str(checkpoint))
    model.tokenizer.eos_token_ids = []  # a random model may sample one at any time
    return model


# A restart, and then the next turn of a long conversation

MAX_OF_COMPUTING = 0.1
MAX_OF_READING = 1.5
MAX_OF_MEMORY = 2.0


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds to the first token of the next turn, by where the conversation is."""

    computed_s: float
    memory_s: float
    disk_s: float  # the files' pages were dropped
    page_cache_s: float
    read_s: float  # to read the bytes of the files once
    nbytes: int


def _restarts(kind: str, model: Model, folder: Path, tokens: int, runs: int) -> Iterator[Figure]:
    done = [_restart(model, folder / str(run), tokens, run) for run in range(runs + 1)][1:]

    def median(value: Callable[[Restart], float]) -> float:
        return statistics.median(map(value, done))

    label = f"{kind}, {tokens:,} tokens ({done[0].nbytes / 1e6:,.0f} MB)"
    times = ", ".join(
        f"{name} {1000 * median(value):,.0f} ms"
        for name, value in (("disk", _disk_s), ("computed", _computed_s), ("memory", _memory_s), ("read", _read_s))
    )
    yield at_most(
        f"first token after a restart, against computing: {label}",
        median(lambda each: each.disk_s / each.computed_s),
        MAX_OF_COMPUTING,
        f" ({times})",
    )
    yield at_most(
        "  less that of a hit in memory, against reading the bytes once",
        median(lambda each: (each.disk_s - each.memory_s) / each.read_s),
        MAX_OF_READING,
    )
    yield at_most(
        "  from the page cache, against a hit in memory",
        median(lambda each: each.page_cache_s / each.memory_s),
        MAX_OF_MEMORY,
        f" ({1000 * median(lambda each: each.page_cache_s):,.0f} ms)",
    )


def _disk_s(restart: Restart) -> float:
    return restart.disk_s


def _computed_s(restart: Restart) -> float:
    return restart.computed_s


def _memory_s(restart: Restart) -> float:
    return restart.memory_s


def _read_s(restart: Restart) -> float:
    return restart.read_s


def _restart(model: Model, folder: Path, tokens: int, seed: int) -> Restart:
    history = prompt(tokens, seed=seed)
    worker = Worker(model, folder)
    history += worker.answer(history, (tokens - 1,)).tokens

    def turn(number: int) -> tuple[int, ...]:
        return history + prompt(USER, seed=1000 * (seed + 1) + number)

    def next_turn(worker: Worker, number: int) -> float:
        answer = worker.answer(turn(number), (len(history) + USER - 1,))
        worker.close()
        if answer.cached < tokens and number:
            raise RuntimeError(f"{answer.cached:,} of {tokens:,} tokens were found; the measurement is void")
        return answer.first_token_s

    memory_s = next_turn(worker, 1)
    drop_pages(folder)
    read_s, nbytes = _read_once(folder)
    computed_s = next_turn(Worker(model, None, prefix_bytes=0), 0)
    drop_pages(folder)
    disk_s = next_turn(Worker(model, folder), 2)
    page_cache_s = next_turn(Worker(model, folder), 3)
    return Restart(computed_s, memory_s, disk_s, page_cache_s, read_s, nbytes)


def drop_pages(folder: Path) -> None:
    """Drop the files' pages from memory, as far as the system has a call for it."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            if _DONTNEED is not None:
                os.posix_fadvise(opened.fileno(), 0, 0, _DONTNEED)


def _read_once(folder: Path) -> tuple[float, int]:
    """Return the seconds of reading all files into memory that is allocated for them, and their bytes."""
    files = sorted(folder.glob("*.safetensors"))
    began = time.perf_counter()
    contents = [file.read_bytes() for file in files]
    return time.perf_counter() - began, sum(map(len, contents))


# Hits in memory, with and without a disk tier

MAX_OF_OFF = 1.02
_HITS = 16
_HIT_TOKENS = 1000


def _warm_hits(kind: str, model: Model, folder: Path) -> Iterator[Figure]:
    system = prompt(_HIT_TOKENS, seed=7)
    workers = {"on": Worker(model, folder), "off": Worker(model, None)}
    for worker in workers.values():
        worker.answer(system + prompt(USER, seed=1), (_HIT_TOKENS,))
    took_s: dict[str, list[float]] = {name: [] for name in workers}
    for hit in range(_HITS):
        new = system + prompt(USER, seed=100 + hit)
        order = ["on", "off"] if hit % 2 else ["off", "on"]
        for name in order:  # each is the first as often as the other
            took_s[name].append(workers[name].answer(new, (_HIT_TOKENS,)).first_token_s)
    for worker in workers.values():
        worker.close()
    label = f"hits in memory with the disk tier, against without: {kind}"
    on_s, off_s = (statistics.median(took_s[name]) for name in ("on", "off"))
    yield at_most(label, on_s / off_s, MAX_OF_OFF, f" ({1000 * on_s:.0f} ms, {1000 * off_s:.0f} ms)")


# Gaps of running rows while prefixes are written and read

MAX_GAPS = 1.25
_PLACE_BYTES = 32_000_000
_ROWS = 4
_QUIET_STEPS = 300
_ROW_TOKENS = 8000  # more than they decode meanwhile


def _gaps(model: Model, folder: Path, nbytes: int) -> Iterator[Figure]:
    engine = Engine(model, step_s=1.0, prefix_bytes=0)
    for row in range(_ROWS):
        engine.add(GenerationRequest(f"running {row}", prompt(32, row), _ROW_TOKENS))
    for _ in range(20):
        engine.step()
    quiet = [_step_s(engine) for _ in range(_QUIET_STEPS)]
    traffic = Traffic(folder, nbytes)
    busy = list[float]()
    while not traffic.advance():
        busy.append(_step_s(engine))
    quiet += [_step_s(engine) for _ in range(_QUIET_STEPS)]
    p99_busy, p99_quiet = (statistics.quantiles(each, n=100)[98] for each in (busy, quiet))
    detail = f" ({1000 * p99_busy:.0f} ms in {len(busy):,} steps, {1000 * p99_quiet:.0f} ms)"
    label = f"gap p99 of {_ROWS} rows while {nbytes / GB:.1f} GB are written and read"
    yield at_most(label, p99_busy / p99_quiet, MAX_GAPS, detail)


def _step_s(engine: Engine) -> float:
    began = time.perf_counter()
    engine.step()
    return time.perf_counter() - began


class Traffic:
    """Places that are written and then read, as evictions and loads do it."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._store = PrefixStore(StoreOptions(folder, 1 << 50), "traffic", allocate=_allocate)
        self._store.open()
        self._content = Random(0).randbytes(_PLACE_BYTES)
        self._written = self._read = 0
        self._places = max(1, nbytes // _PLACE_BYTES)
        self._reading: Any = None

    def advance(self) -> bool:
        """Hand over the next place if there is room, and begin to read another if none is read. Returns True once all
        are read."""
        if self._written < self._places and self._store.write(self._place(self._written)):
            self._written += 1
        if self._reading is None or self._reading.done:
            self._read += self._reading is not None
            chain = self._store.find("", (self._read,), stateful=False)
            self._reading = self._store.read(chain) if chain and self._read < self._places else None
        if self._read >= self._places:
            self._store.close(60)
            return True
        return False

    def _place(self, number: int) -> NewPlace:
        tensor = Tensor("U8", (_PLACE_BYTES,), self._content)
        return NewPlace((number,), False, Place("", (number,), "{}", (tensor,)))


# Many conversations over a small budget

_TURN_TOKENS = 200


def _found(model: Model, folder: Path, conversations: int) -> Iterator[Figure]:
    chats = [prompt(_TURN_TOKENS, seed=10_000 + number) for number in range(conversations)]
    one = Worker(model, None)
    before = _cache_bytes(one.engine)
    one.answer(chats[0], (_TURN_TOKENS - 1,))
    budget = (_cache_bytes(one.engine) - before) * max(1, conversations // 10)
    alone = _share_found(Worker(model, None, prefix_bytes=budget), chats)
    with_disk = _share_found(Worker(model, folder, prefix_bytes=budget), chats)
    label = f"tokens found, {conversations:,} conversations over a budget of {max(1, conversations // 10):,}"
    yield Figure(f"{label}: memory alone", alone, f"{alone:.1%}")
    yield Figure("  with the disk", with_disk, f"{with_disk:.1%}")


def _cache_bytes(engine: Engine) -> int:
    return engine._caches.nbytes


def _share_found(worker: Worker, chats: list[tuple[int, ...]]) -> float:
    """Return the share of the earlier turns' tokens that the second turns find, in random order."""
    answers = [worker.answer(chat, (_TURN_TOKENS - 1,)).tokens for chat in chats]
    order = [*range(len(chats))]
    Random(0).shuffle(order)
    found = 0
    for number in order:
        history = chats[number] + answers[number]
        found += worker.answer(history + prompt(USER, seed=20_000 + number), (len(history),)).cached
    worker.close()
    return found / (len(chats) * (_TURN_TOKENS + ANSWER - 1))
