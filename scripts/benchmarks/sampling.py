"""Cost of sampling the tokens of a step: all rows in shared calls, as the engine does, or each separately."""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p
from rich.console import Console
from rich.table import Table

from scripts.benchmarks import host
from worker.engine.batch.row import Row
from worker.engine.sampling.logprobs import StepLogprobs
from worker.engine.sampling.sampler import draw
from worker.request import GenerationRequest, Sampling

VOCAB, RUNS = 152_064, 5
PLAIN = Sampling(temperature=1.0)
KINDS = {
    "greedy": [Sampling()],
    "temperature": [PLAIN],
    "top_p 0.9": [replace(PLAIN, top_p=0.9)],
    "top_k 50": [replace(PLAIN, top_k=50)],
    "top_k 20, top_p 0.95": [replace(PLAIN, top_k=20, top_p=0.95)],
    "a quarter each of these": [Sampling(), PLAIN, replace(PLAIN, top_k=50), replace(PLAIN, top_k=20, top_p=0.95)],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--vocabulary",
        type=Path,
        metavar="FILE",
        help="measure the host's cost with this vocabulary too: data/tekken_240911.json of mistral-common's wheel",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="measure what tools add to a step of rows that call none too, with this model's tokenizer and template",
    )


def main(console: Console, options: argparse.Namespace) -> bool:
    """Run the benchmark, print its tables, and return True if every value is within its limit."""
    passed = host.main(console, options.vocabulary, options.tokenizer)
    mx.random.seed(0)
    logits = 3 * mx.random.normal((32, VOCAB))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs)
    title = f"Sampling from {VOCAB:,} tokens, fp32"
    table = Table("rows", "draw", "together", "row by row", "ratio", title=title, title_justify="left")
    for rows in (1, 8, 32):
        for name, samplings in KINDS.items():
            if rows > 1 or len(samplings) == 1:
                table.add_row(str(rows), name, *compared(*sampling_calls(logprobs[:rows], samplings)))
    for name, top in (("logprobs", 0), ("logprobs, 5 alternatives", 5)):
        table.add_row("32", name, *compared(*logprob_calls(logprobs, top)))
    console.print(table)
    return unseen_top_p(logprobs[:1], console) and passed


def sampling_calls(logprobs: mx.array, samplings: list[Sampling]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two calls that sample a token for each row: in shared calls, and separately."""
    rows = [
        Row.of(GenerationRequest(str(i), (1,), 1, replace(samplings[i % len(samplings)], seed=i)))
        for i in range(logprobs.shape[0])
    ]

    def together() -> None:
        mx.eval(draw(logprobs, rows))

    def separately() -> None:  # as mlx-lm does if each row has its own sampler
        mx.eval(mx.concatenate([draw(logprobs[i : i + 1], [row]) for i, row in enumerate(rows)]))

    return together, separately


def logprob_calls(logprobs: mx.array, top: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return two calls that compute the logprobs of each row: in shared calls, and separately."""

    def together() -> None:
        assert StepLogprobs(logprobs, mx.arange(logprobs.shape[0]), [top] * logprobs.shape[0]).rows

    def separately() -> None:
        for i in range(logprobs.shape[0]):
            assert StepLogprobs(logprobs[i : i + 1], mx.array([i]), [top]).rows

    return together, separately


def compared(together: Callable[[], None], separately: Callable[[], None]) -> tuple[str, str, str]:
    """Time both calls in turn after a warm-up. Return the medians and their ratio as text."""
    pairs = [(seconds(together), seconds(separately)) for _ in range(RUNS + 1)][1:]
    shared, single = (statistics.median(column) for column in zip(*pairs, strict=True))
    return f"{shared * 1e3:.2f} ms", f"{single * 1e3:.2f} ms", f"{single / shared:.2f}"


def unseen_top_p(logprobs: mx.array, console: Console) -> bool:
    """Check that a new top_p costs no compilation. mlx-lm's filters are compiled for each value."""
    top_p = 0.9 + time.time() % 1 / 1000  # a value that is in no cache on disk
    row = Row.of(GenerationRequest("a", (1,), 1, replace(PLAIN, top_p=top_p)))
    theirs = seconds(lambda: mx.eval(apply_top_p(logprobs, top_p)))
    first, again = (seconds(lambda: mx.eval(draw(logprobs, [row]))) for _ in range(2))
    console.print(
        f"One row with a new top_p: {first * 1e3:.0f} ms, again {again * 1e3:.0f} ms (limit: double); "
        f"mlx-lm's filter {theirs * 1e3:.0f} ms."
    )
    return first <= 2 * again


def seconds(call: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
