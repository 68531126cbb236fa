"""Drives an engine, and keeps what is heard of it."""

from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences

import mlx.core as mx

from worker.engine.engine import Engine
from worker.engine.model.load import Model
from worker.engine.upstream.mlx_lm import generation_stream
from worker.schedule.grouping import StepCost
from worker.schedule.memory import MAX_ROWS
from worker.schedule.outcomes import (
    Encoded,
    Prefilled,
    Refused,
    RowFailed,
    Sampled,
    Scored,
    SpecPrefillApplied,
    SpecPrefillSkipped,
)
from worker.schedule.report import StepReport
from worker.schedule.request import GenerationRequest, GrammarState, Lane, Range, Sampling, SpecPrefillParams


def answers(model: Model, sequences: Iterable[GenerationRequest], *, apart: int = 0) -> dict[str, list[Sampled]]:
    """What each sequence heard. They arrive so many steps apart."""
    engine, waiting, steps = Engine(model, step_s=0.02), list(sequences), 0
    heard: dict[str, list[Sampled]] = {sequence.id: [] for sequence in waiting}
    while waiting or len(engine):
        while waiting and steps >= apart * (len(heard) - len(waiting)):
            engine.add(waiting.pop(0))
        for outcome in engine.step().outcomes:
            assert not isinstance(outcome, RowFailed)
            if isinstance(outcome, Sampled):
                heard[outcome.id].append(outcome)
        steps += 1
    return heard


def answer(model: Model, sequence: GenerationRequest) -> list[Sampled]:
    return answers(model, [sequence])[sequence.id]


def tokens(heard: list[Sampled]) -> list[int]:
    return [sampled.token for sampled in heard if sampled.token is not None]


# Too short to leave less time for prompts.
ONE_GROUP, EACH_ALONE = StepCost(group_s=1e-6), StepCost(cell_s=1e-9)


class Fixed:
    """What a step costs, whatever was measured."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost

    def observe(self, groups: Sequences[Sequences[int]], seconds: float) -> None:
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
        rows: int = MAX_ROWS,
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
        grammar: GrammarState | None = None,
        top_logprobs: int | None = None,
        resume_tokens: Sequences[int] = (),
        space: str = "",
        boundaries: Sequences[int] = (),
        kept_ranges: tuple[Range, ...] | None = None,
        specprefill: SpecPrefillParams | None = None,
    ) -> None:
        self.submit(
            GenerationRequest(
                id,
                tokens,
                max_tokens,
                sampling or Sampling(),
                lane,
                tuple(resume_tokens),
                grammar,
                top_logprobs,
                space,
                tuple(boundaries),
                specprefill,
                kept_ranges,
            )
        )

    def submit(self, sequence: GenerationRequest) -> None:
        self.said[sequence.id], self.logprobs[sequence.id] = list(sequence.resume_tokens), []
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
                case RowFailed(id):
                    self.ended[id] = "faulted"
                case Refused(id, sentence):
                    self.ended[id], self.refused[id] = "refused", sentence
                case SpecPrefillApplied(id, kept):
                    self.kept[id] = kept
                case SpecPrefillSkipped(id, why):
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
        return list(self.engine._active)

    @property
    def waiting(self) -> list[str]:
        return list(self.engine._admission._waiting)

    @property
    def held_bytes(self) -> int:
        """Of those who wait with their caches."""
        return self.engine._admission._held_bytes()

    def park(self, id: str) -> None:
        """As if to make room. It comes back when `stir` says that there is some, or somebody ends."""
        with mx.stream(generation_stream):
            self.engine._preempt(id)

    def stir(self, *, keep: bool = True) -> None:
        """Room for the rows that wait; their caches are kept, or computed again."""
        for candidate in self.engine._admission._waiting.values():
            if not keep:
                candidate.drop_cache()
        self.engine._admission.mark_dirty()

    def group_by(self, cost: StepCost) -> None:
        """Rows are moved to suit it at the end of the next step."""
        self.engine._running._cost = Fixed(cost)
        self.engine._running._steps = -1  # groups are looked at now and then only, and now is then
