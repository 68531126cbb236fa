"""Runs the same requests without drafts and with them, in turn."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from models.random_checkpoints import hybrid_checkpoint, non_word_tokens, random_checkpoint
from scripts.benchmarks.speculation.figures import Case, Clocks, Meter, Pair, Result, Run
from scripts.benchmarks.speculation.proposers import PROPOSERS
from scripts.benchmarks.speculation.tasks import TASKS, Requests
from worker.engine.engine import Engine
from worker.engine.model.load import Model
from worker.engine.options import EngineOptions
from worker.engine.speculation.speculator import Speculator
from worker.request import GenerationRequest

STEP_S = 0.1


def cases(
    tasks: Sequence[str], rows: Sequence[int], proposers: Sequence[str], present: Collection[str]
) -> Iterator[Case]:
    """Yield the cases in which the proposers can have an effect. `present`: what the model has of a head and a
    drafter."""
    for task in tasks:
        for number in rows:
            for proposer in proposers:
                if proposer in TASKS[task].proposers and PROPOSERS[proposer].needs in (None, *present):
                    yield Case(task, number, proposer)


def engine_of(model: Model, rows: int, speculator: Speculator | None = None) -> Engine:
    """Return an engine without a prefix cache, whose prompts all are computed."""
    return Engine(model, EngineOptions(STEP_S, rows=rows, prefix_bytes=0), speculator=speculator)


def run(engine: Engine, requests: Sequence[GenerationRequest], rows: int) -> Run:
    """Answer the requests, `rows` at a time: the next ones begin when these have ended. Raises `NotAnswered`."""
    meter = Meter()
    for start in range(0, len(requests), rows):
        for request in requests[start : start + rows]:
            engine.add(request)
        while len(engine):
            began = Clocks.now()
            outcomes = engine.step().outcomes
            meter.observe(outcomes, began, Clocks.now())
    return meter.run()


def answers(model: Model, requests: Sequence[GenerationRequest]) -> list[tuple[int, ...]]:
    """Return the answers without drafts. Raises `NotAnswered`."""
    measured = run(engine_of(model, len(requests)), requests, len(requests))
    return [measured.answers.get(request.id, ()) for request in requests]


class Comparison:
    """Two engines of one model, without drafts and with them, for the runs of one case."""

    def __init__(self, model: Model, requests: Requests, case: Case) -> None:
        self._case, self._requests = case, requests
        self._drafts = PROPOSERS[case.proposer]
        self._plain = engine_of(model, case.rows)
        drafting = self._drafts.model(model)
        self._drafting = engine_of(drafting, case.rows, self._drafts.speculator(drafting))

    def measure(self, runs: int, advance: Callable[[], None]) -> Result:
        """Measure pairs after one that warms up, and call `advance` after each. Raises `TokensDiffer` and
        `NotAnswered`."""
        pairs = list[Pair]()
        for number in range(runs + 1):
            pairs.append(self._pair(number))
            pairs[-1].check(self._case)
            advance()
        return Result(self._case, tuple(pairs[1:]))

    def _pair(self, number: int) -> Pair:
        """Run both engines, in the other order every other time."""
        if number % 2:
            on = self._run(self._drafting, number)
            return Pair(self._run(self._plain, number), on)
        return Pair(self._run(self._plain, number), self._run(self._drafting, number))

    def _run(self, engine: Engine, number: int) -> Run:
        case = self._case
        made = self._requests.make(case.task, number, case.answers, predicted=self._drafts.predicted)
        with self._drafts.chosen():
            return run(engine, made, case.rows)


RANDOM: dict[str, Callable[..., Path]] = {
    "plain": partial(random_checkpoint, hidden=768, layers=8),
    "hybrid": partial(hybrid_checkpoint, hidden=768, layers=8),
}


@contextmanager
def random_model(kind: str) -> Iterator[Path]:
    """Write a checkpoint of a kind of `RANDOM`, and yield its folder, which exists while the context is open. Its
    likeliest tokens are whole words, so that its answers can be edited word by word, and never an end."""
    with TemporaryDirectory() as folder:
        yield RANDOM[kind](Path(folder) / f"random-{kind}", never_sampled=non_word_tokens("Ġ[A-Za-z]+"))
