"""Offline runs against `mlx_lm.batch_generate` in one process, and what lines that share a prefix save."""

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

LINES, ROWS, TOKENS, RUNS = 500, 32, 24, 3  # ROWS is batch_generate's own default
Body = dict[str, Any]


def main(console: Console) -> bool:
    table = Table("measured", "bar", "came to", "holds", title="Offline runs", title_justify="left")
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = random_checkpoint(Path(folder) / "model", hidden=512, layers=8, silent=all_but_words())
        bench = Bench(Path(folder), checkpoint, console)
        for part in (throughput(bench), reuse(bench)):
            for what, bar, came_to, held in part:
                table.add_row(what, bar, came_to, {True: "[green]yes", False: "[red]no", None: ""}[held])
                holds = holds and held is not False
    console.print(table)
    return holds


def all_but_words() -> list[int]:
    """Tokens. A random model says anything, its end and halves of a character too. Without these all answers are of one
    length, and equal texts are equal tokens."""
    said = json.loads((TINY_CHAT / "tokenizer.json").read_text())
    vocab: dict[str, int] = said["model"]["vocab"]
    return [token for text, token in vocab.items() if not re.fullmatch("Ġ?[A-Za-z0-9]+", text)] + [
        added["id"] for added in said["added_tokens"]
    ]


@dataclass(frozen=True, slots=True)
class Told:
    seconds: float
    texts: list[str]
    cached: int = 0  # prompt tokens


class Bench:
    """Ways to have requests answered. A worker starts anew for each, so that it knows no prefix."""

    def __init__(self, folder: Path, checkpoint: Path, console: Console) -> None:
        self._folder, self._checkpoint, self._console, self._runs = folder, checkpoint, console, count()
        self._network, self._tokenizer, *_ = mlx_lm.load(str(checkpoint))
        mlx_lm.batch_generate(self._network, self._tokenizer, [[10, 11]], max_tokens=TOKENS)  # warm

    def in_one_process(self, bodies: Sequence[Body]) -> Told:
        began = time.perf_counter()
        said = mlx_lm.batch_generate(
            self._network,
            self._tokenizer,
            [self.prompt(body) for body in bodies],
            max_tokens=TOKENS,
            completion_batch_size=ROWS,
        )
        return self._told("batch_generate", began, said.texts)

    def queued(self, bodies: Sequence[Body], **settings: object) -> Told:
        """`sluice batch run`, from the command's start to its end."""
        with Server() as server, self._worker(server, **settings):
            self._run(server, some(ROWS, seed=0))
            began = time.perf_counter()
            run = self._run(server, bodies)
            texts = {number_of(answer): text_of(answer["response"]["body"]) for answer in run.answers()}
            cached = run.report().usage.input_tokens_details.cached_tokens
            return self._told("sluice batch run", began, [texts[number] for number in sorted(texts)], cached)

    def one_by_one(self, bodies: Sequence[Body], **settings: object) -> Told:
        """The lines in their order, each a job of the batch lane."""
        with Server() as server, self._worker(server, **settings):
            self._run(server, some(ROWS, seed=0))
            began = time.perf_counter()
            answers = asyncio.run(jobs_of_their_own(server.url, bodies))
            cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
            return self._told("jobs in file order", began, [text_of(answer) for answer in answers], cached)

    def prompt(self, body: Body) -> list[int]:
        tokens: list[int] = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        return tokens

    def _worker(self, server: Server, **settings: object) -> WorkerProcess:
        # Nobody waits for a token here, so prompts may take their time.
        given: dict[str, object] = {"max_rows": ROWS, "reserved_rows": 0, "step_ms": 1000, **settings}
        return WorkerProcess(server.url, model=self._checkpoint, **given)  # type: ignore[arg-type]

    def _run(self, server: Server, bodies: Sequence[Body]) -> BatchRun:
        run = BatchRun(server.url, self._folder / f"run-{next(self._runs)}", bodies).start()
        if code := run.wait():
            raise RuntimeError(f"the run ended with {code}")
        return run

    def _told(self, what: str, began: float, texts: list[str], cached: int = 0) -> Told:
        told = Told(time.perf_counter() - began, texts, cached)
        self._console.print(f"[dim]{what}, {len(texts)} lines: {told.seconds:.1f} s, {cached} tokens from the cache[/]")
        return told


