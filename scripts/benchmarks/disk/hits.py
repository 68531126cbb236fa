"""Hits in memory, with and without a disk tier."""

import statistics
from functools import partial
from itertools import count
from pathlib import Path

from scripts.benchmarks.disk.figures import Figure, at_most
from scripts.benchmarks.disk.worker import Worker
from scripts.benchmarks.engine import alternate, prompt, ratio
from worker.engine.model.load import Model

MAX_OF_OFF = 1.02
_SHARED = 1000  # tokens
_QUESTION = 40


def figure(kind: str, model: Model, folder: Path, hits: int) -> Figure:
    """Compare the first token of prompts that share a prefix in memory. Two at a time are compared, and take turns at
    being the first."""
    shared, seeds = prompt(_SHARED, seed=7), count(100)
    on, off = Worker(model, folder), Worker(model, None)

    def first_token_s(worker: Worker) -> float:
        answer = worker.answer(shared + prompt(_QUESTION, seed=next(seeds)), (_SHARED,))
        return answer.first_token_s

    for worker in (on, off):
        first_token_s(worker)
    pairs = [
        *zip(*alternate(partial(first_token_s, on), partial(first_token_s, off), runs=(hits + 1) // 2), strict=True)
    ]
    turned = alternate(partial(first_token_s, off), partial(first_token_s, on), runs=(hits + 1) // 2)
    pairs += [(on_s, off_s) for off_s, on_s in zip(*turned, strict=True)]
    for worker in (on, off):
        worker.abandon()
    on_s, off_s = ([*column] for column in zip(*pairs, strict=True))
    detail = f" ({1000 * statistics.median(on_s):.0f} ms, {1000 * statistics.median(off_s):.0f} ms)"
    return at_most(
        f"hits in memory with the disk tier, against without: {kind}", ratio(on_s, off_s), MAX_OF_OFF, detail
    )
