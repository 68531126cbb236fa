"""Measurements of a run, and the figures of runs with drafts relative to runs without."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from worker.outcomes import Outcome, Prefilled, Refused, RowFailed, Sampled, Speculated


@dataclass(frozen=True, slots=True)
class Clocks:
    """Times of the clocks, or the time between two readings of them. Other work of the machine makes steps take more
    wall time, and hardly more CPU time."""

    wall_s: float = 0.0
    cpu_s: float = 0.0  # CPU time of the process: the host's work, and on a CPU the computing too
    host_s: float = 0.0  # CPU time of the engine's thread, the host's work; MLX computes in another thread

    @classmethod
    def now(cls) -> "Clocks":
        """Read the clocks. Called by the engine's thread."""
        return cls(time.perf_counter(), time.process_time(), time.thread_time())

    def __sub__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s, self.host_s - other.host_s)

    def __add__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s, self.host_s + other.host_s)


MIN_ANSWERS = 8  # of a run


class TokensDiffer(Exception):
    """An answer with drafts is another one than without."""


class NotAnswered(Exception):
    """The engine has refused a request, or failed on it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A task with a number of rows and a proposer."""

    task: str
    rows: int
    proposer: str

    @property
    def name(self) -> str:
        """Name of the case in lines and labels."""
        return f"{self.task}, {self.rows} row{'s' * (self.rows != 1)}, {self.proposer}"

    @property
    def answers(self) -> int:
        """Number of requests of a run: as many for each of the rows."""
        return self.rows * -(-MIN_ANSWERS // self.rows)


@dataclass(frozen=True, slots=True)
class Run:
    """The same requests on one engine, once."""

    answers: Mapping[str, tuple[int, ...]]
    draws: int  # tokens of all answers and their ends
    tokens: int  # delivered by steps that computed no prompt
    decode: Clocks  # that these steps took
    whole_s: float  # that all steps took
    gap_s: float  # the longest between two deliveries to one row
    drafts: Mapping[str, tuple[int, int]]  # proposed and accepted tokens by proposer

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding."""
        return _per(self.tokens, self.decode.wall_s)

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens per second of CPU time of the process, while decoding."""
        return _per(self.tokens, self.decode.cpu_s)

    @property
    def host_s_per_token(self) -> float:
        """Seconds of CPU time of the engine's thread per token of decoding."""
        return _per(self.decode.host_s, self.tokens)

    @property
    def delivered(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.answers.values()))

    @property
    def proposed(self) -> int:
        """Tokens of drafts."""
        return sum(proposed for proposed, _ in self.drafts.values())

    @property
    def accepted(self) -> int:
        """Tokens of drafts that were right."""
        return sum(accepted for _, accepted in self.drafts.values())


def _per(number: float, other: float) -> float:
    return number / other if other else math.nan


class Meter:
    """Measures a run, step by step. Has no clock of its own."""

    def __init__(self) -> None:
        self._answers = dict[str, list[int]]()
        self._delivered_at = dict[str, float]()  # by row: the end of the step that has delivered to it last
        self._drafts = dict[str, tuple[int, int]]()
        self._tokens = self._draws = 0
        self._decode = Clocks()
        self._whole_s = self._gap_s = 0.0

    def observe(self, outcomes: Iterable[Outcome], began: Clocks, ended: Clocks) -> None:
        """Record a step and what the clocks showed when it began and ended. Raises `NotAnswered`."""
        tokens, with_prompt = 0, False
        for outcome in outcomes:
            match outcome:
                case Sampled(id, token):
                    self._draws += 1
                    if token is not None:
                        self._deliver(id, token, ended.wall_s)
                        tokens += 1
                case Speculated(_, kind, proposed, accepted):
                    before = self._drafts.get(kind, (0, 0))
                    self._drafts[kind] = before[0] + proposed, before[1] + accepted
                case Prefilled():
                    with_prompt = True
                case Refused(id, message):
                    raise NotAnswered(f"request {id} was refused: {message}")
                case RowFailed(id):
                    raise NotAnswered(f"request {id} has failed; the lines above say why")
        taken = ended - began
        self._whole_s += taken.wall_s
        if not with_prompt:
            self._tokens += tokens
            self._decode += taken

    def _deliver(self, id: str, token: int, at: float) -> None:
        self._answers.setdefault(id, []).append(token)
        self._gap_s = max(self._gap_s, at - self._delivered_at.get(id, at))
        self._delivered_at[id] = at

    def run(self) -> Run:
        """Return what was measured."""
        answers = {id: tuple(tokens) for id, tokens in self._answers.items()}
        return Run(answers, self._draws, self._tokens, self._decode, self._whole_s, self._gap_s, dict(self._drafts))


