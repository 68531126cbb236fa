"""The prefix cache: cost of a hit and of a look-up, memory, and length of hits by family."""

import copy
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import LRUPromptCache
from rich.console import Console
from rich.table import Table

from scripts.benchmarks.engine import Line, fill_cache, prompt, ratio
from scripts.benchmarks.models import hybrid_checkpoint, random_checkpoint
from scripts.benchmarks.reach import reach
from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.cache.segments import token_bytes
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.prefix.cache import GRID, PrefixCache
from worker.engine.upstream.mlx_lm import KVCache, make_prompt_cache
from worker.schedule.cache.prefix import PrefixTree, checkpoint_positions
from worker.schedule.outcomes import Prefilled, Sampled
from worker.schedule.request import GenerationRequest

MIB = 1 << 20
CACHE_BYTES = 1 << 30  # bytes; more than any of these measurements stores


def main(console: Console) -> bool:
    """Run the benchmark, print its table, and return True if every value is within its limit."""
    table = Table("measured", "bar", "came to", "holds", title="The prefix cache", title_justify="left")
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        dense = open_checkpoint(random_checkpoint(Path(folder) / "plain", hidden=512, layers=8))
        hybrid = open_checkpoint(hybrid_checkpoint(Path(folder) / "hybrid", hidden=512, layers=8))
        small = open_checkpoint(random_checkpoint(Path(folder) / "small", hidden=256, layers=4))
        small_hybrid = open_checkpoint(hybrid_checkpoint(Path(folder) / "small hybrid", hidden=256, layers=4))
    parts: list[Callable[[], Iterator[Line]]] = [
        partial(first_tokens, dense, {"KV": 1}),
        partial(first_tokens, hybrid, {"hybrid": 1, "hybrid, the opening taken back": OPENING}),
        lookups,
        partial(memory, "KV", small),
        partial(memory, "hybrid", small_hybrid),
        partial(copies_of_arrays, dense),
    ]
    for part in parts:
        for label, limit, value, within in part():
            table.add_row(label, limit, value, {True: "[green]yes", False: "[red]no", None: ""}[within])
            holds = holds and within is not False
    console.print(table)
    return reach(console) and holds


def open_checkpoint(checkpoint: Path) -> Model:
    """Open a model without end-of-sequence tokens."""
    model = open_model(str(checkpoint))
    model.tokenizer.eos_token_ids = []  # a random model may sample one at any time
    return model


# Conversations on one system prompt. What opens the answer stays in the next prompt, or the template takes it back, as
# it does an open think block: the boundary then lies before it

CONVERSATIONS = 20
TURNS = 5
SYSTEM = 1000
USER = 40
OPENING = 4
ANSWER = 16


class Chat:
    """A conversation, of which each prompt contains the whole history."""

    def __init__(self, number: int, system: int, *, opening: int = 1) -> None:
        """`opening`: number of tokens after the boundary of the last turn; at least the last one of the prompt."""
        self.number = number
        self.turn = 0
        self.system = system
        self.opening = opening
        self.history = prompt(system, seed=0)

    def next_turn(self) -> tuple[int, ...]:
        """Append the user's next turn, and return its tokens."""
        self.turn += 1
        new = prompt(USER, seed=1000 * self.number + self.turn)
        self.history += new
        return new

    def sequence(self) -> GenerationRequest:
        """Return the request for the next answer."""
        boundaries = (len(self.history) - self.opening, self.system)
        return GenerationRequest(f"{self.number}.{self.turn}", self.history, ANSWER, boundaries=boundaries)


@dataclass(frozen=True, slots=True)
class Measured:
    """One request's measurements."""

    first_token_s: float
    cached: int  # tokens
    answer: tuple[int, ...]
    nbytes: int  # of the prefix cache, after the request


def run_request(engine: Engine, sequence: GenerationRequest) -> Measured:
    """Run a request alone to its end."""
    began = time.perf_counter()
    first = 0.0
    cached = 0
    answer = list[int]()
    nbytes = 0
    engine.add(sequence)
    while len(engine):
        report = engine.step()
        nbytes = report.prefix.nbytes
        for outcome in report.outcomes:
            if isinstance(outcome, Prefilled):
                cached = outcome.cached
            elif isinstance(outcome, Sampled) and outcome.token is not None:
                first = first or time.perf_counter() - began
                answer.append(outcome.token)
    return Measured(first, cached, tuple(answer), nbytes)


