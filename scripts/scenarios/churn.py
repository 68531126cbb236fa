"""The engine by itself, for a long time or with too much to do."""

import gc
import itertools
import random
import statistics
import subprocess
from dataclasses import dataclass, replace
from os import getpid

import mlx.core as mx

from scripts.scenarios.harness import Figure
from scripts.stack import TINY_CHAT
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.schedule.outcomes import Refused, RowFailed, Sampled
from worker.schedule.request import GenerationRequest, Sampling

_ROWS = 8
_PREFIX_BYTES = 2_000_000  # full before the first look that counts: by default prefixes may take a quarter of it all
_NO_END = ((2, -100.0),)  # the tiny model's end of sequence


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes, with the engine's rows still in it and the allocator's own store emptied."""

    resident: int
    arrays: int


def held() -> Held:
    gc.collect()
    mx.clear_cache()
    said = subprocess.run(["ps", "-o", "rss=", "-p", str(getpid())], capture_output=True, check=True, text=True)
    return Held(1024 * int(said.stdout), mx.get_active_memory())


def churn(model: Model, steps: int, looks: int) -> list[Held]:
    """Rows of all lengths that come, end and are cancelled, never all at once; a look now and then."""
    engine, dice = Engine(model, step_s=0.02, prefix_bytes=_PREFIX_BYTES), random.Random(1)
    ids, inside, seen = itertools.count(), list[str](), list[Held]()
    for step in range(1, steps + 1):
        while len(engine) < _ROWS:
            inside.append(str(next(ids)))
            engine.add(_sequence(inside[-1], dice))
        if dice.random() < 0.02:
            engine.remove(dice.choice(inside))
        ended = {o.id for o in engine.step().outcomes if isinstance(o, Sampled) and o.finish_reason}
        inside = [id for id in inside if id not in ended][-_ROWS * 4 :]
        if step % (steps // looks) == 0:
            seen.append(held())
    for id in inside:
        engine.remove(id)
    return seen


def _sequence(id: str, dice: random.Random) -> GenerationRequest:
    tokens = tuple(dice.randrange(10, 1000) for _ in range(dice.choice((1, 20, 100, 300))))
    sampling = Sampling(temperature=dice.choice((0.0, 1.0)), seed=dice.randrange(1000), logit_bias=_NO_END)
    return GenerationRequest(id, tokens, dice.randrange(5, 200), sampling)


async def long_life(steps: int) -> list[Figure]:
    grown = growth([each.resident for each in churn(open_model(str(TINY_CHAT)), steps, looks=20)])
    return [Figure(f"{steps:,} steps with churn: resident memory", "flat within 5 %", f"{grown:+.1%}", grown < 0.05)]


def growth(bytes_held: list[int]) -> float:
    """From the second quarter to the last: before it things warm up, and rows in it come and go."""
    quarter = len(bytes_held) // 4
    return statistics.median(bytes_held[-quarter:]) / statistics.median(bytes_held[quarter : 2 * quarter]) - 1


async def overload(jobs: int) -> list[Figure]:
    """Rows that would need, all together, ten times the memory that there is."""
    model, prompt, answer = open_model(str(TINY_CHAT)), 100, 150
    costs = replace(model.costs, weights_bytes=mx.get_active_memory())
    alone = costs.peak_bytes([[prompt + answer]]) - costs.resident_bytes
    spare = max(alone, costs.rectangle_bytes([prompt + answer] * jobs) // 10)
    limit = costs.resident_bytes + spare
    engine, ended, highest = Engine(replace(model, costs=costs), step_s=0.1, memory=limit), dict[str, str](), 0
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
    used = (highest - costs.resident_bytes) / spare
    return [
        Figure(f"{jobs} jobs for ten times the memory: answered", f"{jobs}", f"{answered}", answered == jobs),
        Figure("their highest use of it", "≤ 100 %", f"{used:.0%}", used <= 1),
    ]
