"""Many different chats at once: throughput, time to first token and longest gap, compared with another checkout of the
project and with mlx_lm.server."""

import argparse
import asyncio
import http.client
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.batch import non_word_tokens
from scripts.benchmarks.chats import Answer, Figures, Prompts, through_http, through_queue
from scripts.benchmarks.engine import prompt
from scripts.benchmarks.models import hybrid_checkpoint, random_checkpoint
from scripts.stack import ROOT, Server, WorkerProcess, free_port
from worker.engine.engine import Engine
from worker.engine.model.load import open_model
from worker.schedule.budget import MAX_STEP_STRETCH, PROMPT_SHARE
from worker.schedule.request import GenerationRequest

SUMMARY = "many different chats at once, against another checkout and against mlx_lm.server"
TOKENS = 96  # of each answer; the models never sample the end of sequence
OURS = "sluice"
BASELINE = "baseline"
MLX_SERVER = "mlx_lm.server"
# For 32 at once, relative to the baseline; the gap relative to the decode time of 32 rows.
MAX_CHATS = 32
MIN_SPEED = 1.2
MAX_WAIT = 0.65
MAX_GAP = 3.5
LIMITS = f"limits: tokens/s ≥ {MIN_SPEED} ×, last first token ≤ {MAX_WAIT} ×, longest gap ≤ {MAX_GAP} decode times"
_THREADS = "OPENBLAS_NUM_THREADS"
_START_S = 60.0

Send = Callable[[Sequence[str]], list[Answer]]


def dense(folder: Path) -> Path:
    """A dense model of 83 million parameters."""
    return random_checkpoint(folder, hidden=768, layers=12, kv_heads=4, never_sampled=non_word_tokens())


def hybrid(folder: Path) -> Path:
    """A model of 29 million parameters whose attention layers are one in four."""
    return hybrid_checkpoint(folder, never_sampled=non_word_tokens())


MODELS = {"plain": dense, "hybrid": hybrid}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--chats", type=_positive, nargs="+", default=[8, MAX_CHATS], metavar="N", help="chats at once; default: 8 32"
    )
    parser.add_argument(
        "--rounds", type=_positive, default=2, metavar="N", help="rounds, each with all servers; default: 2"
    )
    parser.add_argument("--models", choices=MODELS, nargs="+", default=[*MODELS], help="models to run; default: both")
    parser.add_argument("--baseline", type=_checkout, metavar="PATH", help="compare with this checkout of the project")
    parser.add_argument("--against", choices=[MLX_SERVER], help="compare with this server")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "worker" / "__main__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a checkout of this project: it has no worker/__main__.py")
    return path


def main(console: Console, options: argparse.Namespace) -> bool:
    """Run the benchmark for each model, and return True if all values are within their limits."""
    os.environ.setdefault(_THREADS, "1")  # read by the child processes
    holds = True
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder, Server() as server:
            bench = Bench(console, name, MODELS[name](Path(folder)), server.url, options)
            holds = bench.run() and holds
    return holds


class Bench:
    """Starts all servers of one model once, and sends each round to all of them."""

    def __init__(
        self, console: Console, name: str, checkpoint: Path, redis_url: str, options: argparse.Namespace
    ) -> None:
        self._console = console
        self._name = name
        self._checkpoint = checkpoint
        self._url = redis_url
        self._options, self._prompts = options, Prompts()

    def run(self) -> bool:
        """Run all rounds and print the tables; return True if all values are within their limits."""
        decode_s = {chats: self._decode_s(chats) for chats in self._options.chats}
        with ExitStack() as stack:
            servers = {name: stack.enter_context(server) for name, server in self._servers()}
            for send in servers.values():
                send(self._prompts.draw(2))  # warm up: some parts load with the first request
            within = [self._compare(servers, chats, decode_s[chats]) for chats in self._options.chats]
        return all(within)

    def _servers(self) -> Iterator[tuple[str, AbstractContextManager[Send]]]:
        rows = max(self._options.chats)
        if self._options.baseline:
            yield BASELINE, worker(self._url, BASELINE, self._checkpoint, self._options.baseline, rows)
        yield OURS, worker(self._url, OURS, self._checkpoint, ROOT, rows)
        if self._options.against:
            yield MLX_SERVER, mlx_server(self._checkpoint)

    def _decode_s(self, rows: int) -> float:
        """Measure in a new process, since OpenBLAS reads its number of threads when it is loaded."""
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(decode_s, self._checkpoint, rows).result()

    def _compare(self, servers: Mapping[str, Send], chats: int, decode_s: float) -> bool:
        rounds: dict[str, list[Figures]] = {name: [] for name in servers}
        for number in range(self._options.rounds):
            texts = self._prompts.draw(chats)  # new to all servers
            for name, send in list(servers.items())[:: 1 if number % 2 == 0 else -1]:
                rounds[name].append(_figures(send(texts)))
                self._console.print(f"[dim]{self._name}, {chats} chats, {name}: {_line(rounds[name][-1])}[/]")
        medians = {name: Figures.median(each) for name, each in rounds.items()}
        all_streaming_s = medians[OURS].all_streaming_s
        step_s = decode_s if math.isnan(all_streaming_s) else all_streaming_s
        self._console.print(self._table(medians, chats, decode_s, step_s))
        return self._verdict(medians, chats, step_s)

    def _table(self, medians: Mapping[str, Figures], chats: int, decode_s: float, step_s: float) -> Table:
        """`decode_s`: seconds of a step of these rows in the bare engine; `step_s`: in the worker, seen by clients."""
        title = (
            f"{self._name}: {chats} chats at once, {TOKENS} tokens each, median of {self._options.rounds} rounds\n"
            f"{chats} rows decode a token in {step_s * 1000:.0f} ms ({decode_s * 1000:.0f} in the bare engine); "
            f"{_threads()}\n"
            f"while prompts wait, a step may last {1 + PROMPT_SHARE:.1f} × that, up to {MAX_STEP_STRETCH} × its target"
        )
        columns = "server", "tokens/s", "first token p50", "max", "longest gap", "in decode times"
        table = Table(*columns, title=title, title_justify="left")
        for name, figures in medians.items():
            table.add_row(name, *_cells(figures), f"{figures.longest_gap_s / step_s:.2f}")
        return table

    def _verdict(self, medians: Mapping[str, Figures], chats: int, step_s: float) -> bool:
        """Print the ratios to each other server; the limits apply to 32 chats and the baseline."""
        ours, holds = medians[OURS], True
        for name, theirs in medians.items():
            if name != OURS:
                self._console.print(f"  against {name}: {_ratios(ours, theirs)}")
        if BASELINE in medians and chats == MAX_CHATS:
            holds = _within_limits(ours, medians[BASELINE], step_s)
            self._console.print(f"  {LIMITS}: {'[green]within[/]' if holds else '[red]not within[/]'}")
        return holds


