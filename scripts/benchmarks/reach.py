"""Measures how long prefix cache hits are in each family, and checks that they do not change the answer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.engine import prompt
from tests.engine import tiny
from worker.engine.engine import Engine
from worker.engine.model.load import Model
from worker.engine.prefix.cache import PrefixCache
from worker.schedule.outcomes import Prefilled, Sampled
from worker.schedule.request import GenerationRequest

KINDS = {
    "llama": "keys and values", "deepseek_v3": "latents", "deepseek_v32": "nested lists",
    "gemma3": "a rotating window", "gpt_oss": "a rotating window", "qwen3_5": "hybrid", "falcon_h1": "hybrid",
    "jamba": "hybrid", "mamba2": "recurrent", "rwkv7": "recurrent",
}  # fmt: skip
# Numbers of tokens; the tiny models have windows of 16.
SYSTEM = 40
USER = 24
OPENING = 4
ANSWER = 12


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt and its boundaries."""

    prompt: tuple[int, ...]
    boundaries: tuple[int, ...]  # ends of the last turn, of the system prompt, of the other turns


@dataclass(frozen=True, slots=True)
class Situation:
    """Two prompts, the second of which can reuse a prefix of the first."""

    before: TokenPrompt
    now: TokenPrompt
    shared: int  # length of the common prefix in tokens, without the last token of the prompt
    planned: int  # length up to the last checkpoint position, where state snapshots end


Answer = Callable[[TokenPrompt], tuple[int, ...]]
SYSTEM_PROMPT, OPENS = prompt(SYSTEM, seed=1), prompt(OPENING, seed=2)


def user(seed: int) -> tuple[int, ...]:
    """Return the tokens of a user's turn."""
    return prompt(USER, seed)


def chat(*turns: tuple[int, ...]) -> TokenPrompt:
    """Return the prompt with these turns after the system prompt, and the opening of the answer."""
    ends = [SYSTEM + sum(map(len, turns[: i + 1])) for i in range(len(turns))]
    tokens = sum((SYSTEM_PROMPT, *turns), ()) + OPENS
    return TokenPrompt(tokens, (ends[-1], SYSTEM, *reversed(ends[:-1])))


def shared_system(answer: Answer) -> Situation:
    """Two conversations with the same system prompt."""
    return Situation(chat(user(3)), chat(user(4)), SYSTEM, SYSTEM)


def growing(answer: Answer) -> Situation:
    """The next turn of a conversation."""
    first = chat(user(3))
    answered = OPENS + answer(first)
    return Situation(first, chat(user(3), answered, user(4)), (both := SYSTEM + USER + len(answered)), both)


def edited(answer: Answer) -> Situation:
    """A prompt that differs from the middle of a turn."""
    half = USER // 2
    return Situation(chat(user(3)), chat(user(3)[:half] + user(4)[half:]), SYSTEM + half, SYSTEM)


def twice(answer: Answer) -> Situation:
    """The same prompt again."""
    return Situation(chat(user(3)), chat(user(3)), SYSTEM + USER + OPENING - 1, SYSTEM + USER)


def shorter(answer: Answer) -> Situation:
    """A prompt that is a prefix of the first one."""
    long = chat(user(3), OPENS + user(4), user(5))
    return Situation(long, chat(user(3)), SYSTEM + USER + OPENING - 1, SYSTEM + USER)


def tool(answer: Answer) -> Situation:
    """A turn with a tool call, which the template writes with other tokens than the model."""
    first = chat(user(3))
    call = OPENS + answer(first)[:3] + user(6)
    return Situation(first, chat(user(3), call, user(4)), SYSTEM + USER + OPENING + 3, SYSTEM + USER)


SITUATIONS: dict[str, Callable[[Answer], Situation]] = {
    "system prompt": shared_system, "next turn": growing, "edited in the middle": edited, "the same again": twice,
    "a part of it": shorter, "after a tool": tool,
}  # fmt: skip


def reach(console: Console) -> bool:
    """Print the table; return True if each hit has the greatest possible length and the same answer."""
    title = "Cached tokens of those shared; state snapshots exist at checkpoint positions only"
    table = Table("family", "cache", *SITUATIONS, title=title, title_justify="left")
    holds = True
    for family, kind in KINDS.items():
        cells = list(_cells(tiny.model(family)))
        table.add_row(family, kind, *(text for text, _ in cells))
        holds = holds and all(within for _, within in cells)
    console.print(table)
    return holds


def _cells(model: Model) -> Iterator[tuple[str, bool]]:
    stateful = PrefixCache(model.network, 0).stateful

    def answer(request: TokenPrompt) -> tuple[int, ...]:
        tokens = tuple(tiny.alone(model.network, request.prompt, ANSWER))
        return tokens if len(tokens) == ANSWER else (*tokens, tiny.EOS)

    for build in SITUATIONS.values():
        situation = build(answer)
        engine = Engine(model, step_s=10.0, prefix_bytes=1 << 26)
        _run(engine, situation.before)
        found, tokens = _run(engine, situation.now)
        equal = tokens == tiny.alone(model.network, situation.now.prompt, ANSWER)
        far = found == (situation.planned if stateful else situation.shared)
        text = f"{found} of {situation.shared}" + ("" if equal else ", other tokens")
        yield text if equal and far else f"[red]{text}", equal and far


def _run(engine: Engine, request: TokenPrompt) -> tuple[int, list[int]]:
    """Run a request; return the number of cached tokens and the answer."""
    engine.add(GenerationRequest("", request.prompt, ANSWER, boundaries=request.boundaries))
    found, tokens = 0, list[int]()
    while len(engine):
        for outcome in engine.step().outcomes:
            if isinstance(outcome, Prefilled):
                found = outcome.cached
            elif isinstance(outcome, Sampled) and outcome.token is not None:
                tokens.append(outcome.token)
    return found, tokens
