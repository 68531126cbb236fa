"""Rows that take drafts while others join and leave, are preempted, cancelled, or lose their caches."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache

import pytest

from tests.engine.driver import Run
from tests.engine.machine import grammars
from tests.engine.machine.families import Family
from tests.engine.speculation.oracle import Oracle, speculator_of
from tests.engine.tiny import EVERY_FAMILY, model, prompt
from worker.engine.model.load import Model
from worker.request import GrammarState, Sampling

Drive = Callable[[Run], None]  # submits requests, and runs the engine until all have ended
Answers = Mapping[str, Sequence[int]]  # by request

ANSWER = 26
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.8, seed=11),
    Sampling(repetition_penalty=1.3, frequency_penalty=0.4),
    Sampling(temperature=1.0, top_k=20, top_p=0.9, seed=7, presence_penalty=0.5),
    Sampling(temperature=1.3, min_p=0.02, seed=3, logit_bias=((17, 2.0), (40, -5.0))),
]
LENGTHS = (5, 17, 2, 30, 45)  # of prompts in tokens, around the tiny models' window of 16


def every_family(*by_default: str, but: Collection[str] = ()) -> list[object]:
    """Return all families as parameters, of which those that are not named run with `--all` alone. `but`: left out."""
    slow, families = pytest.mark.slow, [name for name in EVERY_FAMILY if name not in but]
    return [name if name in by_default else pytest.param(name, marks=slow) for name in families]


def submit(run: Run, index: int, *, guided: bool = False, said: Sequence[int] = ()) -> None:
    """Submit a request of its own kind for each index. `guided`: with a grammar. `said`: the answer so far."""
    run.add(
        str(index),
        prompt(LENGTHS[index % 5], index),
        max_tokens=ANSWER - index,
        sampling=SAMPLINGS[index % len(SAMPLINGS)],
        grammar=grammar(index) if guided else None,
        top_logprobs=2 if index % 2 else None,
        resume_tokens=said,
    )


def grammar(index: int) -> GrammarState | None:
    # All families have the same vocabulary.
    return grammars.make(Family("qwen3"), grammars.Picky() if index % 3 else grammars.Json())


def joined(run: Run, *, guided: bool = False) -> None:
    """Some rows join late."""
    for index in range(3):
        submit(run, index, guided=guided)
    for _ in range(4):
        run.step()
    for index in range(3, 7):
        submit(run, index, guided=guided)
    run.drain()


def guided(run: Run) -> None:
    """Rows with a grammar, of which some join late."""
    joined(run, guided=True)


def sparse(run: Run) -> None:
    """Rows from whose prompts tokens were dropped, beside whole ones, of which some join late."""
    run.add("whole", prompt(40, 1), max_tokens=ANSWER)
    run.add("middle", prompt(40, 2), max_tokens=ANSWER, kept_ranges=((0, 10), (20, 40)), top_logprobs=2)
    for _ in range(3):
        run.step()
    run.add("start", prompt(50, 3), max_tokens=ANSWER, kept_ranges=((8, 14), (30, 50)), sampling=SAMPLINGS[1])
    run.add("short", prompt(9, 4), max_tokens=ANSWER, sampling=SAMPLINGS[3])
    run.drain()


def penalized(run: Run) -> None:
    """Rows whose penalties forbid to repeat the last tokens."""
    for index in range(6):
        sampling = Sampling(temperature=index % 2, seed=index, repetition_penalty=3.0, frequency_penalty=5.0)
        run.add(str(index), prompt(LENGTHS[index % 5], index), max_tokens=40, sampling=sampling)
    run.drain()


def eventful(run: Run, *, rows: int = 6) -> None:
    """Rows are preempted and restored, with their caches and without; all lose their caches; one is cancelled."""
    for index in range(rows):
        submit(run, index)
    run.until(lambda: all(len(answer) > 2 or id in run.ended for id, answer in run.generated.items()))
    for id in sorted({"1", "3"} & {*run.active}):
        run.preempt(id)
    for _ in range(2):
        run.step()
    run.readmit()
    run.step()
    if "2" in run.active:
        run.preempt("2")
        run.readmit(keep_caches=False)
    run.engine.remove("4")
    run.generated.pop("4")
    run.ended.pop("4", None)  # drafts may have ended it
    run.step()
    run.engine._lose_decoding()
    for _ in range(3):
        run.step()
    submit(run, 6)
    run.drain()


def resumed(answers: Answers, *, guided: bool = False) -> Drive:
    """Return a run of rows that continue after a part of their answers, as after a crash."""

    def resume(run: Run) -> None:
        for index in range(6):
            submit(run, index, guided=guided, said=answers[str(index)][: 3 + index])
        run.drain()

    return resume


def plain(served: Model, drive: Drive) -> Run:
    """Return a run without drafts."""
    run = Run(served, prefix_bytes=10**8)
    drive(run)
    return run


def drafted(served: Model, answers: Answers, drive: Drive) -> tuple[Run, Oracle]:
    """Return a run with drafts, and the oracle of these. `answers`: those that the oracle knows."""
    oracle = Oracle(answers)
    run = Run(served, prefix_bytes=10**8, speculator=speculator_of(served, oracle))
    drive(run)
    return run, oracle


def pair(served: Model, drive: Drive) -> tuple[Run, Run, Oracle]:
    """Return a run without drafts, one with drafts, and the oracle of these."""
    without = plain(served, drive)
    return without, *drafted(served, without.generated, drive)


@cache
def plain_of(family: str, drive: Drive) -> Run:
    """Return a run without drafts that has ended. Tests share it, so none continues it."""
    return plain(model(family), drive)


def pair_of(family: str, drive: Drive) -> tuple[Run, Run, Oracle]:
    """Return the shared run without drafts, one with drafts, and the oracle of these."""
    without = plain_of(family, drive)
    return without, *drafted(model(family), without.generated, drive)


def assert_equal(without: Run, run: Run, oracle: Oracle) -> None:
    """Assert that drafts, of which some were right, have changed nothing."""
    assert run.generated == without.generated
    assert run.ended == without.ended
    for id in run.logprobs.keys() & without.logprobs.keys():
        assert run.logprobs[id] == pytest.approx(without.logprobs[id], abs=1e-4)
    assert oracle.accepted > 0
    assert oracle.held == set()
