"""Drives an engine, and keeps what is heard of it."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences

import mlx.core as mx

from worker.engine.engine import Engine
from worker.engine.model import Model
from worker.engine.upstream import generation_stream
from worker.schedule.grouping import StepCost
from worker.schedule.memory import MOST_ROWS
from worker.schedule.sequence import (
    Encoded,
    Faulted,
    Guide,
    Lane,
    Prefilled,
    Range,
    Refused,
    Sampled,
    Sampling,
    Scored,
    Sequence,
    StepReport,
    Thinned,
    Thinning,
    Whole,
)


def answers(model: Model, sequences: Iterable[Sequence], *, apart: int = 0) -> dict[str, list[Sampled]]:
    """What each sequence heard. They arrive so many steps apart."""
    engine, waiting, steps = Engine(model, step_s=0.02), list(sequences), 0
    heard: dict[str, list[Sampled]] = {sequence.id: [] for sequence in waiting}
    while waiting or len(engine):
        while waiting and steps >= apart * (len(heard) - len(waiting)):
            engine.add(waiting.pop(0))
        for outcome in engine.step().outcomes:
            assert not isinstance(outcome, Faulted)
            if isinstance(outcome, Sampled):
                heard[outcome.id].append(outcome)
        steps += 1
    return heard


def answer(model: Model, sequence: Sequence) -> list[Sampled]:
    return answers(model, [sequence])[sequence.id]


def tokens(heard: list[Sampled]) -> list[int]:
    return [sampled.token for sampled in heard if sampled.token is not None]


# Too short to leave less time for prompts.
ONE_GROUP, EACH_ALONE = StepCost(group_s=1e-6), StepCost(cell_s=1e-9)


class Fixed:
    """What a step costs, whatever was measured."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def saw(self, groups: Sequences[Sequences[int]], seconds: float) -> None:
        pass

    def cost(self) -> StepCost:
        return self._cost


class Run:
    """An engine, and what each row said and how it ended."""

    def __init__(
        self,
        model: Model,
        *,
        step_s: float = 0.02,
        rows: int = MOST_ROWS,
        memory: int | None = None,
        prefix_bytes: int = 0,
    ) -> None:
        self.engine = Engine(model, step_s=step_s, rows=rows, memory=memory, prefix_bytes=prefix_bytes)
        self.kept: dict[str, tuple[Range, ...]] = {}  # of those that were thinned
        self.whole: dict[str, str] = {}  # why others were not
        self.scored = Counter[str]()  # chunks
        self.cached: dict[str, int] = {}  # tokens of each row that were found in the prefix cache
        self.said: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.encoded = Counter[str]()  # parts of each row's images
        self.chunks = Counter[str]()  # of each row's prompt
        self.ended: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.steps = 0

    def add(
        self,
        id: str,
        tokens: tuple[int, ...],
        *,
        max_tokens: int = 20,
        sampling: Sampling | None = None,
        lane: Lane = "interactive",
        guide: Guide | None = None,
        top_logprobs: int | None = None,
        delivered: Sequences[int] = (),
        space: str = "",
        boundaries: Sequences[int] = (),
        kept: tuple[Range, ...] | None = None,
        thinning: Thinning | None = None,
    ) -> None:
        self.submit(
            Sequence(
                id,
                tokens,
                max_tokens,
                sampling or Sampling(),
                lane,
                tuple(delivered),
                guide,
                top_logprobs,
                space,
                tuple(boundaries),
                thinning,
                kept,
            )
        )

    def submit(self, sequence: Sequence) -> None:
        self.said[sequence.id], self.logprobs[sequence.id] = list(sequence.delivered), []
        self.engine.add(sequence)

    def step(self) -> StepReport:
        self.steps += 1
        report = self.engine.step()
        for outcome in report.outcomes:
            assert outcome.id not in self.ended, "a row that has ended was heard of again"
            match outcome:
                case Sampled(id, token, finish_reason, logprobs):
                    self.said[id] += [] if token is None else [token]
                    self.logprobs[id] += [logprobs.token] if logprobs else []
                    if finish_reason:
                        self.ended[id] = finish_reason
                case Faulted(id):
                    self.ended[id] = "faulted"
                case Refused(id, sentence):
                    self.ended[id], self.refused[id] = "refused", sentence
                case Thinned(id, kept):
                    self.kept[id] = kept
                case Whole(id, why):
                    self.whole[id] = why
                case Scored(id):
                    self.scored[id] += 1
                case Encoded(id):
                    self.encoded[id] += 1
                case Prefilled(id, cached=cached):
                    self.chunks[id] += 1
                    self.cached[id] = cached
        return report

    def drain(self, *, most: int = 5000) -> dict[str, list[int]]:
        self.until(lambda: not len(self.engine), most=most)
        return self.said

    def until(self, there: Callable[[], bool], *, most: int = 1000) -> None:
        for _ in range(most):
            if there():
                return
            self.step()
        raise AssertionError(f"after {most} steps: {self.said}, {self.ended}")

    @property
    def inside(self) -> list[str]:
        """Rows that prefill or decode, the oldest first."""
        return list(self.engine._inside)

    @property
    def waiting(self) -> list[str]:
        return list(self.engine._entry._waiting)

    @property
    def held_bytes(self) -> int:
        """Of those who wait with their caches."""
        return self.engine._entry._held()

    def park(self, id: str) -> None:
        """As if to make room. It comes back when `stir` says that there is some, or somebody ends."""
        with mx.stream(generation_stream):
            self.engine._park(id)

    def stir(self, *, keep: bool = True) -> None:
        """Room for the rows that wait; their caches are kept, or computed again."""
        for candidate in self.engine._entry._waiting.values():
            if not keep:
                candidate.forget()
        self.engine._entry.stir()

    def group_by(self, cost: StepCost) -> None:
        """Rows are moved to suit it at the end of the next step."""
        self.engine._running._cost = Fixed(cost)
        self.engine._running._steps = -1  # groups are looked at now and then only, and now is then
