"""A restart, and then the next turn of a long conversation."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.benchmarks.disk.figures import Figure, at_most
from scripts.benchmarks.disk.worker import Worker
from scripts.benchmarks.engine import prompt
from worker.engine.model.load import Model
from worker.engine.prefix.tensors import num_kv_tensors
from worker.prefix_store.files.header import read_file_header
from worker.prefix_store.files.names import parse_name

MAX_OF_COMPUTING = 0.1
MAX_OF_READING = 1.5
MAX_OF_MEMORY = 2.0
TURN = 40  # tokens
_DONTNEED: int | None = getattr(os, "POSIX_FADV_DONTNEED", None)  # macOS has none: there pages stay in memory


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds to the first token of the next turn, by where the conversation is."""

    disk_s: float  # the files' pages were dropped
    memory_s: float
    page_cache_s: float
    read_s: float  # to read the bytes that a load needs once, after the files' pages were dropped
    nbytes: int  # of these


def figures(kind: str, model: Model, folder: Path, tokens: int, runs: int) -> Iterator[Figure]:
    """Measure restarts with a conversation of `tokens` tokens: it is computed once and stored, and once more for the
    comparison. Then each run restarts the worker twice."""
    conversation = _Conversation(model, folder, tokens)
    computed_s = conversation.turn(Worker(model, None, prefix_bytes=0), stored=False)
    done = [conversation.restart() for _ in range(runs + 1)][1:]

    def median(value: Callable[[Restart], float]) -> float:
        return statistics.median(map(value, done))

    times = {
        "disk": median(lambda each: each.disk_s),
        "computed": computed_s,
        "memory": median(lambda each: each.memory_s),
        "read": median(lambda each: each.read_s),
    }
    label = f"{kind}, {tokens:,} tokens ({done[0].nbytes / 1e6:,.0f} MB)"
    yield at_most(
        f"first token after a restart, against computing: {label}",
        times["disk"] / computed_s,
        MAX_OF_COMPUTING,
        f" ({', '.join(f'{name} {1000 * seconds:,.0f} ms' for name, seconds in times.items())})",
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


class _Conversation:
    """A conversation that a worker has stored before it was restarted."""

    def __init__(self, model: Model, folder: Path, tokens: int) -> None:
        self._model, self._folder = model, folder
        self._tokens = tokens
        self._turns = 0
        question = prompt(tokens, seed=0)
        worker = Worker(model, folder)
        self._history = question + worker.answer(question, (tokens - 1,)).tokens
        worker.close()
        self._files = sorted(folder.glob("*.safetensors"))
        self._needed = _needed_bytes(self._files)

    def restart(self) -> Restart:
        """Restart the worker with and without the files' pages in memory. Each next turn is another one."""
        drop_pages(self._files)
        read_s, nbytes = _read_once(self._needed)
        drop_pages(self._files)
        worker = Worker(self._model, self._folder)
        disk_s, memory_s = self.turn(worker), self.turn(worker)
        worker.abandon()
        worker = Worker(self._model, self._folder)
        page_cache_s = self.turn(worker)
        worker.abandon()
        return Restart(disk_s, memory_s, page_cache_s, read_s, nbytes)

    def turn(self, worker: Worker, *, stored: bool = True) -> float:
        """Return the seconds to the first token of a next turn. `stored`: the conversation must be found."""
        self._turns += 1
        tokens = self._history + prompt(TURN, seed=self._turns)
        answer = worker.answer(tokens, (len(self._history) + TURN - 1,))
        if stored and answer.cached < self._tokens:
            raise RuntimeError(f"{answer.cached:,} of {self._tokens:,} tokens were found; the measurement is void")
        return answer.first_token_s


def drop_pages(files: list[Path]) -> None:
    """Drop the files' pages from memory, as far as the system has a call for it."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            if _DONTNEED is not None:
                os.posix_fadvise(opened.fileno(), 0, 0, _DONTNEED)


def _needed_bytes(files: list[Path]) -> dict[Path, int]:
    """Return how many of each file's first bytes a load needs: of the states, only the one after all tokens."""
    names = {file: name for file in files if (name := parse_name(file.name))}
    last = max(names, key=lambda file: names[file].end)
    needed = dict[Path, int]()
    for file, name in names.items():
        header = read_file_header(file, name)
        tensors = len(header.ends) if file == last else num_kv_tensors(header)
        needed[file] = header.data_start + (0, *header.ends)[tensors]
    return needed


def _read_once(needed: dict[Path, int]) -> tuple[float, int]:
    """Return the seconds of reading these bytes into memory that is allocated for them, and their number."""
    began = time.perf_counter()
    contents = [_first_bytes(file, nbytes) for file, nbytes in needed.items()]
    return time.perf_counter() - began, sum(map(len, contents))


def _first_bytes(file: Path, nbytes: int) -> bytes:
    with file.open("rb", buffering=0) as opened:
        return opened.read(nbytes)
