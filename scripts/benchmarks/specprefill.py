"""SpecPrefill: what thinning saves of the time to first token, and what scoring costs those who decode meanwhile."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from rich.console import Console
from rich.table import Table

from scripts.benchmarks.engine import Line, prompt, ratio
from scripts.benchmarks.models import random_checkpoint
from worker.engine.cache import slots
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.prefill.draft import with_draft
from worker.engine.prefill.scoring import LOOKAHEAD
from worker.engine.upstream.mlx_lm import make_prompt_cache
from worker.schedule.budget import MAX_CHUNK
from worker.schedule.outcomes import SpecPrefillApplied
from worker.schedule.request import GenerationRequest, SpecPrefillParams

RUNS = 3
KEEP = 0.3
STEP_S = 0.1
LONG = 4096
_fresh = count()  # seeds: scores are remembered, so every prompt is a new one


def main(console: Console) -> bool:
    model, counted = models()
    table = Table("measured", "bar", "came to", "holds", title="SpecPrefill", title_justify="left")
    holds = True
    for part in (first_tokens(model, counted), gaps(model), again(model, counted), conversation(model, counted)):
        for what, bar, came_to, held in part:
            table.add_row(what, bar, came_to, {True: "[green]yes", False: "[red]no", None: ""}[held])
            holds = holds and held is not False
    console.print(table)
    return holds


def models() -> tuple[Model, "Counted"]:
    """A target with its draft, and that draft."""
    with tempfile.TemporaryDirectory() as folder:
        target = random_checkpoint(Path(folder) / "target", hidden=512, layers=8)
        draft = random_checkpoint(Path(folder) / "draft", hidden=256, layers=2)
        model = with_draft(open_model(str(target)), str(draft))
    model.tokenizer.eos_token_ids = []  # a random model may end anywhere
    assert model.draft is not None, "it was just loaded"
    counted = Counted(model.draft.network)
    return replace(model, draft=replace(model.draft, network=counted)), counted


class Counted:
    """A network, and how many tokens it was given."""

    def __init__(self, network: nn.Module) -> None:
        self._network, self.layers, self.parameters, self.tokens = network, network.layers, network.parameters, 0

    def __call__(self, tokens: mx.array, cache: list[Any]) -> Any:
        self.tokens += tokens.size
        return self._network(tokens, cache=cache)


def thinned(tokens: tuple[int, ...], id: str = "thinned") -> GenerationRequest:
    """Both ends of a prompt stay, as the template's do."""
    return GenerationRequest(
        id, tokens, 1, specprefill=SpecPrefillParams(KEEP, ((32, len(tokens) - 32),), min_tokens=1, requested=True)
    )


@dataclass(frozen=True, slots=True)
class Heard:
    first_token_s: float
    scoring_s: float


def hear(engine: Engine, sequence: GenerationRequest) -> Heard:
    engine.add(sequence)
    began, scoring_s = time.perf_counter(), 0.0
    while len(engine):
        for outcome in engine.step().outcomes:
            if isinstance(outcome, SpecPrefillApplied):
                scoring_s = outcome.seconds
    return Heard(time.perf_counter() - began, scoring_s)


# The time to first token, against dense, and against what nobody can save


def first_tokens(model: Model, counted: Counted) -> Iterator[Line]:
    engine = Engine(model, step_s=STEP_S, prefix_bytes=0)
    first_token_s(engine, counted, prompt(1024, next(_fresh)))  # it learns how fast it is
    for tokens in (1024, 2048, LONG):
        rounds = [first_token_s(engine, counted, prompt(tokens, next(_fresh))) for _ in range(RUNS)]
        dense, thin, few, draft = ([*column] for column in zip(*rounds, strict=True))
        ideal = [scoring_s + KEEP * whole_s for scoring_s, whole_s in zip(draft, dense, strict=True)]
        share = ratio(ideal, thin)
        yield (
            f"speed-up to the first token of {tokens:,}, {KEEP:.0%} kept, of the ideal",
            "≥ 0.85",
            f"{share:.2f} ({ratio(dense, thin):.2f} of {ratio(dense, ideal):.2f}; {statistics.median(dense):.1f} s)",
            share >= 0.85,
        )
        # A short prompt attends to less than its share, so that ideal can be outdone. This one cannot.
        least = [scoring_s + few_s for scoring_s, few_s in zip(draft, few, strict=True)]
        yield "  of the draft's forwards and a prompt as short as what is kept", "", f"{ratio(least, thin):.2f}", None
        yield "  the target's time, in the draft's", "", f"{ratio(dense, draft):.1f}", None


