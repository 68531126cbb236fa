"""CPU time of the engine's thread in a decode step: outside of calls into MLX, and for each kind of sampling.

CPU time hardly depends on what else the machine does. What MLX computes runs on other threads and is not counted."""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from mlx_lm.models import qwen3
from mlx_lm.sample_utils import apply_top_p
from rich.console import Console
from rich.table import Table

from models.random_checkpoints import dense
from schemas import ChatRequest
from tests.support.stack import TINY_CHAT
from tests.support.tekken import Tokens, read_tekken
from worker.engine.batch import decode_batch
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.batch.row import PendingTokens, Row, StepToken
from worker.engine.engine import Engine
from worker.engine.model.load import open_model
from worker.engine.options import EngineOptions
from worker.engine.sampling.sampler import draw
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.request import GenerationRequest, Sampling
from worker.text.codec import TextCodec
from worker.text.grammar.row.grammar import RowGrammar

ROWS = 1, 8, 32
_WARM, _STEPS = 16, 200
_PROMPT = tuple(range(5, 45))
_NEVER_ENDS = 100_000  # tokens


class MlxCalls:
    """The calling thread's CPU seconds inside calls into MLX, while `counted` is open."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the forward with its sampling, every evaluation, and the wait for the tokens of the last step."""
        replaced: list[tuple[Any, str, Callable[..., Any]]] = [
            (decode_batch, "forward", self._counting),
            (mx, "eval", self._counting),
            (mx, "async_eval", self._counting),
            (DecodeBatch, "collect", _after_evaluation),
        ]
        with ExitStack() as stack:
            for owner, name, replace_by in replaced:
                original = getattr(owner, name)
                setattr(owner, name, replace_by(original))
                stack.callback(setattr, owner, name, original)
            yield

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*given: Any, **named: Any) -> Any:
            began, self._depth = time.thread_time(), self._depth + 1
            try:
                return call(*given, **named)
            finally:
                self._depth -= 1
                if not self._depth:  # an evaluation within the forward is counted with it
                    self.seconds += time.thread_time() - began

        return counting


def _after_evaluation(collect: Callable[[DecodeBatch], list[StepToken]]) -> Callable[[DecodeBatch], list[StepToken]]:
    """Evaluate the tokens before they are collected, since `tolist`, which would wait for them, is not counted."""

    def waiting(batch: DecodeBatch) -> list[StepToken]:
        assert batch._fed is not None
        mx.eval(batch._fed.tokens, batch._fed.norms)
        return collect(batch)

    return waiting


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


def steps_table() -> Table:
    """Return the table of the engine's steps with the tiny model."""
    title = f"CPU time of the engine's thread in a decode step of the tiny model, medians of {_STEPS}"
    table = Table("rows", "in MLX", "outside", "outside, per row", title=title, title_justify="left")
    model = open_model(str(TINY_CHAT))
    model.tokenizer.eos_token_ids = set()  # so that no answer ends
    for rows in ROWS:
        engine = Engine(model, EngineOptions(10.0, rows=rows, prefix_bytes=0))
        for i in range(rows):
            engine.add(GenerationRequest(str(i), _PROMPT, 1024))
        while engine.step().rows < rows:
            pass
        inside_us, outside_us = step_us(engine.step)
        table.add_row(str(rows), f"{inside_us:.0f} µs", f"{outside_us:.0f} µs", f"{outside_us / rows:.1f} µs")
    return table


def step_us(step: Callable[[], object]) -> tuple[float, float]:
    """Return the median CPU microseconds of a step in MLX and outside of it."""
    return steps_us([step])[0]


def steps_us(steps: Sequence[Callable[[], object]], number: int = _STEPS) -> list[tuple[float, float]]:
    """Return the median CPU microseconds of each of these steps, which run in turn, in MLX and outside of it."""
    times = [list[tuple[float, float]]() for _ in steps]
    calls = MlxCalls()
    with calls.counted():
        for _ in range(_WARM + number):
            for step, own in zip(steps, times, strict=True):
                began, calls.seconds = time.thread_time(), 0.0
                step()
                own.append((calls.seconds, time.thread_time() - began - calls.seconds))
    each = [zip(*own[_WARM:], strict=True) for own in times]
    return [(1e6 * statistics.median(inside), 1e6 * statistics.median(outside)) for inside, outside in each]


