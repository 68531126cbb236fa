"""The scenarios: each is a list of cases, and a case is a set of chats with the way to send them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

from scripts.benchmarks.serve import trace, workload
from scripts.benchmarks.serve.bare import ROWS, Bare
from scripts.benchmarks.serve.trace import Entry
from scripts.benchmarks.serve.workload import Chat, LogNormal, Mix

# What `--scenario` offers, with its explanation.
SCENARIOS = {
    "burst": "many unseen chats at once, 5 to 60 words each",
    "alone": "one chat after the other, 10 to 400 words",
    "prompts": "many prompts at once with one token each: the speed of prefill",
    "open": "chats arrive at random, at several rates",
    "mixed": "the same at load 0.8: the slowdown of first tokens by waiting",
    "highest": "searches the highest rate with 90 % good answers",
    "chats": "conversations of several turns with pauses, at several rates",
    "agents": "conversations of an agent at once: one system prompt, tools, six turns that grow, over HTTP; with and "
    "without a system message in each turn",
    "trace": "the arrivals of --trace FILE",
}
DEFAULT = ("burst", "alone", "prompts", "open")
OVER_HTTP = frozenset({"agents"})  # our worker is measured through its gateway
REMINDED = " with reminders"  # ends the names of cases with a system message in each turn
MIXED_LOAD = 0.8
LEAST_LOAD, MOST_LOAD = 0.03, 16.0  # of the search for the highest rate
GOOD_SHARE = 0.9  # of the search for the highest rate


@dataclass(frozen=True, slots=True)
class Options:
    """The sizes of the scenarios. Rates count arrivals per second; a load of 1 is the rate at which the bare forwards
    alone take all the time."""

    chats: tuple[int, ...] = (32, 8, 4)
    agents: tuple[int, ...] = (4, 8)
    tokens: int = 96  # of each answer of a burst
    alone_words: tuple[int, ...] = (10, 50, 100, 200, 400)
    prompt_words: tuple[int, ...] = (30, 60)
    loads: tuple[float, ...] = (0.5, 0.75, 1.0, 1.5, 2.0)
    rates: tuple[float, ...] = ()  # instead of `loads`
    seconds: float = 40.0
    mix: Mix = field(default_factory=Mix)
    think_s: float = 3.0
    offline: int = 0  # chats of the batch lane that always run beside open arrival
    trace: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement."""

    scenario: str
    name: str
    chats: Callable[[Random], list[Chat]]
    rows: int = ROWS  # that decode together in the bare forwards it is compared with
    rate: float | None = None
    load: float | None = None
    one_by_one: bool = False
    offline: int = 0
    seen: tuple[str, ...] = ()  # prompts that the server gets before the measurement
    ours: bool = False  # other servers refuse it


def turn_s(mix: Mix, bare: Bare) -> float:
    """Return the seconds of bare forwards that an arrival of open load takes on average."""
    return _mean_s(mix.prompt_words, mix, bare)


def _conversation_s(mix: Mix, bare: Bare) -> float:
    """Return the seconds of an average conversation whose history is never computed again."""
    return workload.TURNS.mean * _mean_s(workload.TURN_WORDS, mix, bare)


def _mean_s(words: LogNormal, mix: Mix, bare: Bare) -> float:
    prompt = bare.template_tokens + words.mean * bare.tokens_per_word
    return bare.work_s(prompt, mix.answer_tokens.mean - 1, ROWS)


def loads(options: Options, bare: Bare, cost_s: Callable[[Mix, Bare], float] = turn_s) -> list[float]:
    """Return the loads of open arrival: those of the options, or those of their rates."""
    return [rate * cost_s(options.mix, bare) for rate in options.rates] or [*options.loads]


def cases(scenario: str, options: Options, bare: Bare) -> list[Case]:
    """Return the cases of a scenario; `highest` has none, since each depends on the one before it."""
    match scenario:
        case "burst":
            return [_burst(options, count) for count in options.chats]
        case "alone":
            return [_alone(words) for words in options.alone_words]
        case "prompts":
            return [_prompts(words) for words in options.prompt_words]
        case "open":
            return [_open("open", options, bare, load) for load in loads(options, bare)]
        case "mixed":
            return [_open("mixed", options, bare, MIXED_LOAD)]
        case "chats":
            return [_conversations(options, bare, load) for load in loads(options, bare, _conversation_s)]
        case "agents":
            return [_agents(count, reminders) for reminders in (False, True) for count in options.agents]
        case "trace":
            return [_trace(options, bare)]
    return []


