"""Admission written as its rules say, a prediction for every row and every candidate: slow, and easy to check."""

from collections.abc import Sequence

from worker.engine.admission.decision import (
    Admit,
    Decision,
    Refuse,
    RowEstimate,
    Wait,
    fits,
)
from worker.engine.admission.tuning import MAX_OVERTAKES
from worker.engine.memory import MemoryModel


def plainly_in_turn(
    waiting: Sequence[RowEstimate], running: Sequence[RowEstimate], costs: MemoryModel, limit: int, max_rows: int
) -> list[tuple[RowEstimate, Decision]]:
    """Return what `admit_in_turn` returns. A refusal has no message."""
    rows, decided = list(running), list[tuple[RowEstimate, Decision]]()
    held_bytes = sum(row.held_bytes for row in waiting)
    for each in sorted(waiting, key=lambda row: row.lane == "batch"):
        candidate = shortened(each, costs, limit)
        decision = plainly(candidate, rows, costs, limit, held_bytes - candidate.held_bytes, max_rows)
        overtakes = [
            row.overtaken + _admitted(decided[at:]) for at, (row, each) in enumerate(decided) if isinstance(each, Wait)
        ]
        if isinstance(decision, Admit) and max(overtakes, default=0) >= MAX_OVERTAKES:
            decision = Wait()
        if isinstance(decision, Admit):
            staying = [row for row in rows if row.id not in decision.preempt]
            rows = sorted([*staying, candidate], key=lambda row: row.age)
            held_bytes -= candidate.held_bytes
        decided.append((candidate, decision))
    return [
        (row, Wait(row.overtaken + _admitted(decided[at:])) if isinstance(decision, Wait) else decision)
        for at, (row, decision) in enumerate(decided)
    ]


def shortened(row: RowEstimate, costs: MemoryModel, limit: int) -> RowEstimate:
    """Return a row without a stated limit with the longest answer that fits alone, if that is less than is likely."""
    if not row.grows or fits([row], costs, limit):
        return row
    longest = [tokens for tokens in range(1, row.likely + 1) if fits([row._replace(max_tokens=tokens)], costs, limit)]
    return row._replace(max_tokens=max([row.least, *longest]))


def plainly(
    candidate: RowEstimate,
    running: Sequence[RowEstimate],
    costs: MemoryModel,
    limit: int,
    held_bytes: int,
    max_rows: int,
) -> Decision:
    """Return what `Admission.decide` returns. A refusal has no message."""
    if not fits([candidate], costs, limit):
        if not candidate.preempted:
            return Refuse("")
        return Wait() if running or held_bytes else Admit()
    staying, parked = list(running), list[str]()
    while len(staying) >= max_rows or not fits([*staying, candidate], costs, limit - held_bytes):
        offline = [row for row in staying if row.lane == "batch" and candidate.lane == "interactive"]
        younger = [row for row in staying if row.age > candidate.age and row.grows and row.lane == candidate.lane]
        leaving = offline or (younger if candidate.grows and candidate.preempted else [])
        if not leaving:
            return Wait()
        staying.remove(leaving[-1])
        parked.append(leaving[-1].id)
    return Admit(tuple(parked))


def _admitted(decided: Sequence[tuple[RowEstimate, Decision]]) -> int:
    return sum(isinstance(decision, Admit) for _, decision in decided)
