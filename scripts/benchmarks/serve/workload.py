"""Chats and their arrivals, drawn from a seed."""

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import NormalDist
from typing import Any

from models.training.data import ITEMS, PLACES
from sluice.contract.keys import Lane

_VOCABULARY = " ".join([*ITEMS, *PLACES]).split()


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, sent `think_s` after the answer before it has ended, and never before `at_s`."""

    text: str
    max_tokens: int
    think_s: float = 0.0
    at_s: float = 0.0  # from the start of the run
    reminder: str = ""  # the text of a system message behind the user's


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation: each turn is sent with all messages before it."""

    turns: tuple[Turn, ...]
    tenant: str | None = None
    lane: Lane = "interactive"
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()  # as OpenAI's chat completions have them

    @property
    def at_s(self) -> float:
        """Arrival of the first turn, in seconds from the start of the run."""
        return self.turns[0].at_s


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution of whole numbers from `least` to `most`; `sigma` is that of the logarithm."""

    median: float
    sigma: float
    least: int
    most: int

    def at(self, share: float) -> int:
        """Return the number below which this share of the values lies, within the bounds."""
        value = self.median * math.exp(self.sigma * NormalDist().inv_cdf(share))
        return min(self.most, max(self.least, round(value)))

    @property
    def mean(self) -> float:
        """The mean within the bounds."""
        return sum(self.at((i + 0.5) / 1000) for i in range(1000)) / 1000

    def draw(self, count: int, dice: Random) -> list[int]:
        """Return values in random order, one from each of `count` equally likely intervals.

        So their mean is about the same for every seed, and with it the load of a run.
        """
        values = [self.at(min(1 - 1e-9, max(1e-9, (i + dice.random()) / count))) for i in range(count)]
        dice.shuffle(values)
        return values


# Figures of ordinary chats: most prompts and answers are short, a few are long.
PROMPT_WORDS = LogNormal(36, 1.3, 8, 700)
ANSWER_TOKENS = LogNormal(27, 0.8, 8, 128)
TURNS = LogNormal(3, 0.5, 1, 8)
TURN_WORDS = LogNormal(16, 0.8, 4, 120)
BURST_WORDS = 5, 60  # at least, at most
# An agent's conversation: the system prompt and the tools have some 800 tokens, and a turn brings a question or what a
# tool has returned.
AGENT_TURNS = 6
AGENT_SYSTEM_WORDS = 200
AGENT_TURN_WORDS = 100, 300  # at least, at most
AGENT_ANSWER_TOKENS = 32  # of a call, or of a sentence
REMINDER_WORDS = 12
REMINDER_MARK_WORDS = 16  # as many tokens as the marks around a message: 21 with the bench models' tokenizer
_AGENT_TOOLS = {
    "read_file": ("path", "offset", "limit"),
    "run_command": ("command", "timeout"),
    "search": ("pattern", "path"),
}


class Texts:
    """Draws texts. Each begins with a made-up word that no other has, so that no prefix cache can help."""

    def __init__(self, dice: Random) -> None:
        self._dice = dice
        self._used = set[str]()

    def draw(self, words: int) -> str:
        """Return a new text of this many words, at least one."""
        return " ".join([self._new_word(), *self._dice.choices(_VOCABULARY, k=words - 1)])

    def _new_word(self) -> str:
        while (word := "".join(self._dice.choices(string.ascii_lowercase, k=8))) in self._used:
            pass
        self._used.add(word)
        return word


def arrivals(rate: float, seconds: float, dice: Random) -> list[float]:
    """Return the sorted times of a Poisson process that has `rate × seconds` arrivals (rounded, at least one)."""
    return sorted(dice.uniform(0, seconds) for _ in range(max(1, round(rate * seconds))))


def at_once(texts: Sequence[str], max_tokens: int) -> list[Chat]:
    """Return chats of one turn that are all sent at the start."""
    return [Chat((Turn(text, max_tokens),)) for text in texts]


def burst(count: int, max_tokens: int, dice: Random) -> list[Chat]:
    """Return unseen chats of 5 to 60 words that are all sent at the start."""
    texts = Texts(dice)
    return at_once([texts.draw(dice.randint(*BURST_WORDS)) for _ in range(count)], max_tokens)


def agents(count: int, dice: Random, *, reminders: bool = False) -> list[Chat]:
    """Return conversations that begin together, with one system prompt and the same tools, which no server has seen.

    With `reminders`, a system message follows the user's in each turn. The user's then lacks its words, and as many as
    the marks around a message have tokens: the prompts are as long."""
    texts = Texts(dice)
    # Templates write either of the two first.
    system, tools = texts.draw(AGENT_SYSTEM_WORDS), tuple(_tool(name, texts) for name in _AGENT_TOOLS)
    least, most = AGENT_TURN_WORDS
    turns = count * AGENT_TURNS
    lengths = [least + (most - least) * number // (turns - 1) for number in range(turns)]  # the same sum for all seeds
    dice.shuffle(lengths)
    made = [_agent_turn(texts.draw(words).split(), reminders) for words in lengths]
    return [Chat(tuple(made[number::count]), system=system, tools=tools) for number in range(count)]


def _agent_turn(words: list[str], reminders: bool) -> Turn:
    if not reminders:
        return Turn(" ".join(words), AGENT_ANSWER_TOKENS)
    own = len(words) - REMINDER_WORDS - REMINDER_MARK_WORDS
    return Turn(" ".join(words[:own]), AGENT_ANSWER_TOKENS, reminder=" ".join(words[own : own + REMINDER_WORDS]))


def _tool(name: str, texts: Texts) -> dict[str, Any]:
    parameters = {each: {"type": "string", "description": texts.draw(5)} for each in _AGENT_TOOLS[name]}
    schema = {"type": "object", "properties": parameters, "required": [*parameters][:1]}
    return {"type": "function", "function": {"name": name, "description": texts.draw(15), "parameters": schema}}


@dataclass(frozen=True, slots=True)
class Mix:
    """The composition of open arrival."""

    prompt_words: LogNormal = PROMPT_WORDS
    answer_tokens: LogNormal = ANSWER_TOKENS
    tenants: int = 1
    returning: int = 0  # number of texts that all prompts are drawn from; 0: every prompt is unseen

    def open(self, rate: float, seconds: float, dice: Random) -> list[Chat]:
        """Return chats of one turn in order of arrival."""
        times = arrivals(rate, seconds, dice)
        texts = self._texts(len(times), dice)
        tokens = self.answer_tokens.draw(len(times), dice)
        turns = [Turn(text, each, at_s=at_s) for at_s, text, each in zip(times, texts, tokens, strict=True)]
        return [Chat((turn,), tenant) for turn, tenant in zip(turns, self._tenants(dice), strict=False)]

    def pool(self) -> list[str]:
        """Return the texts that return, always the same ones; empty if every prompt is unseen."""
        dice = Random("returning")
        texts = Texts(dice)
        return [texts.draw(words) for words in self.prompt_words.draw(self.returning, dice)]

    def conversations(self, rate: float, seconds: float, think_s: float, dice: Random) -> list[Chat]:
        """Return chats of several turns; `rate` counts chats a second, `think_s` is the median pause before a turn."""
        times = arrivals(rate, seconds, dice)
        lengths = TURNS.draw(len(times), dice)
        texts = Texts(dice)
        words = iter(TURN_WORDS.draw(sum(lengths), dice))
        tokens = iter(self.answer_tokens.draw(sum(lengths), dice))
        chats = list[Chat]()
        for at_s, length, tenant in zip(times, lengths, self._tenants(dice), strict=False):
            pauses = [0.0] + [dice.lognormvariate(math.log(think_s), 0.6) for _ in range(length - 1)]
            turns = (Turn(texts.draw(next(words)), next(tokens), pause, at_s) for pause in pauses)
            chats.append(Chat(tuple(turns), tenant))
        return chats

    def _texts(self, count: int, dice: Random) -> list[str]:
        if self.returning:
            return dice.choices(self.pool(), k=count)
        texts = Texts(dice)
        return [texts.draw(words) for words in self.prompt_words.draw(count, dice)]

    def _tenants(self, dice: Random) -> Iterator[str | None]:
        """Yield tenants without end; tenant k has a weight of 1/k, so the first sends most."""
        names = [f"tenant-{number + 1}" for number in range(self.tenants)]
        weights = [1 / (number + 1) for number in range(self.tenants)]
        while True:
            yield dice.choices(names, weights)[0] if self.tenants > 1 else None


def offline(dice: Random) -> Iterator[Chat]:
    """Yield chats of the batch lane without end, as of an offline file: prompts of 60 words, answers of 64 tokens."""
    texts = Texts(dice)
    while True:
        yield Chat((Turn(texts.draw(60), 64),), lane="batch")
