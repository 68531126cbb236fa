"""Run an engine step by step, and collect its outcomes."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from sluice.contract.keys import Lane
from worker.engine.admission.grouping import MeasuredCost, StepCost
from worker.engine.engine import Engine
from worker.engine.memory import MAX_ROWS
from worker.engine.model.load import Model
from worker.engine.options import EngineOptions
from worker.engine.prefix.disk import DiskPrefixes
from worker.engine.speculation.speculator import Speculator
from worker.engine.upstream.mlx_lm import generation_stream
from worker.outcomes import (
    CutShort,
    Outcome,
    Prefilled,
    PromptProgress,
    Refused,
    RowFailed,
    Sampled,
    SpecPrefillApplied,
    SpecPrefillSkipped,
    StepReport,
)
from worker.request import GenerationRequest, GrammarState, Range, Sampling, SpecPrefillParams


def answers(model: Model, requests: Iterable[GenerationRequest], *, steps_apart: int = 0) -> dict[str, list[Sampled]]:
    """Return the sampled outcomes of each request. The requests are added `steps_apart` steps apart."""
    engine, waiting, steps = Engine(model, EngineOptions(0.02, pipelined=True)), list(requests), 0
    outcomes: dict[str, list[Sampled]] = {request.id: [] for request in waiting}
    while waiting or len(engine):
        while waiting and steps >= steps_apart * (len(outcomes) - len(waiting)):
            engine.add(waiting.pop(0))
        for outcome in engine.step().outcomes:
            assert not isinstance(outcome, RowFailed)
            if isinstance(outcome, Sampled):
                outcomes[outcome.id].append(outcome)
        steps += 1
    return outcomes


def answer(model: Model, request: GenerationRequest) -> list[Sampled]:
    return answers(model, [request])[request.id]


def tokens(outcomes: list[Sampled]) -> list[int]:
    return [sampled.token for sampled in outcomes if sampled.token is not None]


# Too short to leave less time for prompts.
ONE_GROUP, EACH_ALONE = StepCost(group_s=1e-6), StepCost(cell_s=1e-9)


class FixedCost(MeasuredCost):
    """A cost that does not depend on measurements."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self._cost = cost

    def observe(self, groups: Sequence[Sequence[int]], seconds: float) -> None:
        pass

    def cost(self) -> StepCost:
        return self._cost


class Run:
    """An engine, with the tokens and the ending of each request."""

    def __init__(
        self,
        model: Model,
        *,
        step_s: float = 0.02,
        rows: int = MAX_ROWS,
        memory: int | None = None,
        prefix_bytes: int = 0,
        speculator: Speculator | None = None,
        pipelined: bool = True,  # as on a GPU
        open_disk: Callable[[Model], DiskPrefixes] | None = None,
    ) -> None:
        self.engine = Engine(
            model,
            EngineOptions(step_s, rows=rows, memory=memory, prefix_bytes=prefix_bytes, pipelined=pipelined),
            speculator=speculator,
            open_disk=open_disk,
        )
        self.kept_ranges: dict[str, tuple[Range, ...]] = {}  # by request, if SpecPrefill was applied
        self.skipped: dict[str, str] = {}  # by request, the reason why SpecPrefill was skipped
        self.scored = Counter[str]()  # chunks
        self.cached: dict[str, int] = {}  # tokens of each prompt taken from the prefix cache
        self.generated: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.encoded = Counter[str]()  # progress reports of each request's images
        self.chunks = Counter[str]()  # number of each prompt's chunks
        self.ended: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.cut: list[str] = []  # requests whose answers memory has ended
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
        resume_tokens: Sequence[int] = (),
        namespace: str = "",
        boundaries: Sequence[int] = (),
        kept_ranges: tuple[Range, ...] | None = None,
        specprefill: SpecPrefillParams | None = None,
        grows: bool = False,
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
                namespace,
                tuple(boundaries),
                specprefill,
                kept_ranges,
                grows=grows,
            )
        )

    def submit(self, request: GenerationRequest) -> None:
        self.generated[request.id], self.logprobs[request.id] = list(request.resume_tokens), []
        self.engine.add(request)

    def step(self) -> StepReport:
        self.steps += 1
        report = self.engine.step()
        for outcome in report.outcomes:
            self.receive(outcome)
        return report

    def receive(self, outcome: Outcome) -> None:
        assert outcome.id not in self.ended, "an outcome after the end of a request"
        match outcome:
            case Sampled(id, token, finish_reason, logprobs):
                self.generated[id] += [] if token is None else [token]
                self.logprobs[id] += [logprobs.token] if logprobs else []
                if finish_reason:
                    self.ended[id] = finish_reason
            case RowFailed(id):
                self.ended[id] = "faulted"
            case CutShort(id):
                self.cut.append(id)
            case Refused(id, message):
                self.ended[id], self.refused[id] = "refused", message
            case SpecPrefillApplied(id, kept_ranges):
                self.kept_ranges[id] = kept_ranges
            case SpecPrefillSkipped(id, reason):
                self.skipped[id] = reason
            case PromptProgress("scoring", id):
                self.scored[id] += 1
            case PromptProgress("encoding", id):
                self.encoded[id] += 1
            case Prefilled(id, cached=cached):
                self.chunks[id] += 1
                self.cached[id] = cached

    def drain(self, *, max_steps: int = 5000) -> dict[str, list[int]]:
        self.until(lambda: not len(self.engine), max_steps=max_steps)
        return self.generated

    def until(self, done: Callable[[], bool], *, max_steps: int = 1000) -> None:
        steps, end = 0, time.monotonic() + 10  # idle steps are fast, and a busy machine reads files slowly
        while not done():
            assert steps < max_steps or time.monotonic() < end, f"{steps} steps: {self.generated}, {self.ended}"
            self.step()
            steps += 1

    @property
    def active(self) -> list[str]:
        """Rows that prefill or decode, the oldest first."""
        return [*self.engine._active]

    @property
    def waiting(self) -> list[str]:
        return list(self.engine._admission._waiting)

    @property
    def held_bytes(self) -> int:
        """Bytes of the saved caches of preempted rows."""
        return self.engine._admission._held_bytes()

    def preempt(self, id: str) -> None:
        """Preempt a row without need. It is readmitted after `readmit`, or when another row ends. If the token that it
        has drawn is its last, it ends instead."""
        with mx.stream(generation_stream):
            for outcome in self.engine._preempt(id):
                self.receive(outcome)

    def spill(self) -> None:
        """Give up the saved caches of all preempted rows, as if memory were short."""
        with mx.stream(generation_stream):
            for candidate in self.engine._admission._waiting.values():
                self.engine._prefills.spill_rows(candidate.drop_cache())

    def readmit(self, *, keep_caches: bool = True) -> None:
        """Have waiting rows admitted in the next step, with their saved caches or without."""
        for candidate in self.engine._admission._waiting.values():
            if not keep_caches:
                candidate.drop_cache()
        self.engine._admission.mark_dirty()

    def group_by(self, cost: StepCost) -> None:
        """Have the rows regrouped by this cost at the end of the next step."""
        self.engine._running._cost = FixedCost(cost)
        self.engine._running._steps = -1  # makes the next step one of those that check the groups
