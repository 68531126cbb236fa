"""CPU time of the engine's thread in a decode step: outside of calls into MLX, and for each kind of sampling.

CPU time hardly depends on what else the machine does. What MLX computes runs on other threads and is not counted."""

import asyncio
import base64
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from mlx_lm.models import qwen3
from rich.console import Console
from rich.table import Table

from schemas import ChatRequest
from scripts.benchmarks.models import dense
from scripts.stack import TINY_CHAT
from worker.engine.batch import decode_batch
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.batch.pending import PendingTokens, StepToken
from worker.engine.batch.row import Row
from worker.engine.engine import Engine
from worker.engine.model.load import open_model
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.schedule.report import StepReport
from worker.schedule.request import GenerationRequest, Sampling
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


def steps_table() -> Table:
    """Return the table of the engine's steps with the tiny model."""
    title = f"CPU time of the engine's thread in a decode step of the tiny model, medians of {_STEPS}"
    table = Table("rows", "in MLX", "outside", "outside, per row", title=title, title_justify="left")
    model = open_model(str(TINY_CHAT))
    model.tokenizer.eos_token_ids = set()  # so that no answer ends
    for rows in ROWS:
        engine = Engine(model, step_s=10.0, rows=rows, prefix_bytes=0)
        for i in range(rows):
            engine.add(GenerationRequest(str(i), _PROMPT, 1024))
        while engine.step().rows < rows:
            pass
        inside_us, outside_us = step_us(engine.step)
        table.add_row(str(rows), f"{inside_us:.0f} µs", f"{outside_us:.0f} µs", f"{outside_us / rows:.1f} µs")
    return table


def step_us(step: Callable[[], StepReport]) -> tuple[float, float]:
    """Return the median CPU microseconds of a step in MLX and outside of it."""
    pairs = list[tuple[float, float]]()
    calls = MlxCalls()
    with calls.counted():
        for _ in range(_WARM + _STEPS):
            began, calls.seconds = time.thread_time(), 0.0
            step()
            pairs.append((calls.seconds, time.thread_time() - began - calls.seconds))
    inside, outside = zip(*pairs[_FEW:], strict=True)
    return 1e6 * statistics.median(inside), 1e6 * statistics.median(outside)


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


class Tokens:
    """A tokenizer as llguidance takes it, which finds the longest token at each place."""

    eos_token_id, bos_token_id = 2, 1
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self._ids = {token: id for id, token in enumerate(tokens)}
        self._longest = max(map(len, tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        data, found = text.encode() if isinstance(text, str) else text, list[int]()
        while data:
            size = next(n for n in range(min(self._longest, len(data)), 0, -1) if data[:n] in self._ids)
            found.append(self._ids[data[:size]])
            data = data[size:]
        return found


def read_tekken(file: Path) -> list[bytes]:
    """Return the bytes of each token of a tekken.json, as mistral-common ships them; special tokens come first."""
    content = json.loads(file.read_text("utf-8"))
    config = content["config"]
    special = config["default_num_special_tokens"]
    ordinary = content["vocab"][: config["default_vocab_size"] - special]
    return [b"<%d>" % i for i in range(special)] + [base64.b64decode(entry["token_bytes"]) for entry in ordinary]


def _grammar(tokenizer: LLTokenizer) -> RowGrammar:
    """Return the grammar of a list of texts, whose answers hardly ever end."""
    schema = {"type": "array", "items": {"type": "string"}}
    return RowGrammar(LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema)), frozenset({2}))


# Free answers of requests with tools

MOST_ADDED = 0.03  # of a step, by tools whose calls are held and which no row calls
_FEW = 4  # steps before these
_FAST_STEP_MS = 15.0  # of 32 rows on a Mac; here the logits alone take longer, so this ratio is the strict one
_CALLS_STEPS = 24
_TEXTS = "README.md", "docs/contract.md", "worker/text/grammar/guide.py", "scripts/benchmarks/host.py"


