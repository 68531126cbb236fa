"""How far the prefix cache reaches in each family, and whether a hit says what was said without it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.engine import prompt
from tests.engine import tiny
from worker.engine.cache.prefix import PrefixCache
from worker.engine.engine import Engine
from worker.engine.model.load import Model
from worker.schedule.outcomes import Prefilled, Sampled
from worker.schedule.request import GenerationRequest

KINDS = {
    "llama": "keys and values", "deepseek_v3": "latents", "deepseek_v32": "nested lists",
    "gemma3": "a rotating window", "gpt_oss": "a rotating window", "qwen3_5": "hybrid", "falcon_h1": "hybrid",
    "jamba": "hybrid", "mamba2": "recurrent", "rwkv7": "recurrent",
}  # fmt: skip
SYSTEM, USER, OPENING, ANSWER = 40, 24, 4, 12  # tokens; the tiny windows are of 16


@dataclass(frozen=True, slots=True)
class Asked:
    prompt: tuple[int, ...]
    boundaries: tuple[int, ...]  # as a template's text tells: the end of the last turn, of the system prompt, of others


@dataclass(frozen=True, slots=True)
class Situation:
    before: Asked
    now: Asked
    shared: int  # tokens that both begin with, the last one of the prompt not counted
    planned: int  # of those, how far a place reaches that was planned; what cannot be cut is found up to there


Say = Callable[[Asked], tuple[int, ...]]
SYSTEM_PROMPT, OPENS = prompt(SYSTEM, seed=1), prompt(OPENING, seed=2)


def user(seed: int) -> tuple[int, ...]:
    return prompt(USER, seed)


def chat(*turns: tuple[int, ...]) -> Asked:
    """Turns by turn, what opens the answer at the end."""
    ends = [SYSTEM + sum(map(len, turns[: i + 1])) for i in range(len(turns))]
    tokens = sum((SYSTEM_PROMPT, *turns), ()) + OPENS
    return Asked(tokens, (ends[-1], SYSTEM, *reversed(ends[:-1])))


def shared_system(say: Say) -> Situation:
    return Situation(chat(user(3)), chat(user(4)), SYSTEM, SYSTEM)


def growing(say: Say) -> Situation:
    first = chat(user(3))
    answered = OPENS + say(first)
    return Situation(first, chat(user(3), answered, user(4)), (both := SYSTEM + USER + len(answered)), both)


def edited(say: Say) -> Situation:
    half = USER // 2
    return Situation(chat(user(3)), chat(user(3)[:half] + user(4)[half:]), SYSTEM + half, SYSTEM)


def twice(say: Say) -> Situation:
    return Situation(chat(user(3)), chat(user(3)), SYSTEM + USER + OPENING - 1, SYSTEM + USER)


def shorter(say: Say) -> Situation:
    """What was asked before goes on from here."""
    long = chat(user(3), OPENS + user(4), user(5))
    return Situation(long, chat(user(3)), SYSTEM + USER + OPENING - 1, SYSTEM + USER)


def tool(say: Say) -> Situation:
    """The template writes the call in other tokens than the model did."""
    first = chat(user(3))
    call = OPENS + say(first)[:3] + user(6)
    return Situation(first, chat(user(3), call, user(4)), SYSTEM + USER + OPENING + 3, SYSTEM + USER)


SITUATIONS: dict[str, Callable[[Say], Situation]] = {
    "system prompt": shared_system, "next turn": growing, "edited in the middle": edited, "the same again": twice,
    "a part of it": shorter, "after a tool": tool,
}  # fmt: skip


def reach(console: Console) -> bool:
    """Whether each hit is as long as it can be, and says the same."""
    title = "Tokens found, of those shared; what cannot be cut is found up to a planned place"
    table = Table("family", "kept", *SITUATIONS, title=title, title_justify="left")
    holds = True
    for family, kind in KINDS.items():
        cells = list(_cells(tiny.model(family)))
        table.add_row(family, kind, *(text for text, _ in cells))
        holds = holds and all(held for _, held in cells)
    console.print(table)
    return holds


def _cells(model: Model) -> Iterator[tuple[str, bool]]:
    stateful = PrefixCache(model.network, 0).stateful

    def say(asked: Asked) -> tuple[int, ...]:
        said = tuple(tiny.alone(model.network, asked.prompt, ANSWER))
        return said if len(said) == ANSWER else (*said, tiny.EOS)

    for build in SITUATIONS.values():
        situation = build(say)
        engine = Engine(model, step_s=10.0, prefix_bytes=1 << 26)
        _hear(engine, situation.before)
        found, said = _hear(engine, situation.now)
        equal = said == tiny.alone(model.network, situation.now.prompt, ANSWER)
        far = found == (situation.planned if stateful else situation.shared)
        text = f"{found} of {situation.shared}" + ("" if equal else ", says other tokens")
        yield text if equal and far else f"[red]{text}", equal and far


def _hear(engine: Engine, asked: Asked) -> tuple[int, list[int]]:
    """The tokens that were found, and those that it said."""
    engine.add(GenerationRequest("", asked.prompt, ANSWER, boundaries=asked.boundaries))
    found, said = 0, list[int]()
    while len(engine):
        for outcome in engine.step().outcomes:
            if isinstance(outcome, Prefilled):
                found = outcome.cached
            elif isinstance(outcome, Sampled) and outcome.token is not None:
                said.append(outcome.token)
    return found, said
