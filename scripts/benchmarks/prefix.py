"""The prefix cache: what a hit costs, what looking costs, what memory it takes, and how far it reaches by family."""

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

from scripts.benchmarks.engine import Line, filled, prompt, ratio
from scripts.benchmarks.models import hybrid_checkpoint, random_checkpoint
from scripts.benchmarks.reach import reach
from worker.engine.cache import slots
from worker.engine.cache.layers import layers
from worker.engine.cache.prefix import GRID, PrefixCache
from worker.engine.cache.segments import token_bytes
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.upstream.mlx_lm import KVCache, make_prompt_cache
from worker.schedule.outcomes import Prefilled, Sampled
from worker.schedule.prefix import PrefixTree, checkpoint_positions
from worker.schedule.request import GenerationRequest

MIB = 1 << 20
ROOM = 1 << 30  # bytes; more than any of these measurements keeps


def main(console: Console) -> bool:
    table = Table("measured", "bar", "came to", "holds", title="The prefix cache", title_justify="left")
    holds = True
    with tempfile.TemporaryDirectory() as folder:
        plain = opened(random_checkpoint(Path(folder) / "plain", hidden=512, layers=8))
        hybrid = opened(hybrid_checkpoint(Path(folder) / "hybrid", hidden=512, layers=8))
        small = opened(random_checkpoint(Path(folder) / "small", hidden=256, layers=4))
        small_hybrid = opened(hybrid_checkpoint(Path(folder) / "small hybrid", hidden=256, layers=4))
    parts: list[Callable[[], Iterator[Line]]] = [
        partial(first_tokens, plain, {"KV": 1}),
        partial(first_tokens, hybrid, {"hybrid": 1, "hybrid, the opening taken back": OPENING}),
        looking,
        partial(memory, "KV", small),
        partial(memory, "hybrid", small_hybrid),
        partial(moving, plain),
    ]
    for part in parts:
        for what, bar, came_to, held in part():
            table.add_row(what, bar, came_to, {True: "[green]yes", False: "[red]no", None: ""}[held])
            holds = holds and held is not False
    console.print(table)
    return reach(console) and holds


def opened(checkpoint: Path) -> Model:
    model = open_model(str(checkpoint))
    model.tokenizer.eos_token_ids = []  # a random model may end anywhere
    return model


# Conversations on one system prompt. What opens the answer stays in the next prompt, or the template takes it back, as
# it does an open think block: the boundary then lies before it

CONVERSATIONS, TURNS, SYSTEM = 20, 5, 1000
USER, OPENING, ANSWER = 40, 4, 16


class Chat:
    """One conversation, as its client sends it: each prompt is all that was said."""

    def __init__(self, number: int, system: int, *, opening: int = 1) -> None:
        """`opening`: tokens behind the boundary of a turn; the prompt's last one always is."""
        self.number, self.turn, self.system, self.opening = number, 0, system, opening
        self.said = prompt(system, seed=0)

    def asks(self) -> tuple[int, ...]:
        """The user's next turn."""
        self.turn += 1
        new = prompt(USER, seed=1000 * self.number + self.turn)
        self.said += new
        return new

    def sequence(self) -> GenerationRequest:
        boundaries = (len(self.said) - self.opening, self.system)
        return GenerationRequest(f"{self.number}.{self.turn}", self.said, ANSWER, boundaries=boundaries)


@dataclass(frozen=True, slots=True)
class Heard:
    first_token_s: float
    cached: int  # tokens
    answer: tuple[int, ...]
    nbytes: int  # of the prefix cache, afterwards


def hear(engine: Engine, sequence: GenerationRequest) -> Heard:
    began, first, cached, answer, nbytes = time.perf_counter(), 0.0, 0, list[int](), 0
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
    return Heard(first, cached, tuple(answer), nbytes)


