"""The engine against mlx-lm: throughput, longest gap, adding rows, and rows of very different length."""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import BatchGenerator
from rich.console import Console
from rich.table import Table

from models.random_checkpoints import random_checkpoint
from worker.engine.batch.decode_batch import ComputedRow
from worker.engine.batch.groups import Groups
from worker.engine.batch.row import PendingTokens, Row
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.options import EngineOptions
from worker.engine.step.planner import longest_gap_s
from worker.engine.upstream.mlx_lm import generation_stream, make_prompt_cache
from worker.outcomes import Sampled
from worker.request import GenerationRequest

RUNS = 5
Line = tuple[str, str, str, bool | None]  # label, limit, value, and if the value is within the limit


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `scripts/bench engine`."""
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=[*PARTS], metavar="NAME",
        help=f"which of {', '.join(PARTS)}; default: all")  # fmt: skip


def main(console: Console, parts: Sequence[str]) -> bool:
    """Run these parts of the benchmark, print the table, and return True if every value is within its limit."""
    with tempfile.TemporaryDirectory() as folder:
        model = open_model(str(random_checkpoint(Path(folder), hidden=512, layers=8)))
    model.tokenizer.eos_token_ids = []  # a random model may end anywhere
    table = Table("measured", "bar", "came to", "holds", title="The engine", title_justify="left")
    holds = True
    for part in parts:
        for label, limit, value, within in PARTS[part](model):
            table.add_row(label, limit, value, {True: "[green]yes", False: "[red]no", None: ""}[within])
            holds = holds and within is not False
    console.print(table)
    return holds


def prompt(tokens: int, seed: int) -> tuple[int, ...]:
    """Return a random prompt of this many tokens."""
    dice = Random(seed)
    return tuple(dice.randrange(10, 1024) for _ in range(tokens))


def alternate(*calls: Callable[[], float], runs: int = RUNS) -> list[list[float]]:
    """Call each function in turn, `runs` times after a warm-up, and return the values by function."""
    rounds = [[call() for call in calls] for _ in range(runs + 1)][1:]
    return [list(column) for column in zip(*rounds, strict=True)]


def ratio(above: list[float], below: list[float]) -> float:
    """Return the median of the ratios of values measured one after the other, so that disturbances affect both."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# Throughput: all requests are present from the start

TOKENS, PROMPT = 96, 32


def throughput(model: Model) -> Iterator[Line]:
    """Compare the speed with mlx-lm's batch_generate."""
    for rows in (1, 2, 4, 8, 16, 32):
        ours, theirs = alternate(partial(engine_s, model, rows), partial(batch_generate_s, model, rows))
        speed, rate = ratio(theirs, ours), rows * TOKENS / statistics.median(ours)
        yield (
            f"speed against batch_generate, {rows} rows",
            "≥ 0.97",
            f"{speed:.3f} ({rate:,.0f} tokens/s)",
            speed >= 0.97,
        )


def one_by_one(model: Model) -> Iterator[Line]:
    """Compare the speed with single requests."""
    for rows in (8, 32):
        ours, theirs = alternate(partial(engine_s, model, rows), partial(generate_s, model, rows), runs=1)
        yield f"speed against generate, one after the other, {rows} rows", "", f"{ratio(theirs, ours):.2f}", None


def engine_s(model: Model, rows: int) -> float:
    """Return the seconds that the engine takes for all requests."""
    engine, began = Engine(model, EngineOptions(10.0)), time.perf_counter()
    for i in range(rows):
        engine.add(GenerationRequest(str(i), prompt(PROMPT, i), TOKENS))
    while len(engine):
        engine.step()
    return time.perf_counter() - began


def batch_generate_s(model: Model, rows: int) -> float:
    """Return the seconds that batch_generate takes for the same requests."""
    prompts = [list(prompt(PROMPT, i)) for i in range(rows)]
    began = time.perf_counter()
    mlx_lm.batch_generate(model.network, model.tokenizer, prompts, max_tokens=TOKENS)
    return time.perf_counter() - began


def generate_s(model: Model, rows: int) -> float:
    """Return the seconds that mlx_lm.generate takes for them one by one."""
    prompts = [list(prompt(PROMPT, i)) for i in range(rows)]
    began = time.perf_counter()
    for tokens in prompts:
        mlx_lm.generate(model.network, model.tokenizer, tokens, max_tokens=TOKENS)
    return time.perf_counter() - began


# Answers without a stated limit, against a limit that is reserved in full

CHATS = 16
CONTEXT = 32_768  # tokens
FULL_ROWS = 4  # rows as long as the context for which there is memory
STATED = 1_024  # tokens
LIMIT_RUNS = 4  # after a warm-up