# Sampling with a vocabulary of real size

_KINDS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=1.0),
    "top_k 20, top_p 0.95": Sampling(temperature=1.0, top_k=20, top_p=0.95),
    "bias on 10 tokens": Sampling(logit_bias=tuple((token, 1.0) for token in range(10))),
    "repetition penalty": Sampling(repetition_penalty=1.1),
    "frequency penalty": Sampling(frequency_penalty=0.5),
}
_FORWARDS = 24


def sampling_table(vocabulary: Path) -> Table:
    """Return the table of what each kind of sampling adds to a greedy step. `vocabulary`: a tekken.json."""
    tokens = read_tekken(vocabulary)
    tokenizer = LLTokenizer(TokenizerWrapper(Tokens(tokens)), n_vocab=len(tokens))
    title = f"Per step with {len(tokens):,} tokens: CPU time of the engine's thread, and wall time"
    table = Table("", *(f"{rows} row{'s' * (rows > 1)}" for rows in ROWS), title=title, title_justify="left")
    kinds = {name: [GenerationRequest("a", _PROMPT, _NEVER_ENDS, each)] for name, each in _KINDS.items()}
    plain = kinds["greedy"][0]
    kinds["logprobs"] = [replace(plain, top_logprobs=0)]
    kinds["logprobs, 5 alternatives"] = [replace(plain, top_logprobs=5)]
    for name, requests in kinds.items():
        table.add_row(name, *(_cell([Row.of(requests[0]) for _ in range(rows)], len(tokens)) for rows in ROWS))
    grammars = [[Row.of(replace(plain, grammar=_grammar(tokenizer))) for _ in range(rows)] for rows in ROWS]
    table.add_row("JSON schema", *(_cell(rows, len(tokens)) for rows in grammars))
    return table


def _cell(rows: list[Row], width: int) -> str:
    cpu_ms, wall_ms = forward_ms(rows, width)
    return f"{cpu_ms:.2f} / {wall_ms:.2f} ms"


def forward_ms(rows: list[Row], width: int) -> tuple[float, float]:
    """Return the median CPU milliseconds of this thread, and the median wall milliseconds, of a forward whose network
    returns the same logits every time, with the logprobs of its tokens."""
    mx.random.seed(0)
    logits = 3 * mx.random.normal((len(rows), 1, width))
    mx.eval(logits)
    network: Any = lambda tokens, cache: logits + 0  # noqa: E731
    batch = DecodeBatch(network)
    batch.rows = rows
    batch._next = PendingTokens.known([0] * len(rows))
    times = list[tuple[float, float]]()
    for _ in range(_FORWARDS):
        began, cpu = time.perf_counter(), time.thread_time()
        batch.launch()
        batch.collect()
        batch.wait()
        times.append((time.thread_time() - cpu, time.perf_counter() - began))
    cpu_s, wall_s = zip(*times[_FORWARDS // 3 :], strict=True)
    return 1e3 * statistics.median(cpu_s), 1e3 * statistics.median(wall_s)


def _grammar(tokenizer: LLTokenizer) -> RowGrammar:
    """Return the grammar of a list of texts, whose answers hardly ever end."""
    schema = {"type": "array", "items": {"type": "string"}}
    return RowGrammar(LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema)), frozenset({2}))


_VOCAB = 152_064


def unseen_top_p(console: Console) -> bool:
    """Check that a new top_p costs no compilation. mlx-lm's filters are compiled for each value."""
    logits = 3 * mx.random.normal((1, _VOCAB))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logprobs)
    top_p = 0.9 + time.time() % 1 / 1000  # a value that is in no cache on disk
    row = Row.of(GenerationRequest("a", (1,), 1, Sampling(temperature=1.0, top_p=top_p)))
    theirs = _seconds(lambda: mx.eval(apply_top_p(logprobs, top_p)))
    first, again = (_seconds(lambda: mx.eval(draw(logprobs, [row]))) for _ in range(2))
    console.print(
        f"One row with a new top_p: {first * 1e3:.0f} ms, again {again * 1e3:.0f} ms (limit: double); "
        f"mlx-lm's filter {theirs * 1e3:.0f} ms."
    )
    return first <= 2 * again