class Bare:
    """What nobody can save: the model on the new tokens of a conversation whose cache is at hand, with room in it.
    Nothing is looked for, restored or kept, and no batch is joined."""

    def __init__(self, network: nn.Module, begun: list[Any]) -> None:
        """`begun`: the cache of the system prompt. It stays as it is."""
        self._network, self._cache = network, copy.deepcopy(begun)
        for layer in layers(self._cache):
            if isinstance(layer, KVCache):
                layer.keys, layer.values = (_with_room(buffer, 512) for buffer in (layer.keys, layer.values))
        slots.materialize(self._cache)

    def first_token_s(self, new: tuple[int, ...]) -> tuple[float, float]:
        """All but the last token, then that one: until its answer's first token is there, and until the second is under
        way, which is when mlx-lm and the engine tell the first. On a CPU it is computed by then."""
        began = time.perf_counter()
        self.feed(new[:-1])
        first = self._fed(mx.array([new[-1:]]))
        mx.eval(first)
        there_s = time.perf_counter() - began
        mx.async_eval(self._fed(first))  # type: ignore[no-untyped-call]
        return there_s, time.perf_counter() - began

    def feed(self, tokens: tuple[int, ...]) -> None:
        self._fed(mx.array([tokens]))
        slots.materialize(self._cache)

    def _fed(self, tokens: mx.array) -> mx.array:
        """The next token, lazily."""
        return mx.argmax(self._network(tokens, cache=self._cache)[:, -1:], axis=-1)


def _with_room(buffer: mx.array, tokens: int) -> mx.array:
    return mx.concatenate([buffer, mx.zeros((*buffer.shape[:2], tokens, buffer.shape[3]), buffer.dtype)], axis=2)


def first_tokens(model: Model, kinds: dict[str, int]) -> Iterator[Line]:
    """`kinds` of conversations, in turn, and the tokens that open their answers. A hit and its reference are timed one
    right after the other."""
    begun = make_prompt_cache(model.network)
    model.network(mx.array([prompt(SYSTEM, seed=0)]), cache=begun)
    slots.materialize(begun)
    engine, cold = Engine(model, step_s=10.0, prefix_bytes=ROOM), Engine(model, step_s=10.0, prefix_bytes=0)
    chats = [Chat(i, SYSTEM, opening=[*kinds.values()][i % len(kinds)]) for i in range(CONVERSATIONS)]
    bares = [Bare(model.network, begun) for _ in chats]
    took, against_cold = {opening: list[tuple[float, float, float]]() for opening in kinds.values()}, list[float]()
    cached = asked = 0
    for turn in range(TURNS):
        for chat, bare in zip(chats, bares, strict=True):
            new = chat.asks()
            heard, bare_s = hear(engine, chat.sequence()), bare.first_token_s(new)
            if heard.cached:
                took[chat.opening].append((heard.first_token_s, *bare_s))
            if turn == TURNS - 1 and chat.number % 5 == 0:
                against_cold.append(hear(cold, chat.sequence()).first_token_s / heard.first_token_s)
            cached, asked = cached + heard.cached, asked + len(chat.said)
            chat.said += heard.answer
            bare.feed(heard.answer[1:])  # it has fed itself the first
    for kind, opening in kinds.items():
        ours, there, told = ([*column] for column in zip(*took[opening], strict=True))
        for what, theirs, bar in (
            (f"first token of a hit, against new tokens and a step: {kind}", told, 1.15),
            ("  against new tokens alone, the engine's step ahead counted as cost", there, None),
        ):
            cost = ratio(ours, theirs)
            came_to = f"{cost:.2f} ({1000 * statistics.median(ours):.0f} ms, {1000 * statistics.median(theirs):.0f} ms)"
            yield what, f"≤ {bar}" if bar else "", came_to, cost <= bar if bar else None
    yield "  prompt tokens that were cached", "", f"{cached / asked:.1%}", None
    yield "  first token without a cache, against that of a hit", "", f"{statistics.median(against_cold):.1f}×", None


# Memory


def memory(kind: str, model: Model) -> Iterator[Line]:
    shared, tails = 2000, CONVERSATIONS * TURNS * (USER + ANSWER)
    begun = make_prompt_cache(model.network)
    model.network(mx.array([[5]]), cache=begun)
    slots.materialize(begun)
    before, engine = in_use(), Engine(model, step_s=10.0, prefix_bytes=ROOM)
    chats, nbytes = [Chat(i, shared) for i in range(CONVERSATIONS)], 0
    for _ in range(TURNS):
        for chat in chats:
            chat.asks()
            heard = hear(engine, chat.sequence())
            chat.said, nbytes = chat.said + heard.answer, heard.nbytes
    truth = in_use() - before
    del engine
    tokens_bytes = token_bytes(begun) * (shared + tails)
    state_bytes = sum(layer.nbytes for layer in layers(begun) if not isinstance(layer, KVCache))
    states = f", {(nbytes - tokens_bytes) / state_bytes:.0f} states of {state_bytes / MIB:.2f}" if state_bytes else ""
    came_to = f"{nbytes / tokens_bytes:.2f} ({nbytes / MIB:.0f} MiB of {tokens_bytes / MIB:.0f}{states})"
    what = f"memory of {CONVERSATIONS} conversations on {shared:,} tokens, against prefix and tails: {kind}"
    # States are no tokens: how many there are is what the budget and the places decide.
    yield what, *(("", came_to, None) if state_bytes else ("≤ 1.5", came_to, nbytes <= 1.5 * tokens_bytes))
    count = truth / nbytes
    yield "  MLX's own count, against ours", "0.95 to 1.05", f"{count:.3f}", 0.95 <= count <= 1.05