def first_token_s(engine: Engine, counted: Counted, tokens: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Dense, thinned, of a short prompt, and for the draft's bare forwards."""
    dense = hear(engine, GenerationRequest("dense", tokens, 1))
    thin = hear(engine, thinned(tokens))
    few = hear(engine, GenerationRequest("few", tokens[: round(KEEP * len(tokens))], 1))
    return dense.first_token_s, thin.first_token_s, few.first_token_s, bare_s(counted, tokens)


def bare_s(network: Counted, tokens: tuple[int, ...]) -> float:
    cache, began = make_prompt_cache(network), time.perf_counter()
    for start in range(0, len(tokens), MAX_CHUNK):
        network(mx.array([tokens[start : start + MAX_CHUNK]]), cache=cache)
        slots.materialize(cache)
    return time.perf_counter() - began


# Those who decode meanwhile

ROWS = 4


def gaps(model: Model) -> Iterator[Line]:
    engine = Engine(model, step_s=STEP_S, prefix_bytes=0)
    for i in range(ROWS):
        engine.add(GenerationRequest(f"running {i}", prompt(32, i), 30_000))
    for _ in range(8):
        engine.step()
    rounds = [longest_gaps(engine) for _ in range(RUNS + 1)][1:]  # it learns how fast it is in the first one
    for phase, longest in zip(("scored", "prefilled"), zip(*rounds, strict=True), strict=True):
        came_to = statistics.median(longest)
        yield (
            f"longest gap of {ROWS} rows while {LONG:,} tokens are {phase}, for a step of {STEP_S:.1f} s",
            f"≤ {1.25 * STEP_S * 1000:.0f} ms",
            f"{came_to * 1000:.0f} ms",
            came_to <= 1.25 * STEP_S,
        )


def longest_gaps(engine: Engine) -> tuple[float, float]:
    """While it is scored, and from then on to its first token."""
    engine.add(thinned(prompt(LONG, next(_fresh))))
    longest, phase, last = [0.0, 0.0], 0, time.perf_counter()
    while len(engine) > ROWS:
        outcomes, now = engine.step().outcomes, time.perf_counter()
        longest[phase], last = max(longest[phase], now - last), now
        if any(isinstance(each, SpecPrefillApplied) for each in outcomes):
            phase = 1
    return longest[0], longest[1]


# What is known is not scored again


def again(model: Model, counted: Counted) -> Iterator[Line]:
    engine, rounds = Engine(model, step_s=STEP_S, prefix_bytes=0), list[tuple[float, float]]()
    for _ in range(RUNS + 1):
        tokens = prompt(LONG // 2, next(_fresh))
        first, before = hear(engine, thinned(tokens)), counted.tokens
        second, scored = hear(engine, thinned(tokens)), counted.tokens - before
        rounds.append((second.first_token_s, first.first_token_s - first.scoring_s))
    came_to = ratio(*([*column] for column in zip(*rounds[1:], strict=True)))
    yield f"a second prompt of the same {LONG // 2:,} tokens: tokens scored", "0", f"{scored}", scored == 0
    yield "  its first token, against the first one's without the scoring", "≤ 1.05", f"{came_to:.2f}", came_to <= 1.05


TURN = 200


def conversation(model: Model, counted: Counted) -> Iterator[Line]:
    engine, said = Engine(model, step_s=STEP_S, prefix_bytes=1 << 30), prompt(LONG // 2, next(_fresh))
    hear(engine, thinned(said))
    before = counted.tokens
    hear(engine, thinned(said + prompt(TURN, next(_fresh))))
    scored = counted.tokens - before
    yield (
        f"{TURN} tokens more in a conversation of {LONG // 2:,}: tokens scored",
        f"≤ {TURN + LOOKAHEAD}",
        f"{scored}",
        scored <= TURN + LOOKAHEAD,
    )