def free_table(folder: Path, rows: int = ROWS[-1]) -> tuple[Table, bool]:
    """Return the table of what tools add to a step of rows that call none, and True if it is within the limit.
    `folder`: a model's tokenizer with its template."""
    tokenizer = MLXTokenizer(load_tokenizer(folder))
    width = len(tokenizer.tokens)
    said = [token for text in _TEXTS for token in tokenizer.encode(Path(text).read_text("utf-8"))]
    network = _Saying(width, [said[row * len(said) // rows :] + said for row in range(rows)])
    title = f"A step of {rows} rows with {width:,} tokens, of answers without calls: medians of {_CALLS_STEPS}"
    columns = (
        "without tools",
        "with them",
        "added: CPU time of the thread",
        "of it",
        "of the step",
        "of a step of 15 ms",
    )
    table, passed = Table("", *columns, title=title, title_justify="left"), True
    for name, guard in (("no limit of thoughts", False), ("thoughts that loop are closed", True)):
        plain, with_tools = asyncio.run(_batches(TextCodec(tokenizer, width, hold_calls=True), network, rows, guard))
        pairs = [(network.step(plain, step), network.step(with_tools, step)) for step in range(_CALLS_STEPS + _FEW)]
        cpu_ms, added_ms = (1e3 * statistics.median(each) for each in _cpu_s(pairs[_FEW:]))
        wall_ms = 1e3 * statistics.median(before[1] for before, _ in pairs[_FEW:])
        ratios = [added_ms / whole for whole in (cpu_ms, wall_ms, _FAST_STEP_MS)]
        times = f"{cpu_ms:.2f} / {wall_ms:.0f} ms", f"{cpu_ms + added_ms:.2f} ms", f"{added_ms * 1e3:+.0f} µs"
        table.add_row(name, *times, *(f"{ratio:+.1%}" for ratio in ratios))
        passed = passed and ratios[-1] <= MOST_ADDED
    return table, passed


def _cpu_s(pairs: "list[tuple[Times, Times]]") -> tuple[list[float], list[float]]:
    """Return the CPU seconds of the steps without tools, and what the steps beside them took more."""
    return [before[0] for before, _ in pairs], [after[0] - before[0] for before, after in pairs]


Times = tuple[float, float]  # CPU seconds of this thread, and seconds


class _Saying:
    """A random network of a real vocabulary's width, whose rows say given tokens."""

    def __init__(self, width: int, said: list[list[int]]) -> None:
        mx.random.seed(0)
        self._network = qwen3.Model(qwen3.ModelArgs.from_dict({**dense(256, 8), "model_type": "qwen3"}))
        self._head = mx.random.normal((256, width))
        mx.eval(self._network.parameters(), self._head)
        self._said, self._step = said, 0

    def __call__(self, tokens: mx.array, cache: object) -> mx.array:
        """Return the logits (rows, 1, width)."""
        logits: Any = self._network.model(tokens % 1024) @ self._head
        said = mx.array([each[self._step] for each in self._said])
        raised: mx.array = logits.at[mx.arange(len(self._said)), 0, said].add(1e3)
        return raised

    def step(self, batch: DecodeBatch, number: int) -> Times:
        """Run a step of the batch, the `number`-th."""
        self._step = number
        began, cpu = time.perf_counter(), time.thread_time()
        batch.launch()
        batch.collect()
        batch.wait()
        return time.thread_time() - cpu, time.perf_counter() - began


async def _batches(codec: TextCodec, network: Any, rows: int, guard: bool) -> list[DecodeBatch]:
    """Return a batch of rows without tools, and one of rows whose calls are held."""
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    batches = list[DecodeBatch]()
    for tools in (None, [{"type": "function", "function": function}]):
        asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], "tools": tools})
        prompt, batch = await codec.prompt(asked), DecodeBatch(network)
        for _ in range(rows):
            grammar = codec.limited(asked, prompt, await codec.grammar(asked, prompt), loop_guard=guard)
            batch.rows.append(Row.of(GenerationRequest("a", _PROMPT, _NEVER_ENDS, grammar=grammar)))
        batch._next = PendingTokens.known([0] * rows)
        batches.append(batch)
    return batches


def main(console: Console, vocabulary: Path | None, tokenizer: Path | None) -> bool:
    """Print the tables, and return True if every value is within its limit."""
    console.print(steps_table())
    if vocabulary:
        console.print(sampling_table(vocabulary))
    if not tokenizer:
        return True
    table, passed = free_table(tokenizer)
    console.print(table)
    return passed