class BareModel:
    """The lower bound: the model on the new tokens of a conversation, with its cache at hand and large enough.

    Nothing is looked up, restored or stored, and there is no batch.
    """

    def __init__(self, network: nn.Module, system_cache: list[Any]) -> None:
        """`system_cache`: the cache of the system prompt, which is copied."""
        self._network, self._cache = network, copy.deepcopy(system_cache)
        for layer in layers(self._cache):
            if isinstance(layer, KVCache):
                layer.keys, layer.values = (_extended(buffer, 512) for buffer in (layer.keys, layer.values))
        slots.materialize(self._cache)

    def first_token_s(self, new: tuple[int, ...]) -> tuple[float, float]:
        """Compute the new tokens. Return the seconds until the first token of the answer is computed, and until the
        forward for the second is launched, which is when mlx-lm and the engine return the first. On a CPU that forward
        is complete by then."""
        began = time.perf_counter()
        self.feed(new[:-1])
        first = self._next_token(mx.array([new[-1:]]))
        mx.eval(first)
        computed_s = time.perf_counter() - began
        mx.async_eval(self._next_token(first))  # type: ignore[no-untyped-call]
        return computed_s, time.perf_counter() - began

    def feed(self, tokens: tuple[int, ...]) -> None:
        """Append tokens to the cache."""
        self._next_token(mx.array([tokens]))
        slots.materialize(self._cache)

    def _next_token(self, tokens: mx.array) -> mx.array:
        """Return the next token, lazily."""
        return mx.argmax(self._network(tokens, cache=self._cache)[:, -1:], axis=-1)


def _extended(buffer: mx.array, tokens: int) -> mx.array:
    return mx.concatenate([buffer, mx.zeros((*buffer.shape[:2], tokens, buffer.shape[3]), buffer.dtype)], axis=2)


def first_tokens(model: Model, kinds: dict[str, int]) -> Iterator[Line]:
    """Measure the time to first token of hits. `kinds`: number of opening tokens by the name of the conversation. A hit
    and its reference are timed one after the other."""
    system_cache = make_prompt_cache(model.network)
    model.network(mx.array([prompt(SYSTEM, seed=0)]), cache=system_cache)
    slots.materialize(system_cache)
    engine, cold = Engine(model, step_s=10.0, prefix_bytes=CACHE_BYTES), Engine(model, step_s=10.0, prefix_bytes=0)
    chats = [Chat(i, SYSTEM, opening=[*kinds.values()][i % len(kinds)]) for i in range(CONVERSATIONS)]
    bare_models = [BareModel(model.network, system_cache) for _ in chats]
    took = {opening: list[tuple[float, float, float]]() for opening in kinds.values()}
    against_cold = list[float]()
    cached = total = 0
    for turn in range(TURNS):
        for chat, bare in zip(chats, bare_models, strict=True):
            new = chat.next_turn()
            measured = run_request(engine, chat.sequence())
            bare_s = bare.first_token_s(new)
            if measured.cached:
                took[chat.opening].append((measured.first_token_s, *bare_s))
            if turn == TURNS - 1 and chat.number % 5 == 0:
                against_cold.append(run_request(cold, chat.sequence()).first_token_s / measured.first_token_s)
            cached, total = cached + measured.cached, total + len(chat.history)
            chat.history += measured.answer
            bare.feed(measured.answer[1:])  # the first is in its cache already
    for kind, opening in kinds.items():
        ours, computed, launched = ([*column] for column in zip(*took[opening], strict=True))
        for label, theirs, limit in (
            (f"first token of a hit, against new tokens and a step: {kind}", launched, 1.15),
            ("  against new tokens alone, the engine's step ahead counted as cost", computed, None),
        ):
            cost = ratio(ours, theirs)
            value = f"{cost:.2f} ({1000 * statistics.median(ours):.0f} ms, {1000 * statistics.median(theirs):.0f} ms)"
            yield label, f"≤ {limit}" if limit else "", value, cost <= limit if limit else None
    yield "  prompt tokens that were cached", "", f"{cached / total:.1%}", None
    yield "  first token without a cache, against that of a hit", "", f"{statistics.median(against_cold):.1f}×", None


# Memory


def memory(kind: str, model: Model) -> Iterator[Line]:
    """Compare the cache's size with the size of the prefixes, and with MLX's count."""
    shared, tails = 2000, CONVERSATIONS * TURNS * (USER + ANSWER)
    system_cache = make_prompt_cache(model.network)
    model.network(mx.array([[5]]), cache=system_cache)
    slots.materialize(system_cache)
    before = in_use()
    engine = Engine(model, step_s=10.0, prefix_bytes=CACHE_BYTES)
    chats, nbytes = [Chat(i, shared) for i in range(CONVERSATIONS)], 0
    for _ in range(TURNS):
        for chat in chats:
            chat.next_turn()
            measured = run_request(engine, chat.sequence())
            chat.history, nbytes = chat.history + measured.answer, measured.nbytes
    measured_bytes = in_use() - before
    del engine
    tokens_bytes = token_bytes(system_cache) * (shared + tails)
    state_bytes = sum(layer.nbytes for layer in layers(system_cache) if not isinstance(layer, KVCache))
    states = f", {(nbytes - tokens_bytes) / state_bytes:.0f} states of {state_bytes / MIB:.2f}" if state_bytes else ""
    value = f"{nbytes / tokens_bytes:.2f} ({nbytes / MIB:.0f} MiB of {tokens_bytes / MIB:.0f}{states})"
    label = f"memory of {CONVERSATIONS} conversations on {shared:,} tokens, against prefix and tails: {kind}"
    # State snapshots are not counted as tokens: their number depends on the budget and the checkpoint positions.
    yield label, *(("", value, None) if state_bytes else ("≤ 1.5", value, nbytes <= 1.5 * tokens_bytes))
    count = measured_bytes / nbytes
    yield "  MLX's own count, against ours", "0.95 to 1.05", f"{count:.3f}", 0.95 <= count <= 1.05


