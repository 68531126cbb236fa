"""Drives an engine to its end."""

from collections.abc import Iterable

from worker.engine.engine import Engine
from worker.engine.model import Model
from worker.schedule.sequence import Faulted, Sampled, Sequence


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