def _seconds(call: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


# Free answers of requests with tools

MOST_ADDED = 0.03  # of a step, by tools whose calls are held and which no row calls
_FAST_STEP_MS = 15.0  # of 32 rows on a Mac
_CALLS_STEPS = 48
_TEXTS = "README.md", "docs/contract.md", "worker/text/grammar/guide.py", "scripts/benchmarks/sampling.py"


def free_table(folder: Path, rows: int = ROWS[-1]) -> tuple[Table, bool]:
    """Return the table of what tools add to a step of rows that call none, and True if it is within the limit.
    `folder`: a model's tokenizer with its template."""
    tokenizer = MLXTokenizer(load_tokenizer(folder))
    width = len(tokenizer.tokens)
    said = [token for text in _TEXTS for token in tokenizer.encode(Path(text).read_text("utf-8"))]
    said_by_row = [said[row * len(said) // rows :] + said for row in range(rows)]
    title = f"CPU time of the engine's thread in a step of {rows} rows with {width:,} tokens, of answers without calls"
    columns = "in MLX", "outside", "outside, with tools", "added", "of the step", f"of a step of {_FAST_STEP_MS:.0f} ms"
    table, passed = Table("", *columns, title=title, title_justify="left"), True
    for name, guard in (("no limit of thoughts", False), ("thoughts that loop are closed", True)):
        batches = asyncio.run(_batches(TextCodec(tokenizer, width, hold_calls=True), width, said_by_row, guard))
        (inside_us, plain_us), (_, with_tools_us) = steps_us([partial(_step, batch) for batch in batches], _CALLS_STEPS)
        added_us = with_tools_us - plain_us
        ratios = added_us / (inside_us + plain_us), added_us / _FAST_STEP_MS / 1e3
        times = f"{inside_us:.0f} µs", f"{plain_us:.0f} µs", f"{with_tools_us:.0f} µs", f"{added_us:+.0f} µs"
        table.add_row(name, *times, *(f"{ratio:+.1%}" for ratio in ratios))
        passed = passed and max(ratios) <= MOST_ADDED
    return table, passed


def _step(batch: DecodeBatch) -> None:
    batch.launch()
    batch.collect()
    batch.wait()


class _Saying:
    """A random network with logits of a real vocabulary's width, by which rows say given tokens."""

    def __init__(self, width: int, said: list[list[int]]) -> None:
        self._network = qwen3.Model(qwen3.ModelArgs.from_dict({**dense(256, 8), "model_type": "qwen3"}))
        mx.eval(self._network.parameters())
        self._width, self._said = width, said
        self._next = 0

    def __call__(self, tokens: mx.array, cache: object) -> mx.array:
        """Return the logits (rows, 1, width)."""
        hidden: Any = self._network.model(tokens % 1024)
        logits = mx.broadcast_to(hidden[..., :1], (len(self._said), 1, self._width))
        said = mx.array([each[self._next] for each in self._said])
        self._next += 1
        raised: mx.array = logits.at[mx.arange(len(self._said)), 0, said].add(1e3)
        return raised


async def _batches(codec: TextCodec, width: int, said: list[list[int]], guard: bool) -> list[DecodeBatch]:
    """Return a batch of rows without tools, and one of rows whose calls are held."""
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    batches = list[DecodeBatch]()
    for tools in (None, [{"type": "function", "function": function}]):
        asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tools": tools})
        network: Any = _Saying(width, said)
        prompt, batch = await codec.prompt(asked), DecodeBatch(network)
        for _ in said:
            grammar = codec.limited(asked, prompt, await codec.grammar(asked, prompt), loop_guard=guard)
            batch.rows.append(Row.of(GenerationRequest("a", _PROMPT, _NEVER_ENDS, grammar=grammar)))
        batch._next = PendingTokens.known([0] * len(said))
        batches.append(batch)
    return batches


def main(console: Console, options: argparse.Namespace) -> bool:
    """Run the benchmark, print its tables, and return True if every value is within its limit."""
    console.print(steps_table())
    if options.vocabulary:
        console.print(sampling_table(options.vocabulary))
    passed = unseen_top_p(console)
    if options.tokenizer:
        table, is_within = free_table(options.tokenizer)
        console.print(table)
        passed = passed and is_within
    return passed
