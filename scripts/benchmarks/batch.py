"""Offline runs against `mlx_lm.batch_generate` in one process, and the effect of shared prefixes."""

import asyncio
import json
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from random import Random
from typing import Any

import mlx_lm
from rich.console import Console
from rich.table import Table

from scripts.batch_run import BatchRun, number_of
from scripts.benchmarks.engine import Line, ratio
from scripts.benchmarks.models import random_checkpoint
from scripts.stack import TINY_CHAT, Server, WorkerProcess
from scripts.tiny_chat.data import ITEMS, PLACES
from sluice import Client

LINES = 500
ROWS = 32  # batch_generate's own default
TOKENS = 24
RUNS = 3
Body = dict[str, Any]


def main(console: Console) -> bool:
    """Run the benchmark, print its table, and return True if every value is within its limit."""
    table = Table("measured", "bar", "came to", "holds", title="Offline runs", title_justify="left")
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder) / "model", hidden=512, layers=8, never_sampled=non_word_tokens())
        bench = Bench(Path(folder), checkpoint, console)
        for part in (throughput(bench), reuse(bench)):
            for label, limit, value, within in part:
                table.add_row(label, limit, value, {True: "[green]yes", False: "[red]no", None: ""}[within])
                holds = holds and within is not False
    console.print(table)
    return holds


def non_word_tokens() -> list[int]:
    """Return the tokens that are not whole ASCII words. If a random model never samples them, all answers have the same
    length, and equal texts have equal tokens."""
    config = json.loads((TINY_CHAT / "tokenizer.json").read_text("utf-8"))
    vocab: dict[str, int] = config["model"]["vocab"]
    return [token for text, token in vocab.items() if not re.fullmatch("Ġ?[A-Za-z0-9]+", text)] + [
        added["id"] for added in config["added_tokens"]
    ]


@dataclass(frozen=True, slots=True)
class Timed:
    """The answers to a set of requests, and the time that they took."""

    seconds: float
    texts: list[str]
    cached: int = 0  # prompt tokens from the prefix cache


class Bench:
    """Answers requests in several ways. Each way starts a new worker, whose prefix cache is empty."""

    def __init__(self, folder: Path, checkpoint: Path, console: Console) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._console = console
        self._runs = count()
        self._network, self._tokenizer, *_ = mlx_lm.load(str(checkpoint))
        mlx_lm.batch_generate(self._network, self._tokenizer, [[10, 11]], max_tokens=TOKENS)  # warm

    def in_one_process(self, bodies: Sequence[Body]) -> Timed:
        """Answer with mlx-lm's batch_generate in this process."""
        began = time.perf_counter()
        answers = mlx_lm.batch_generate(
            self._network,
            self._tokenizer,
            [self.prompt(body) for body in bodies],
            max_tokens=TOKENS,
            completion_batch_size=ROWS,
        )
        return self._timed("batch_generate", began, answers.texts)

    def queued(self, bodies: Sequence[Body], **settings: object) -> Timed:
        """Answer with `sluice batch run`, timed from the start of the command to its end."""
        with Server() as server, self._worker(server, **settings):
            self._run(server, random_bodies(ROWS, seed=0))
            began = time.perf_counter()
            run = self._run(server, bodies)
            texts = {number_of(answer): text_of(answer["response"]["body"]) for answer in run.answers()}
            cached = run.report().usage.input_tokens_details.cached_tokens
            return self._timed("sluice batch run", began, [texts[number] for number in sorted(texts)], cached)

    def one_by_one(self, bodies: Sequence[Body], **settings: object) -> Timed:
        """Answer with one job of the batch lane for each line, in file order."""
        with Server() as server, self._worker(server, **settings):
            self._run(server, random_bodies(ROWS, seed=0))
            began = time.perf_counter()
            answers = asyncio.run(run_jobs(server.url, bodies))
            cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
            return self._timed("jobs in file order", began, [text_of(answer) for answer in answers], cached)

    def prompt(self, body: Body) -> list[int]:
        """Return the tokens of a request's prompt."""
        tokens: list[int] = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        return tokens

    def _worker(self, server: Server, **settings: object) -> WorkerProcess:
        # A long step target, since no client waits for the next token.
        worker_settings: dict[str, object] = {"max_rows": ROWS, "reserved_rows": 0, "step_ms": 1000, **settings}
        return WorkerProcess(server.url, model=self._checkpoint, **worker_settings)  # type: ignore[arg-type]

    def _run(self, server: Server, bodies: Sequence[Body]) -> BatchRun:
        run = BatchRun(server.url, self._folder / f"run-{next(self._runs)}", bodies).start()
        if code := run.wait():
            raise RuntimeError(f"the run ended with {code}")
        return run

    def _timed(self, label: str, began: float, texts: list[str], cached: int = 0) -> Timed:
        timed = Timed(time.perf_counter() - began, texts, cached)
        self._console.print(f"[dim]{label}, {len(texts)} lines: {timed.seconds:.1f} s, {cached} cached tokens[/]")
        return timed