def limits(model: Model) -> Iterator[Line]:
    """Compare the speed of the same answers with and without a stated limit, in the same memory."""
    memory = model.costs.peak_bytes([[CONTEXT] * FULL_ROWS])
    dice = Random(0)
    tokens = [min(STATED, 1 + int(300 * dice.lognormvariate(0, 1.1))) for _ in range(CHATS - 1)] + [STATED]
    ways = [Engine(model, EngineOptions(10.0, memory=memory, prefix_bytes=0)) for _ in range(2)]
    cpu_s: list[list[float]] = [[], []]

    def answer(way: int) -> float:
        began, cpu_began = time.perf_counter(), time.process_time()
        answer_all(ways[way], tokens, grows=way == 0)
        cpu_s[way].append(time.process_time() - cpu_began)
        return time.perf_counter() - began

    ours, fixed = alternate(partial(answer, 0), partial(answer, 1), runs=LIMIT_RUNS)  # the first round is a warm-up
    speed, cpu = ratio(fixed, ours), ratio(cpu_s[1][1:], cpu_s[0][1:])
    ratios = sorted(b / a for a, b in zip(ours, fixed, strict=True))
    rate = sum(tokens) / statistics.median(ours)
    yield (
        f"tokens/s of {CHATS} answers without a limit, against {STATED:,} reserved for each",
        "≥ 0.95",
        f"{speed:.3f} ({ratios[0]:.2f} to {ratios[-1]:.2f}; {rate:,.0f} tokens/s; of processor time {cpu:.3f})",
        speed >= 0.95,
    )


def answer_all(engine: Engine, tokens: Sequence[int], *, grows: bool) -> None:
    """Generate answers of these lengths, all at once. `grows`: their requests state no limit, and one answer in five is
    longer than what is reserved for it at first, as soon as the engine has learned the lengths."""
    for i, each in enumerate(tokens):
        request = GenerationRequest(str(i), prompt(PROMPT, i), each if grows else STATED, grows=grows)
        engine.add(request)
    left = {str(i): each for i, each in enumerate(tokens)}
    while len(engine):
        for outcome in engine.step().outcomes:
            if isinstance(outcome, Sampled):
                left[outcome.id] -= 1
                if left[outcome.id] == 0 and not outcome.finish_reason:
                    engine.remove(outcome.id)


# The longest gap of a row while other prompts arrive

ARRIVING = (1536, *[24] * 8)
STEP_S = 0.1
MAX_GAP_S = longest_gap_s(STEP_S, 0.0)


def gaps(model: Model) -> Iterator[Line]:
    """Measure the longest gap of a running row."""
    engine = Engine(model, EngineOptions(STEP_S, prefix_bytes=0))  # no prefix cache, since the prompts repeat
    default_s, _ = stock_gap(model)  # slow, so measured once
    engine_gap(engine)  # warm-up: the step budget learns the speed
    runs = [(engine_gap(engine), stock_gap(model, prefill_step_size=128)) for _ in range(RUNS)]
    ours, fine = (statistics.median(gap for gap, _ in way) for way in zip(*runs, strict=True))
    yield (
        f"longest gap while 1×{ARRIVING[0]} and {len(ARRIVING) - 1}×{ARRIVING[1]} arrive, for a step of {STEP_S:.1f} s",
        f"≤ {MAX_GAP_S * 1000:.0f} ms",
        f"{ours * 1000:.0f} ms (stock {default_s * 1000:,.0f}, at 128 {fine * 1000:.0f})",
        ours <= MAX_GAP_S,
    )
    share = statistics.median(ours_s / theirs_s for (_, ours_s), (_, theirs_s) in runs)
    yield "until all have answered, against stock at 128", "≤ 1.05", f"{share:.2f}", share <= 1.05


ANSWER = 16


def engine_gap(engine: Engine) -> tuple[float, float]:
    """Return the longest time between two tokens of a running row, and the time until all others have answered."""
    engine.add(GenerationRequest("running", prompt(PROMPT, 0), 2000))
    for _ in range(8):
        engine.step()
    began = last = time.perf_counter()
    for i, tokens in enumerate(ARRIVING):
        engine.add(GenerationRequest(str(i), prompt(tokens, i), ANSWER))
    longest = 0.0
    while len(engine) > 1:
        outcomes = engine.step().outcomes
        now = time.perf_counter()
        if any(isinstance(each, Sampled) and each.id == "running" for each in outcomes):
            longest, last = max(longest, now - last), now
    engine.remove("running")
    return longest, last - began