def text_of(completion: Body) -> str:
    text: str = completion["choices"][0]["message"]["content"]
    return text


async def jobs_of_their_own(url: str, bodies: Sequence[Body]) -> list[Body]:
    async with Client(url) as client:
        jobs = [await client.submit(body, lane="batch") for body in bodies]
        return [await client.result(job.id) for job in jobs]


def ask(text: str) -> Body:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": TOKENS, "temperature": 0}


def words(number: int, dice: Random) -> str:
    return " ".join(dice.choice((*ITEMS, *PLACES)) for _ in range(number))


def some(lines: int, seed: int) -> list[Body]:
    """That share nothing but the first tokens of the template."""
    dice = Random(seed)
    return [ask(words(dice.randrange(4, 20), dice)) for _ in range(lines)]


# Lines that have nothing to do with each other


def throughput(bench: Bench) -> Iterator[Line]:
    bodies = some(LINES, seed=1)
    rounds = [(bench.queued(bodies), bench.in_one_process(bodies)) for _ in range(RUNS)]
    ours, theirs = ([*column] for column in zip(*rounds, strict=True))
    speed = ratio([told.seconds for told in theirs], [told.seconds for told in ours])
    rate = LINES * TOKENS / statistics.median(told.seconds for told in ours)
    yield (
        f"speed of {LINES} lines against batch_generate, {ROWS} rows, median of {RUNS}",
        "≥ 0.95",
        f"{speed:.3f} ({rate:,.0f} tokens/s)",
        speed >= 0.95,
    )
    same = min(sum(a == b for a, b in zip(our.texts, their.texts, strict=True)) for our, their in rounds)
    yield "  lines with the same text", f"{LINES}", f"{same}", same == LINES


# Questions about a few documents, all mixed, and room for some of the documents only

DOCUMENTS, QUESTIONS, DOCUMENT_WORDS = 10, 12, 100
ROOM_GB = 0.012


def reuse(bench: Bench) -> Iterator[Line]:
    dice = Random(2)
    documents = [words(DOCUMENT_WORDS, dice) for _ in range(DOCUMENTS)]
    asked = [[ask(f"{document}. {words(6, dice)}") for _ in range(QUESTIONS)] for document in documents]
    bodies = [body for questions in asked for body in questions]
    dice.shuffle(bodies)
    prompt_tokens = sum(len(bench.prompt(body)) for body in bodies)
    most = sum(shared(bench, first, other) for first, *others in asked for other in others)
    sorted_lines = bench.queued(bodies, prefix_cache_gb=ROOM_GB)
    others: dict[str, Callable[[], Told]] = {
        "in the file's order": partial(bench.one_by_one, bodies, prefix_cache_gb=ROOM_GB),
        "without a prefix cache": partial(bench.queued, bodies, prefix_cache_gb=0),
        "by batch_generate": partial(bench.in_one_process, bodies),
    }
    what = f"{len(bodies)} lines on {DOCUMENTS} documents, {prompt_tokens:,} prompt tokens"
    yield f"{what}: saved of those shared", "", f"{sorted_lines.cached:,} of {most:,}", None
    for way, answer in others.items():
        told = answer()
        same = sum(a == b for a, b in zip(sorted_lines.texts, told.texts, strict=True))
        came_to = f"{told.seconds / sorted_lines.seconds:.2f} ({told.cached:,} saved there, {same} the same text)"
        yield f"  speed against the same {way}", "", came_to, None


def shared(bench: Bench, one: Body, other: Body) -> int:
    pairs = zip(bench.prompt(one), bench.prompt(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