def _figures(answers: Sequence[Answer]) -> Figures:
    if any(answer.tokens != TOKENS for answer in answers):
        raise RuntimeError(f"answers have {sorted({answer.tokens for answer in answers})} tokens instead of {TOKENS}")
    return Figures.of(answers)


def _cells(figures: Figures) -> tuple[str, ...]:
    return (
        f"{figures.tokens_per_s:.1f}",
        f"{figures.first_median_s:.2f} s",
        f"{figures.first_last_s:.2f} s",
        f"{figures.longest_gap_s * 1000:,.0f} ms",
    )


def _line(figures: Figures) -> str:
    rate, median, last, gap = _cells(figures)
    return f"{rate} tokens/s, first token p50 {median}, max {last}, longest gap {gap}"


def _ratios(ours: Figures, theirs: Figures) -> str:
    return (
        f"{ours.tokens_per_s / theirs.tokens_per_s:.2f} × tokens/s, "
        f"first token p50 {ours.first_median_s / theirs.first_median_s:.2f} ×, "
        f"max {ours.first_last_s / theirs.first_last_s:.2f} ×, "
        f"longest gap {ours.longest_gap_s / theirs.longest_gap_s:.2f} ×"
    )


def _within_limits(ours: Figures, baseline: Figures, step_s: float) -> bool:
    return (
        ours.tokens_per_s >= MIN_SPEED * baseline.tokens_per_s
        and ours.first_last_s <= MAX_WAIT * baseline.first_last_s
        and ours.longest_gap_s <= MAX_GAP * step_s
    )


def _threads() -> str:
    return f"BLAS with {os.environ[_THREADS]} thread{'s' * (os.environ[_THREADS] != '1')}"


# The servers


@contextmanager
def worker(url: str, name: str, checkpoint: Path, root: Path, rows: int) -> Iterator[Send]:
    """Run a worker with the code of the checkout at `root`, and yield a function that sends texts to it."""
    with WorkerProcess(url, model=checkpoint, model_name=name, root=root, max_rows=max(rows, MAX_CHATS)):
        yield lambda texts: asyncio.run(through_queue(url, name, texts, TOKENS))


@contextmanager
def mlx_server(checkpoint: Path) -> Iterator[Send]:
    """Run mlx_lm.server, and yield a function that sends texts to it."""
    port = free_port()
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(checkpoint), "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, "--log-level", "ERROR"], stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(process, port)
            yield lambda texts: through_http(port, texts, TOKENS)
        finally:
            process.kill()  # it has no state to save
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", port: int) -> None:
    deadline = time.monotonic() + _START_S
    while not _healthy(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{MLX_SERVER} did not start")
        time.sleep(0.1)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# The decode time

_PROMPT, _STEPS = 60, 16  # tokens of a prompt, about as in the benchmark; timed steps


def decode_s(checkpoint: Path, rows: int) -> float:
    """Return the median seconds of a step in which only these rows decode."""
    engine = Engine(open_model(str(checkpoint)), step_s=10.0, rows=rows, prefix_bytes=0)
    for i in range(rows):
        engine.add(GenerationRequest(str(i), prompt(_PROMPT, i), 10_000))
    while engine.step().rows < rows:
        pass
    engine.step()  # its forward was launched together with the last prompts
    return statistics.median(engine.step().seconds for _ in range(_STEPS))
