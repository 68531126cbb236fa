"""KV that is stored with 8 bits: its bytes, its restart, and how much it changes what follows."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import mlx.core as mx

from scripts.benchmarks.disk.figures import Figure
from scripts.benchmarks.disk.restart import drop_pages
from scripts.benchmarks.disk.worker import CACHE_BYTES, Worker, tier_of
from worker.engine.model.load import Model
from worker.engine.prefix.cache import PrefixCache

ANSWER = 32  # tokens
_LOAD_S = 60.0  # longest load

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation that is stored, and what is asked next."""

    history: Tokens
    question: Tokens


@dataclass(frozen=True, slots=True)
class _Continued:
    """What follows a loaded prefix."""

    load_s: float
    logits: mx.array  # (tokens of the question, vocabulary), fp32
    answer: Tokens


@dataclass(frozen=True, slots=True)
class _Stored:
    """Turns after a restart, by how their histories are stored."""

    nbytes: int  # of all files
    turns: tuple[_Continued, ...]

    @property
    def load_s(self) -> float:
        """Median seconds to the logits of a question."""
        return statistics.median(turn.load_s for turn in self.turns)


def figures(kind: str, model: Model, folder: Path, turns: Sequence[Turn]) -> Iterator[Figure]:
    """Compare turns whose histories are loaded from 8 bits with those that are loaded exactly."""
    exact, small = (_stored(model, folder / str(bits), turns, bits) for bits in (None, 8))
    yield Figure(
        f"bytes with KV of 8 bits, against exact: {kind}",
        small.nbytes / exact.nbytes,
        f"{small.nbytes / exact.nbytes:.2f} ({small.nbytes / 1e6:,.1f} and {exact.nbytes / 1e6:,.1f} MB)",
    )
    yield Figure(
        "  seconds to the logits of a question after a restart, against exact",
        small.load_s / exact.load_s,
        f"{small.load_s / exact.load_s:.2f} ({1000 * small.load_s:,.0f} and {1000 * exact.load_s:,.0f} ms)",
    )
    yield from _differences([*zip(small.turns, exact.turns, strict=True)])


def _differences(pairs: Sequence[tuple[_Continued, _Continued]]) -> Iterator[Figure]:
    """Compare what follows 8 bits with what follows exact KV: all logits of the questions, and the greedy answers."""
    small, exact = (mx.concatenate([turn.logits for turn in turns]) for turns in zip(*pairs, strict=True))
    largest = _number(mx.abs(small - exact).max())
    spread = _number(mx.std(exact))
    yield Figure(
        "  largest difference of a logit", largest, f"{largest:.4f} (their standard deviation is {spread:.2f})"
    )
    logs = [logits - mx.logsumexp(logits, -1, keepdims=True) for logits in (small, exact)]
    divergence = _number((mx.exp(logs[1]) * (logs[1] - logs[0])).sum(-1).mean())
    yield Figure("  mean KL divergence of the next token, in nats", divergence, f"{divergence:.1e}")
    agreed = _number((mx.argmax(small, -1) == mx.argmax(exact, -1)).sum())
    yield Figure(
        "  tokens whose likeliest successor is the same", agreed / len(exact), f"{agreed:,.0f} of {len(exact):,}"
    )
    answers = [(token, right) for one, other in pairs for token, right in zip(one.answer, other.answer, strict=True)]
    differ = sum(token != right for token, right in answers)
    yield Figure(f"  tokens that differ in greedy answers of {ANSWER}", differ, f"{differ:,} of {len(answers):,}")


def _stored(model: Model, folder: Path, turns: Sequence[Turn], bits: int | None) -> _Stored:
    """Store the histories, and continue each one after a restart whose files' pages were dropped."""
    worker = Worker(model, folder, bits=bits)
    for turn in turns:
        worker.answer(turn.history, (len(turn.history) - 1,))
    worker.close()
    files = sorted(folder.glob("*.safetensors"))
    continued = list[_Continued]()
    for turn in turns:
        drop_pages(files)
        tier = tier_of(model, folder, lambda: None, bits=bits)
        continued.append(_continued(model, PrefixCache(model.network, CACHE_BYTES, tier), turn))
        tier.close(time.monotonic())
    return _Stored(sum(file.stat().st_size for file in files), tuple(continued))


def _continued(model: Model, prefix: PrefixCache, turn: Turn) -> _Continued:
    """Load a history from disk, compute the question, and the greedy answer, all apart from the engine."""
    tokens = turn.history + turn.question
    began = time.perf_counter()
    load = prefix.read_from_disk("", tokens, lambda size: _LOAD_S)
    if load is None:
        raise RuntimeError("the prefix was not found on disk; the measurement is void")
    while not load.reading.done:
        time.sleep(0.0005)
    prefix.insert_from_disk(load.reading)
    cache, length = prefix.load("", tokens)
    if length < len(turn.history) - 1:
        raise RuntimeError(f"{length:,} of {len(turn.history):,} tokens were loaded; the measurement is void")
    logits = model.network(mx.array([tokens[length:]]), cache=cache)[0].astype(mx.float32)
    mx.eval(logits)
    load_s = time.perf_counter() - began
    answer = [_best(logits[-1])]
    while len(answer) < ANSWER:
        following = model.network(mx.array([answer[-1:]]), cache=cache)[0, -1]
        answer.append(_best(following))
    return _Continued(load_s, logits, tuple(answer))


def _best(logits: mx.array) -> int:
    return int(_number(mx.argmax(logits)))


def _number(array: mx.array) -> float:
    return cast("float", array.item())