def highest_case(options: Options, bare: Bare, load: float) -> Case:
    """Return a case of the search for the highest rate."""
    return _open("highest", options, bare, load)


def next_load(good_by_load: Mapping[float, float]) -> float | None:
    """Return the next load of the search for the highest one with enough good answers; None if it has ended.

    It goes up or down by a factor from load 0.5, then halves the interval until its ends are 10 % apart.
    """
    step, close = 1.6, 1.1
    if not good_by_load:
        return 0.5
    failing = min((load for load, good in good_by_load.items() if good < GOOD_SHARE), default=math.inf)
    passing = best_load(good_by_load) or 0.0
    if failing == math.inf:
        return passing * step if passing * step <= MOST_LOAD else None
    if not passing:
        return failing / step if failing / step >= LEAST_LOAD else None
    return math.sqrt(failing * passing) if failing / passing > close else None


def best_load(good_by_load: Mapping[float, float]) -> float | None:
    """Return the highest load below the first with too few good answers; None if all loads have enough."""
    failing = min((load for load, good in good_by_load.items() if good < GOOD_SHARE), default=math.inf)
    return max((load for load in good_by_load if load < failing), default=None)


def _burst(options: Options, count: int) -> Case:
    chats = partial(workload.burst, count, options.tokens)
    return Case("burst", f"{count} at once", chats, rows=min(ROWS, count))


def _agents(count: int, reminders: bool) -> Case:
    # The template of the models of the bench, as most, takes a system message at the beginning alone.
    name = f"{count} at once{REMINDED if reminders else ''}"
    chats = partial(workload.agents, count, reminders=reminders)
    return Case("agents", name, chats, rows=min(ROWS, count), ours=reminders)


def _alone(words: int) -> Case:
    return Case("alone", f"{words} words", partial(_same_length, 3, words, 48), rows=1, one_by_one=True)


def _prompts(words: int) -> Case:
    return Case("prompts", f"{ROWS} of {words} words", partial(_same_length, ROWS, words, 1))


def _same_length(count: int, words: int, tokens: int, dice: Random) -> list[Chat]:
    texts = workload.Texts(dice)
    return workload.at_once([texts.draw(words) for _ in range(count)], tokens)


def _open(scenario: str, options: Options, bare: Bare, load: float) -> Case:
    rate = load / turn_s(options.mix, bare)
    return Case(
        scenario,
        _label(load, rate),
        partial(options.mix.open, rate, options.seconds),
        rate=rate,
        load=load,
        offline=options.offline,
        seen=tuple(options.mix.pool()),
    )


def _conversations(options: Options, bare: Bare, load: float) -> Case:
    rate = load / _conversation_s(options.mix, bare)
    chats = partial(options.mix.conversations, rate, options.seconds, options.think_s)
    return Case("chats", _label(load, rate), chats, rate=rate, load=load, offline=options.offline)


def _trace(options: Options, bare: Bare) -> Case:
    replay = partial(trace.chats, options.trace, bare.words_of)
    seconds = max(entry.at_s for entry in options.trace) or 1.0
    rate = len(options.trace) / seconds
    load = _needed_s(replay(Random(0)), bare) / seconds
    return Case("trace", _label(load, rate), replay, rate=rate, load=load, offline=options.offline)


def _needed_s(chats: Sequence[Chat], bare: Bare) -> float:
    turns = [turn for chat in chats for turn in chat.turns]
    words = sum(len(turn.text.split()) for turn in turns)
    prompts = len(turns) * bare.template_tokens + words * bare.tokens_per_word
    return bare.work_s(prompts, sum(turn.max_tokens - 1 for turn in turns), ROWS)


def _label(load: float, rate: float) -> str:
    return f"load {load:.2f} ({rate:.2f}/s)"
