"""Time from the start of a worker to its first answer, compared with `import mlx_lm`, which is most of it.

Both are run in turn with the tiny model. The job waits in the queue when the worker starts."""

import asyncio
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.stack import Server, WorkerProcess
from sluice import Client

RUNS = 5
MAX_AFTER_IMPORT_S = 0.8
_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8, "temperature": 0}
_IMPORT = [sys.executable, "-c", "import mlx_lm"]


@dataclass(frozen=True, slots=True)
class Run:
    """Seconds that a process took."""

    wall_s: float
    cpu_s: float


def main(console: Console) -> bool:
    """Run the benchmark, print its table, and return True if the first answer is not later than its limit."""
    with Server() as server:
        both = timed(_import), timed(lambda: _first_answer(server.url))  # reads all files into the page cache
        pairs = [(timed(_import), timed(lambda: _first_answer(server.url))) for _ in range(RUNS)]
    imports, answers = zip(*pairs, strict=True)
    table = Table("", "wall", "CPU", title=f"Medians of {RUNS} starts", title_justify="left")
    for name, runs in ("import mlx_lm", imports), ("worker, to its first answer", answers):
        table.add_row(name, f"{_wall_s(runs):.2f} s", f"{statistics.median(run.cpu_s for run in runs):.2f} s")
    console.print(table)
    after_s = _wall_s(answers) - _wall_s(imports)
    console.print(f"The first answer is {after_s:.2f} s later than the import (limit: {MAX_AFTER_IMPORT_S} s).")
    console.print(f"[dim]Before these runs, with cold files: {both[0].wall_s:.2f} s and {both[1].wall_s:.2f} s.[/]")
    return after_s <= MAX_AFTER_IMPORT_S


def timed(run: Callable[[], float]) -> Run:
    """Run a process to its end, and return its times. `run` returns the wall time, without the process's end."""
    before_s = _children_cpu_s()
    wall_s = run()
    return Run(wall_s, _children_cpu_s() - before_s)


def _wall_s(runs: Sequence[Run]) -> float:
    return statistics.median(run.wall_s for run in runs)


def _import() -> float:
    began = time.perf_counter()
    subprocess.run(_IMPORT, check=True)
    return time.perf_counter() - began


def _first_answer(url: str) -> float:
    return asyncio.run(_answered(url))


async def _answered(url: str) -> float:
    async with Client(url) as client:
        job = await client.submit(_BODY)
        began = time.perf_counter()
        worker = WorkerProcess(url).start(wait=False)
        try:
            await client.result(job.id, timeout=60)
            return time.perf_counter() - began
        finally:
            worker.signal(signal.SIGKILL)  # at once, so that its CPU time is that of the answer
            worker.wait()
            worker.stop()


def _children_cpu_s() -> float:
    """Return the CPU seconds of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
