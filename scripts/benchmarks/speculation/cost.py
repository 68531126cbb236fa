"""The cost of a forward that verifies drafts, by rows and width, relative to a plain step of as many rows."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from scripts.benchmarks.engine import prompt
from worker.engine.cache import slots
from worker.engine.cache.slots import verification
from worker.engine.model.load import Model
from worker.engine.upstream.mlx_lm import generation_stream, make_prompt_cache

WIDTHS = (1, 2, 4, 8, 16)  # tokens per row: the next one and a draft; a worker's drafts have at most 7
ROUNDS = 5
_CONTEXT, _LONGER = 128, 3  # tokens of the first row's prompt, and of each further one beyond that
_FORWARDS = 4  # timed together


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of forwards of as many rows."""

    rows: int
    plain_s: float  # a plain step
    relative: Mapping[int, float]  # by width, in plain steps

    @classmethod
    def of(cls, rows: int, rounds: Sequence[Mapping[int, float]]) -> "Cost":
        """Return the medians of rounds, each of which has the seconds of a forward by width."""
        relative = {width: statistics.median(each[width] / each[1] for each in rounds) for width in WIDTHS}
        return cls(rows, statistics.median(each[1] for each in rounds), relative)

    def as_json(self) -> dict[str, Any]:
        """Return the cost as JSON values."""
        return {"rows": self.rows, "plain_ms": 1000 * self.plain_s, "relative": dict(self.relative)}


def measure(model: Model, rows: int, advance: Callable[[], None]) -> Cost:
    """Measure forwards of all widths in turn, after a round that warms up; call `advance` after each round."""
    rounds = list[dict[int, float]]()
    with mx.stream(generation_stream):
        batch = _Batch(model, rows)
        for number in range(ROUNDS + 1):
            order = WIDTHS if number % 2 else WIDTHS[::-1]
            rounds.append({width: batch.forward_s(width) for width in order})
            advance()
    return Cost.of(rows, rounds[1:])


class _Batch:
    """Rows of uneven length, in a cache as that of a decode batch."""

    def __init__(self, model: Model, rows: int) -> None:
        self._network = model.network
        self._recurrence = model.drafting.recurrence(model.network)
        computed = [_computed(model.network, number) for number in range(rows)]
        self._cache = slots.empty_batch_of(computed[0], max(WIDTHS) - 1)
        slots.join_all(self._cache, [slots.RowCache(cache) for cache in computed])
        self._rows = rows

    def forward_s(self, width: int) -> float:
        """Return the seconds of a forward of this width, with the choice of the tokens and, if it is no plain step, the
        commit of one or two tokens of each row."""
        tokens = mx.array([prompt(width, row) for row in range(self._rows)])
        mx.eval(tokens)
        began = time.perf_counter()
        for _ in range(_FORWARDS):
            if width == 1:
                self._plain(tokens)
            else:
                self._verify(tokens, width)
            slots.materialize(self._cache)
        return (time.perf_counter() - began) / _FORWARDS

    def _plain(self, tokens: mx.array) -> None:
        mx.eval(mx.argmax(self._network(tokens, cache=self._cache), axis=-1))

    def _verify(self, tokens: mx.array, width: int) -> None:
        with verification(self._cache, width) as verifying:
            with self._recurrence.recording(self._cache):
                logits = self._network(tokens, cache=self._cache)
            mx.eval(mx.argmax(logits, axis=-1))
            verifying.commit([1 + row % 2 for row in range(self._rows)])


def _computed(network: nn.Module, number: int) -> list[Any]:
    """Return the cache of a prompt."""
    cache: list[Any] = make_prompt_cache(network)
    network(mx.array([prompt(_CONTEXT + _LONGER * number, number)]), cache=cache)
    slots.materialize(cache)
    return cache