def in_use() -> int:
    gc.collect()
    mx.synchronize()
    mx.clear_cache()
    return mx.get_active_memory()


# Looking and inserting: a tree whose runs cost nothing, against mlx-lm's

DOCUMENTS, LONG = 20, 32 * 1024
PARTING = (1, 1000, LONG // 2, LONG // 2 + 1000, LONG - 1)  # tokens that a newcomer shares with the first document
Call = Callable[[tuple[int, ...]], object]


@dataclass(frozen=True, slots=True)
class Free:
    nbytes: int = 0
    trimmable: bool = False

    def split(self, at: int) -> "tuple[Free, Free]":
        return self, self


def looking() -> Iterator[Line]:
    for name, state in ("a tree", None), ("a tree with states", Free()):
        tree = PrefixTree[Free, Free](stateful=state is not None)
        for number in range(DOCUMENTS):
            for cut in checkpoint_positions((), LONG, GRID):
                tree.insert("", document(number)[:cut], _free, state)
        look_up, insert = partial(tree.find, ""), partial(tree.insert, "", take=_free, state=state)
        for what, call in ("look-up", look_up), ("insert", insert):
            worst = max(statistics.median(_ms(call, shared, seed) for seed in range(5)) for shared in PARTING)
            what = f"{what} at {LONG // 1024}k tokens, {name} of {DOCUMENTS} documents"
            yield what, "≤ 2 ms", f"{worst:.2f} ms", worst <= 2
    theirs = LRUPromptCache(max_size=1000)
    theirs.insert_cache("", list(document(0)), [])
    # Once, and of one document: a look-up goes through all that begin alike, and of 20 it takes 20 times as long.
    look_up_ms = _ms(lambda tokens: theirs.fetch_nearest_cache("", list(tokens)), 1, 0)
    insert_ms = _ms(lambda tokens: theirs.insert_cache("", list(tokens), []), 1, 0)
    yield "  mlx-lm's trie of one document", "", f"{look_up_ms:.0f} ms, insert {insert_ms:.0f} ms", None


def document(number: int) -> tuple[int, ...]:
    """Half of it is that of all."""
    return prompt(LONG // 2, seed=0) + prompt(LONG // 2, seed=1 + number)


def _free(start: int, end: int) -> Free:
    return Free()


def _ms(call: Call, shared: int, seed: int) -> float:
    """For a newcomer that shares so many tokens with the first document."""
    # Made anew, as a tokenizer does: what is equal because it is the same object is equal sooner.
    tokens = document(0)[:shared] + prompt(LONG - shared, seed=10_000 + 10 * shared + seed)
    began = time.thread_time()  # nothing here waits, so what other processes do need not count
    call(tokens)
    return 1000 * (time.thread_time() - began)


# What the arrays themselves cost


def moving(model: Model) -> Iterator[Line]:
    tokens, cache = prompt(LONG, seed=0), filled(make_prompt_cache(model.network), model.network, LONG)
    buffers = [buffer for layer in cache for buffer in (layer.keys, layer.values)]
    size, rounds = sum(buffer.nbytes for buffer in buffers), list[tuple[float, float, float]]()
    for _ in range(3):
        kept = PrefixCache(model.network, 2 * size)
        copy_s = _took_s(lambda: mx.eval([buffer + 0 for buffer in buffers]))
        keep_s = _took_s(partial(kept.insert, "", tokens, cache))
        rounds.append((copy_s, keep_s, _took_s(partial(kept.load, "", tokens))))
    copies, keeps, fetches = ([*column] for column in zip(*rounds, strict=True))
    for what, took in ("keeping", keeps), ("restoring", fetches):
        came_to = f"{ratio(took, copies):.1f} ({statistics.median(took) * 1000:.0f} ms for {size / MIB:.0f} MiB)"
        yield f"{what} {LONG // 1024}k tokens, against one copy of them", "", came_to, None


def _took_s(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
