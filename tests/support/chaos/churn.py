"""Tests the engine alone, for many steps or with far too many jobs."""

import gc
import itertools
import random
import statistics
import subprocess
from dataclasses import dataclass, replace
from os import getpid

import mlx.core as mx

from tests.support.chaos.harness import Figure
from tests.support.stack import TINY_CHAT
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.options import EngineOptions
from worker.outcomes import Refused, RowFailed, Sampled
from worker.request import GenerationRequest, Sampling

_ROWS = 8
_PREFIX_BYTES = 2_000_000  # small enough to be full before the first sample that counts
_NO_END = ((2, -100.0),)  # the tiny model's end of sequence


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes in use, after the allocator's cache was cleared: of the process, and of MLX arrays."""

    resident: int
    arrays: int


def read_memory() -> MemoryUse:
    """Collect garbage, clear the allocator's cache, and return the memory in use."""
    gc.collect()
    mx.clear_cache()
    ps = subprocess.run(["ps", "-o", "rss=", "-p", str(getpid())], capture_output=True, check=True, text=True)
    return MemoryUse(1024 * int(ps.stdout), mx.get_active_memory())


def churn(model: Model, steps: int, num_samples: int) -> list[MemoryUse]:
    """Run rows of many lengths that start, end and are cancelled at different times. Return memory samples."""
    engine = Engine(model, EngineOptions(0.02, prefix_bytes=_PREFIX_BYTES))
    dice = random.Random(1)
    ids = itertools.count()
    active = list[str]()
    samples = list[MemoryUse]()
    for step in range(1, steps + 1):
        while len(engine) < _ROWS:
            active.append(str(next(ids)))
            engine.add(_sequence(active[-1], dice))
        if dice.random() < 0.02:
            engine.remove(dice.choice(active))
        ended = {o.id for o in engine.step().outcomes if isinstance(o, Sampled) and o.finish_reason}
        active = [id for id in active if id not in ended][-_ROWS * 4 :]
        if step % (steps // num_samples) == 0:
            samples.append(read_memory())
    for id in active:
        engine.remove(id)
    return samples


def _sequence(id: str, dice: random.Random) -> GenerationRequest:
    tokens = tuple(dice.randrange(10, 1000) for _ in range(dice.choice((1, 20, 100, 300))))
    sampling = Sampling(temperature=dice.choice((0.0, 1.0)), seed=dice.randrange(1000), logit_bias=_NO_END)
    return GenerationRequest(id, tokens, dice.randrange(5, 200), sampling)


async def long_life(steps: int) -> list[Figure]:
    """Measure the growth of memory over many steps."""
    grown = growth([each.resident for each in churn(open_model(str(TINY_CHAT)), steps, num_samples=20)])
    return [Figure(f"{steps:,} steps with churn: resident memory", "flat within 5 %", f"{grown:+.1%}", grown < 0.05)]


def growth(bytes_held: list[int]) -> float:
    """Return the relative growth of the median from the second quarter of the samples to the last; the first is
    warm-up."""
    quarter = len(bytes_held) // 4
    return statistics.median(bytes_held[-quarter:]) / statistics.median(bytes_held[quarter : 2 * quarter]) - 1


async def overload(jobs: int) -> list[Figure]:
    """Submit rows that would need ten times the available memory if all ran at once."""
    model = open_model(str(TINY_CHAT))
    prompt = 100
    answer = 150
    costs = replace(model.costs, weights_bytes=mx.get_active_memory())
    alone_bytes = costs.peak_bytes([[prompt + answer]]) - costs.resident_bytes
    free_bytes = max(alone_bytes, costs.rectangle_bytes([prompt + answer] * jobs) // 10)
    limit = costs.resident_bytes + free_bytes
    engine = Engine(replace(model, costs=costs), EngineOptions(0.1, memory=limit))
    ended = dict[str, str]()
    highest = 0
    for i in range(jobs):
        tokens = tuple(random.Random(i).randrange(10, 1000) for _ in range(prompt))
        engine.add(GenerationRequest(str(i), tokens, answer, lane="batch" if i % 2 else "interactive"))
    while len(engine):
        report = engine.step()
        for outcome in report.outcomes:
            match outcome:
                case Sampled(id, _, str(reason)):
                    ended[id] = reason
                case RowFailed(id) | Refused(id):
                    ended[id] = "failed"
        highest = max(highest, mx.get_peak_memory())  # of this step
    answered = sum(ending != "failed" for ending in ended.values())
    used = (highest - costs.resident_bytes) / free_bytes
    return [
        Figure(f"{jobs} jobs for ten times the memory: answered", f"{jobs}", f"{answered}", answered == jobs),
        Figure("highest use of that memory", "≤ 100 %", f"{used:.0%}", used <= 1),
    ]