@dataclass(frozen=True, slots=True)
class Pair:
    """A run without drafts and one with them, one after the other."""

    off: Run
    on: Run

    def check(self, case: Case) -> None:
        """Compare the answers. Raises `TokensDiffer`, which names the case and the first difference."""
        for id in sorted(self.off.answers.keys() | self.on.answers.keys()):
            plain, drafted = (run.answers.get(id, ()) for run in (self.off, self.on))
            if plain != drafted:
                position = _first_difference(plain, drafted)
                raise TokensDiffer(
                    f"{case.name}: request {id} differs at token {position}: {_listed(plain, position)} without "
                    f"drafts, {_listed(drafted, position)} with them"
                )


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    return next((position for position, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _listed(tokens: Sequence[int], position: int) -> str:
    return " ".join(map(str, tokens[position : position + 4])) or "the end"


@dataclass(frozen=True, slots=True)
class Result:
    """All pairs of one case."""

    case: Case
    pairs: tuple[Pair, ...]

    @property
    def speed(self) -> float:
        """Tokens per second of decoding, relative to those without drafts: the median of the pairs."""
        return self._median(lambda pair: pair.on.tokens_per_s / pair.off.tokens_per_s)

    @property
    def whole_speed(self) -> float:
        """The same of the whole time, prompts included."""
        return self._median(lambda pair: pair.off.whole_s / pair.on.whole_s)

    @property
    def cpu_speed(self) -> float:
        """Tokens per second of CPU time, relative to those without drafts: the median of the pairs."""
        return self._median(lambda pair: pair.on.tokens_per_cpu_s / pair.off.tokens_per_cpu_s)

    @property
    def plain_host_s(self) -> float:
        """Seconds of the host's work per token without drafts."""
        return self._median(lambda pair: pair.off.host_s_per_token)

    @property
    def host_s(self) -> float:
        """Seconds of the host's work per token with drafts."""
        return self._median(lambda pair: pair.on.host_s_per_token)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that a row draws per forward, its end included: one after those of a draft that were right."""
        draws = sum(pair.on.draws for pair in self.pairs)
        forwards = draws - sum(pair.on.accepted for pair in self.pairs)
        return draws / forwards if forwards else math.nan

    @property
    def accepted_share(self) -> float:
        """Accepted tokens of drafts, of those that were proposed; NaN if none was."""
        proposed = sum(pair.on.proposed for pair in self.pairs)
        return sum(pair.on.accepted for pair in self.pairs) / proposed if proposed else math.nan

    @property
    def plain_tokens_per_s(self) -> float:
        """Tokens per second of decoding without drafts."""
        return self._median(lambda pair: pair.off.tokens_per_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of decoding with drafts."""
        return self._median(lambda pair: pair.on.tokens_per_s)

    @property
    def plain_gap_s(self) -> float:
        """The longest gap without drafts."""
        return max(pair.off.gap_s for pair in self.pairs)

    @property
    def gap_s(self) -> float:
        """The longest gap with drafts."""
        return max(pair.on.gap_s for pair in self.pairs)

    def _median(self, value: Callable[[Pair], float]) -> float:
        return statistics.median(map(value, self.pairs))

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values, with those of each pair."""
        names = (
            "tokens_per_forward", "accepted_share", "plain_tokens_per_s", "tokens_per_s",
            "speed", "cpu_speed", "whole_speed", "plain_host_s", "host_s", "plain_gap_s", "gap_s",
        )  # fmt: skip
        figures = {name: _finite(getattr(self, name)) for name in names}
        return {
            **asdict(self.case),
            **figures,
            "pairs": [{"off": _run_json(pair.off), "on": _run_json(pair.on)} for pair in self.pairs],
        }


def _run_json(run: Run) -> dict[str, Any]:
    drafts = {kind: {"proposed": counts[0], "accepted": counts[1]} for kind, counts in run.drafts.items()}
    return {
        "tokens": run.delivered,
        "tokens_per_s": _finite(run.tokens_per_s),
        "tokens_per_cpu_s": _finite(run.tokens_per_cpu_s),
        "host_s_per_token": _finite(run.host_s_per_token),
        "whole_s": run.whole_s,
        "gap_s": run.gap_s,
        "drafts": drafts,
    }


def _finite(value: Any) -> Any:
    """Return None for NaN, which JSON lacks."""
    return None if isinstance(value, float) and math.isnan(value) else value
