"""Requests of a simulation: generated, or read from a recorded trace."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random

from worker.schedule.request import Lane

WORDS = 8, 36, 700  # of a prompt in open arrival: least, median, most; log-normal
WORDS_SPREAD = 1.0  # standard deviation of the logarithm: the mean is then 60 words, some 108 tokens
ANSWER = 8, 27, 128  # tokens of an answer: least, median, most; log-normal
ANSWER_SPREAD = 0.8
BURST_WORDS = 5, 60  # of a prompt in a burst, uniform
BURST_ANSWER = 96  # tokens
_TEMPLATE_TOKENS, _TOKENS_PER_WORD = 13, 1.57  # of the models in `scripts/bench serve`


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it arrives, and how long its prompt and its answer are in tokens."""

    at_s: float
    prompt: int
    answer: int
    lane: Lane = "interactive"


def burst(number: int, seed: int) -> list[Arrival]:
    """Return requests that arrive at once."""
    dice = Random(seed)
    return [Arrival(0.0, _tokens(dice.randint(*BURST_WORDS)), BURST_ANSWER) for _ in range(number)]


def poisson(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return requests that arrive independently, `rate` per second on average."""
    return list(_poisson(rate, seconds, Random(seed)))


def _poisson(rate: float, seconds: float, dice: Random) -> Iterator[Arrival]:
    at_s = dice.expovariate(rate)
    while at_s < seconds:
        yield Arrival(at_s, _tokens(_log_normal(dice, WORDS, WORDS_SPREAD)), _log_normal(dice, ANSWER, ANSWER_SPREAD))
        at_s += dice.expovariate(rate)


def _log_normal(dice: Random, bounds: tuple[int, int, int], spread: float) -> int:
    least, median, most = bounds
    return min(most, max(least, round(dice.lognormvariate(log(median), spread))))


def _tokens(words: int) -> int:
    return round(_TEMPLATE_TOKENS + _TOKENS_PER_WORD * words)


def from_trace(path: Path) -> list[Arrival]:
    """Read a trace: a JSON object per line with `at_s`, `prompt` and `answer` (tokens), and optionally `lane`."""
    lines = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return sorted((Arrival(**line) for line in lines), key=lambda arrival: arrival.at_s)
