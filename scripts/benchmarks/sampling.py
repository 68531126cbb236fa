"""Cost of sampling the tokens of a step: all rows in shared calls, as the engine does, or each separately."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
from mlx_lm.sample_utils import apply_top_p
from rich.console import Console
from rich.table import Table

from worker.engine.batch.row import Row
from worker.engine.sampling.logprobs import logprobs_of
from worker.engine.sampling.sampler import draw
from worker.schedule.request import GenerationRequest, Sampling

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


def main(console: Console) -> bool:
    mx.random.seed(0)
    logits = 3 * mx.random.normal((32, VOCAB))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs)
    title = f"Sampling from {VOCAB:,} tokens, fp32"
    table = Table("rows", "draw", "together", "row by row", "ratio", title=title, title_justify="left")
    for rows in (1, 8, 32):
        for name, hows in KINDS.items():
            if rows > 1 or len(hows) == 1:
                table.add_row(str(rows), name, *compared(*draws(logprobs[:rows], hows)))
    for name, top in (("logprobs", 0), ("logprobs, 5 alternatives", 5)):
        table.add_row("32", name, *compared(*reports(logprobs, top)))
    console.print(table)
    return unseen_top_p(logprobs[:1], console)


def draws(logprobs: mx.array, hows: list[Sampling]) -> tuple[Callable[[], None], Callable[[], None]]:
    rows = [
        Row.of(GenerationRequest(str(i), (1,), 1, replace(hows[i % len(hows)], seed=i)))
        for i in range(logprobs.shape[0])
    ]

    def together() -> None:
        mx.eval(draw(logprobs, rows))

    def apart() -> None:  # as upstream does where each row has a sampler of its own
        mx.eval(mx.concatenate([draw(logprobs[i : i + 1], [row]) for i, row in enumerate(rows)]))

    return together, apart


def reports(logprobs: mx.array, top: int) -> tuple[Callable[[], None], Callable[[], None]]:
    def together() -> None:
        logprobs_of(logprobs, list(range(logprobs.shape[0])), [top] * logprobs.shape[0])

    def apart() -> None:
        for i in range(logprobs.shape[0]):
            logprobs_of(logprobs[i : i + 1], [i], [top])

    return together, apart


def compared(together: Callable[[], None], apart: Callable[[], None]) -> tuple[str, str, str]:
    """In turn, the first pair not counted."""
    pairs = [(seconds(together), seconds(apart)) for _ in range(RUNS + 1)][1:]
    shared, single = (statistics.median(column) for column in zip(*pairs, strict=True))
    return f"{shared * 1e3:.2f} ms", f"{single * 1e3:.2f} ms", f"{single / shared:.2f}"


def unseen_top_p(logprobs: mx.array, console: Console) -> bool:
    """Why the filters are our own: mlx-lm's are compiled for each value, while all rows wait."""
    top_p = 0.9 + time.time() % 1 / 1000  # a value that no cache on disk has seen either
    row = Row.of(GenerationRequest("a", (1,), 1, replace(PLAIN, top_p=top_p)))
    theirs = seconds(lambda: mx.eval(apply_top_p(logprobs, top_p)))
    first, again = (seconds(lambda: mx.eval(draw(logprobs, [row]))) for _ in range(2))
    console.print(
        f"One row with a top_p that no row had before: {first * 1e3:.0f} ms, again {again * 1e3:.0f} ms (bar: twice); "
        f"mlx-lm's filter {theirs * 1e3:.0f} ms."
    )
    return first <= 2 * again


def seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
