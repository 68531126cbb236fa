"""Requests of a simulation: generated, or read from a recorded trace."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from scripts.benchmarks.serve import workload
from sluice.contract.keys import Lane

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
    return [Arrival(0.0, _tokens(dice.randint(*workload.BURST_WORDS)), BURST_ANSWER) for _ in range(number)]


def poisson(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Return requests of open arrival as `scripts/bench serve` draws them, `rate` per second."""
    dice = Random(seed)
    times = workload.arrivals(rate, seconds, dice)
    words = workload.PROMPT_WORDS.draw(len(times), dice)
    answers = workload.ANSWER_TOKENS.draw(len(times), dice)
    return [Arrival(at_s, _tokens(each), answer) for at_s, each, answer in zip(times, words, answers, strict=True)]


def means() -> tuple[float, float]:
    """Return the mean tokens of a prompt and of an answer in open arrival."""
    return _TEMPLATE_TOKENS + _TOKENS_PER_WORD * workload.PROMPT_WORDS.mean, workload.ANSWER_TOKENS.mean


def _tokens(words: int) -> int:
    return round(_TEMPLATE_TOKENS + _TOKENS_PER_WORD * words)


def from_trace(path: Path) -> list[Arrival]:
    """Read a trace: a JSON object per line with `at_s`, `prompt` and `answer` (tokens), and optionally `lane`."""
    lines = (json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip())
    return sorted((Arrival(**line) for line in lines), key=lambda arrival: arrival.at_s)


@dataclass(slots=True, eq=False)
class Request:
    """A request in the simulation, and what its client has received."""

    id: str
    arrival: Arrival
    admitted_s: float = 0.0
    done: int = 0  # prompt tokens computed, of `total`
    joined_s: float = 0.0
    started: bool = False  # a decode step has begun to draw its first token
    token_times_s: list[float] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Prompt tokens to prefill: all but the last, which the row is fed when it decodes."""
        return self.arrival.prompt - 1