def in_use() -> int:
    """Return the bytes of all MLX arrays, after garbage collection."""
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


# Look-up and insertion: a tree with empty segments, against mlx-lm's

DOCUMENTS, LONG = 20, 32 * 1024
SHARED = (1, 1000, LONG // 2, LONG // 2 + 1000, LONG - 1)  # tokens that the new prompt shares with the first document
Call = Callable[[tuple[int, ...]], object]


@dataclass(frozen=True, slots=True)
class EmptySegment:
    """A segment without contents, to measure the tree alone."""

    nbytes: int = 0
    trimmable: bool = False

    def split(self, at: int) -> "tuple[EmptySegment, EmptySegment]":
        """Return the segment twice, since it has no contents to divide."""
        return self, self


def lookups() -> Iterator[Line]:
    """Measure look-ups and insertions of long prompts."""
    for name, state in ("a tree", None), ("a tree with states", EmptySegment()):
        tree = PrefixTree[EmptySegment, EmptySegment](stateful=state is not None)
        for number in range(DOCUMENTS):
            for cut in checkpoint_positions((), LONG, GRID):
                tree.insert("", document(number)[:cut], _take, state)
        look_up, insert = partial(tree.find, ""), partial(tree.insert, "", copy=_take, snapshot=state)
        for label, call in ("look-up", look_up), ("insert", insert):
            worst = max(statistics.median(_ms(call, shared, seed) for seed in range(5)) for shared in SHARED)
            label = f"{label} at {LONG // 1024}k tokens, {name} of {DOCUMENTS} documents"
            yield label, "≤ 2 ms", f"{worst:.2f} ms", worst <= 2
    theirs = LRUPromptCache(max_size=1000)
    theirs.insert_cache("", list(document(0)), [])
    # One document only: its look-up visits all entries with the same prefix, so 20 documents take 20 times as long.
    look_up_ms = _ms(lambda tokens: theirs.fetch_nearest_cache("", list(tokens)), 1, 0)
    insert_ms = _ms(lambda tokens: theirs.insert_cache("", list(tokens), []), 1, 0)
    yield "  mlx-lm's trie of one document", "", f"{look_up_ms:.0f} ms, insert {insert_ms:.0f} ms", None


def document(number: int) -> tuple[int, ...]:
    """Return a document of which the first half is the same for all numbers."""
    return prompt(LONG // 2, seed=0) + prompt(LONG // 2, seed=1 + number)


def _take(start: int, end: int) -> EmptySegment:
    return EmptySegment()


def _ms(call: Call, shared: int, seed: int) -> float:
    """Return the CPU milliseconds of a call with a prompt that shares `shared` tokens with the first document."""
    # New integers, as from a tokenizer: comparing identical objects is faster.
    tokens = document(0)[:shared] + prompt(LONG - shared, seed=10_000 + 10 * shared + seed)
    began = time.thread_time()  # CPU time: nothing here waits, and other processes do not count
    call(tokens)
    return 1000 * (time.thread_time() - began)


# Cost of copying the arrays


def copies_of_arrays(model: Model) -> Iterator[Line]:
    """Compare storing and restoring a long prefix with one copy of its arrays."""
    tokens = prompt(LONG, seed=0)
    cache = fill_cache(make_prompt_cache(model.network), model.network, LONG)
    buffers = [buffer for layer in cache for buffer in (layer.keys, layer.values)]
    size = sum(buffer.nbytes for buffer in buffers)
    rounds = list[tuple[float, float, float]]()
    for _ in range(3):
        cache_under_test = PrefixCache(model.network, 2 * size)
        copy_s = _took_s(lambda: mx.eval([buffer + 0 for buffer in buffers]))
        keep_s = _took_s(partial(cache_under_test.insert, "", tokens, cache))
        rounds.append((copy_s, keep_s, _took_s(partial(cache_under_test.load, "", tokens))))
    copies, keeps, fetches = ([*column] for column in zip(*rounds, strict=True))
    for label, took in ("storing", keeps), ("restoring", fetches):
        value = f"{ratio(took, copies):.1f} ({statistics.median(took) * 1000:.0f} ms for {size / MIB:.0f} MiB)"
        yield f"{label} {LONG // 1024}k tokens, against one copy of them", "", value, None


def _took_s(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