def text_of(completion: Body) -> str:
    """Return the text of a completion."""
    text: str = completion["choices"][0]["message"]["content"]
    return text


async def run_jobs(url: str, bodies: Sequence[Body]) -> list[Body]:
    """Submit each request to the batch lane, and return the results."""
    async with Client(url) as client:
        jobs = [await client.submit(body, lane="batch") for body in bodies]
        return [await client.result(job.id) for job in jobs]


def request_of(text: str) -> Body:
    """Return a greedy request with this message."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}


def random_words(number: int, dice: Random) -> str:
    """Return a text of this many words."""
    return " ".join(dice.choice((*ITEMS, *PLACES)) for _ in range(number))


def random_bodies(lines: int, seed: int) -> list[Body]:
    """Return requests that share only the first tokens of the template."""
    dice = Random(seed)
    return [request_of(random_words(dice.randrange(4, 20), dice)) for _ in range(lines)]


# Unrelated lines


def throughput(bench: Bench) -> Iterator[Line]:
    """Compare the speed and the texts with batch_generate."""
    bodies = random_bodies(LINES, seed=1)
    rounds = [(bench.queued(bodies), bench.in_one_process(bodies)) for _ in range(RUNS)]
    ours, theirs = ([*column] for column in zip(*rounds, strict=True))
    speed = ratio([timed.seconds for timed in theirs], [timed.seconds for timed in ours])
    rate = LINES * TOKENS / statistics.median(timed.seconds for timed in ours)
    yield (
        f"speed of {LINES} lines against batch_generate, {ROWS} rows, median of {RUNS}",
        "≥ 0.95",
        f"{speed:.3f} ({rate:,.0f} tokens/s)",
        speed >= 0.95,
    )
    same = min(sum(a == b for a, b in zip(our.texts, their.texts, strict=True)) for our, their in rounds)
    yield "  lines with the same text", f"{LINES}", f"{same}", same == LINES


# Questions about a few documents in random order, with a prefix cache that holds only some of the documents

DOCUMENTS = 10
QUESTIONS = 12
DOCUMENT_WORDS = 100
CACHE_GB = 0.012


def reuse(bench: Bench) -> Iterator[Line]:
    """Measure how many shared prompt tokens are reused, and what that saves."""
    dice = Random(2)
    documents = [random_words(DOCUMENT_WORDS, dice) for _ in range(DOCUMENTS)]
    questions_by_document = [
        [request_of(f"{document}. {random_words(6, dice)}") for _ in range(QUESTIONS)] for document in documents
    ]
    bodies = [body for questions in questions_by_document for body in questions]
    dice.shuffle(bodies)
    prompt_tokens = sum(len(bench.prompt(body)) for body in bodies)
    num_shared = sum(shared(bench, first, other) for first, *others in questions_by_document for other in others)
    sorted_lines = bench.queued(bodies, prefix_cache_gb=CACHE_GB)
    others: dict[str, Callable[[], Timed]] = {
        "in the file's order": partial(bench.one_by_one, bodies, prefix_cache_gb=CACHE_GB),
        "without a prefix cache": partial(bench.queued, bodies, prefix_cache_gb=0),
        "by batch_generate": partial(bench.in_one_process, bodies),
    }
    label = f"{len(bodies)} lines on {DOCUMENTS} documents, {prompt_tokens:,} prompt tokens"
    yield f"{label}: reused of the shared tokens", "", f"{sorted_lines.cached:,} of {num_shared:,}", None
    for method, answer in others.items():
        timed = answer()
        same = sum(a == b for a, b in zip(sorted_lines.texts, timed.texts, strict=True))
        value = f"{timed.seconds / sorted_lines.seconds:.2f} ({timed.cached:,} cached there, {same} equal texts)"
        yield f"  speed against the same {method}", "", value, None


def shared(bench: Bench, one: Body, other: Body) -> int:
    """Return the length of the common prefix of two prompts, in tokens."""
    pairs = zip(bench.prompt(one), bench.prompt(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