def stock_gap(model: Model, **settings: int) -> tuple[float, float]:
    """Return the same for mlx-lm's BatchGenerator."""
    stock = BatchGenerator(model.network, **settings)
    [running] = stock.insert([list(prompt(PROMPT, 0))], [2000])
    for _ in range(8):
        stock.next()
    began = last = time.perf_counter()
    unfinished = set(stock.insert([list(prompt(n, i)) for i, n in enumerate(ARRIVING)], [ANSWER] * len(ARRIVING)))
    longest = 0.0
    while unfinished:
        _, outcomes = stock.next()
        now = time.perf_counter()
        if any(each.uid == running for each in outcomes):
            longest, last = max(longest, now - last), now
        unfinished -= {each.uid for each in outcomes if each.finish_reason}
    stock.close()
    return longest, last - began


# Adding rows, and rows of very different length. Random caches suffice: their contents do not change the times


class Batch:
    """The rows of a batch, decoded as the engine does it."""

    def __init__(self, model: Model) -> None:
        self._network = model.network
        self._groups = Groups(model.network, lambda groups: True)
        self._rows = 0

    def add(self, tokens: int) -> float:
        """Add a row with `tokens` tokens, and return the seconds that it takes."""
        row = Row.of(GenerationRequest(str(self._rows), prompt(tokens, self._rows), 10_000))
        cache = fill_cache(make_prompt_cache(self._network), self._network, tokens - 1)
        self._rows += 1
        began = time.perf_counter()
        with mx.stream(generation_stream):
            self._groups.add([ComputedRow(row, cache, PendingTokens.known([10]))])
        return time.perf_counter() - began

    def step(self) -> float:
        """Decode one token for each row, and return the seconds that it takes."""
        began = time.perf_counter()
        with mx.stream(generation_stream):
            outcomes, _ = self._groups.step()
            for outcome in outcomes:
                outcome.row.answer.append(outcome.token)
            self._groups.rebalance()
        return time.perf_counter() - began

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(self._groups.buffers)

    def __str__(self) -> str:
        return " + ".join(f"{len(group)}×{max(group)}" for group in self._groups.lengths)


def fill_cache(cache: list[Any], network: nn.Module, tokens: int) -> list[Any]:
    """Fill a cache with random keys and values of this many tokens, and return it."""
    heads, width = network.args.num_key_value_heads, network.args.head_dim
    for layer in cache:
        layer.keys, layer.values = (mx.random.normal((1, heads, tokens, width)) for _ in range(2))
        layer.offset = tokens
    mx.eval([layer.state for layer in cache])
    return cache


def additions(model: Model) -> Iterator[Line]:
    """Measure the cost of adding a row to a large batch."""
    batch = Batch(model)
    for _ in range(24):
        batch.add(2000)
    for _ in range(5):
        batch.step()
    within, growing = list[float](), list[float]()
    while len(growing) < 1:
        decode_s = statistics.median(batch.step() for _ in range(5))
        size = batch.nbytes
        took_s = batch.add(2000) + batch.step()  # adding waits for the running step
        (within if batch.nbytes == size else growing).append(took_s / decode_s)
    cost = statistics.median(within)
    yield (
        "a row is added to 24×2,000, and all decode",
        "≤ 1.5 steps",
        f"{cost:.2f} (buffers grow: {growing[0]:.2f})",
        cost <= 1.5,
    )


def mixed_lengths(model: Model) -> Iterator[Line]:
    """Compare a step of short rows and a long one with steps of each alone."""
    short, long, mixed = (batch_of(model, lengths) for lengths in ([64] * 7, [4000], [64] * 7))
    for _ in range(40):
        mixed.step()  # settle without the long row
    mixed.add(4000)
    before_s = statistics.median(mixed.step() for _ in range(5))
    for _ in range(100):
        mixed.step()
    together, *apart = alternate(mixed.step, short.step, long.step, runs=30)
    cost = ratio(together, [a + b for a, b in zip(*apart, strict=True)])
    value = f"{cost:.2f} ({before_s * 1000:.0f} ms at first, then {statistics.median(together) * 1000:.0f}: {mixed})"
    yield "a step of 7×64 and 1×4,000, against both alone", "≤ 1.3", value, cost <= 1.3


def batch_of(model: Model, lengths: list[int]) -> Batch:
    """Return a batch with rows of these lengths, in tokens."""
    batch = Batch(model)
    for tokens in lengths:
        batch.add(tokens)
    return batch


PARTS: dict[str, Callable[[Model], Iterator[Line]]] = {
    "throughput": throughput,
    "one-by-one": one_by_one,
    "limits": limits,
    "gaps": gaps,
    "additions": additions,
    "mixed-lengths": mixed_lengths,
}
