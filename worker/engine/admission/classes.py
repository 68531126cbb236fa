"""Length classes: rows that decode in separate groups if memory is short. Every row of a group takes as much memory as
its longest row, so groups of similar length take less, at the cost of a pass over the weights for each group."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from worker.engine.admission.decision import Admit, Decision, RowEstimate, Wait
from worker.engine.admission.grouping import StepCost, partition, placing
from worker.engine.admission.tuning import LEAST_GAIN

# The greatest length of each class but the last, in tokens, ascending. If empty, rows are grouped for speed alone.
Bounds = tuple[int, ...]


def class_of(length: int, bounds: Bounds) -> int:
    """Return the number of the class for a row of this length at its end, in tokens. Bounds are inclusive."""
    return bisect_left(bounds, length)


@dataclass(frozen=True, slots=True)
class Decoding:
    """State of the decoding groups, as admission needs it."""

    cost: StepCost
    lengths: Sequence[Sequence[int]] = ()  # current lengths of the rows in tokens, by group
    ends: Sequence[Sequence[int]] = ()  # lengths of the rows at their end, prompt and answer together, by group
    buffers: Sequence[int] = ()  # bytes of each group's buffers

    def groups_by_length(self, bounds: Bounds) -> Callable[[int], int]:
        """Return a function from a row's length at its end, in tokens, to the number of the group that it will decode
        in. A number beyond the existing groups stands for a new group."""
        if not bounds:
            return cache(placing(self.lengths, self.cost))
        numbers = range(len(bounds) + 1)
        groups = [next(self.of_class(number, bounds), len(self.lengths) + number) for number in numbers]
        return lambda length: groups[class_of(length, bounds)]

    def of_class(self, number: int, bounds: Bounds) -> Iterator[int]:
        """Yield the numbers of the groups of a class. The class of a group is that of its longest row."""
        return (i for i, ends in enumerate(self.ends) if class_of(max(ends, default=0), bounds) == number)


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of admission with these bounds, without applying it."""

    bounds: Bounds
    lengths: Sequence[int]  # lengths at their end, in tokens, of all rows that would be active
    waiting: Sequence[RowEstimate] = ()  # rows that would keep waiting

    def rate(self, cost: StepCost) -> float:
        """Return the tokens per second if all active rows decode; 0 if no cost is known."""
        step_s = cost.step_s(by_class(self.lengths, self.bounds))
        return len(self.lengths) / step_s if step_s else 0.0


def candidate_bounds(lengths: Iterable[int]) -> list[Bounds]:
    """Return bounds that divide rows of these lengths by memory, each with more classes than the one before."""
    ordered, most_classes = sorted(lengths), 4
    spread = sum(ordered[-1] - length for length in ordered) if ordered else 0
    found, cell_s = list[Bounds](), 1.0
    while len(found) < most_classes - 1 and cell_s < spread:
        cell_s *= 2
        bounds = bounds_of(ordered, StepCost(group_s=1.0, cell_s=cell_s / spread))
        if len(bounds) >= most_classes:
            break
        if len(bounds) > len(found[-1] if found else ()):
            found.append(bounds)
    return found


def bounds_of(ordered: Sequence[int], cost: StepCost) -> Bounds:
    """Return the bounds of the cheapest groups of rows of these lengths, ascending."""
    return tuple(dict.fromkeys(ordered[run[-1]] for run in partition(ordered, cost)[:-1]))


def by_class(lengths: Iterable[int], bounds: Bounds) -> list[list[int]]:
    """Return the lengths by class; a class without rows is empty."""
    classes: list[list[int]] = [[] for _ in range(len(bounds) + 1)]
    for length in lengths:
        classes[class_of(length, bounds)].append(length)
    return classes


def choose_bounds(
    bounds_now: Bounds,
    lengths: Sequence[int],
    cost: StepCost,
    try_bounds: Callable[[Bounds], Trial | None],
    most_rows: Callable[[int], int],
) -> Bounds:
    """Return the bounds with the most tokens per second; among similar ones, those with the fewest classes.
    `bounds_now`: the current bounds. `lengths`: lengths at their end, in tokens, of all active and waiting rows.
    `try_bounds` returns None if the active rows do not fit. `most_rows`: number of rows of a length that fit into
    memory without others."""
    current = try_bounds(bounds_now)
    if cost.group_s + cost.row_s + cost.cell_s == 0 or (current and not bounds_now and not current.waiting):
        return bounds_now
    fastest = bounds_of(sorted(lengths), cost)
    others = [bounds for bounds in dict.fromkeys([(), *candidate_bounds(lengths), fastest]) if bounds != bounds_now]
    chosen = current
    for trial in filter(None, map(try_bounds, others)):
        least = LEAST_GAIN * chosen.rate(cost) if chosen else 0.0
        if trial.bounds:
            # With lengths of 100 and 2,000 tokens and passes that cost as much as 100 rows, classes reached 0.72 of the
            # rate in turns, and ran 0.87 times as fast as no classes.
            least = max(least, 0.8 * rate_in_turns(lengths, trial.bounds, cost, most_rows))
        if chosen is None or trial.rate(cost) > least:
            chosen = trial
    return chosen.bounds if chosen else bounds_now


def rate_in_turns(lengths: Iterable[int], bounds: Bounds, cost: StepCost, most_rows: Callable[[int], int]) -> float:
    """Return the tokens per second if one class decoded after the other, each with all the memory. Without classes, a
    worker tends to this rate: rows that leave a group make room for others of their length."""
    seconds, rows = 0.0, 0
    for each in filter(None, by_class(lengths, bounds)):
        rows_at_once = max(1, min(len(each), most_rows(max(each))))
        seconds += len(each) * cost.rows_s(rows_at_once, max(each)) / rows_at_once
        rows += len(each)
    return rows / seconds if seconds else 0.0


def still_waiting(decided: Iterable[tuple[RowEstimate, Decision]]) -> list[RowEstimate]:
    """Return the rows that keep waiting."""
    return [row for row, decision in decided if isinstance(decision, Wait)]


def rows_after(active: Iterable[RowEstimate], decided: Sequence[tuple[RowEstimate, Decision]]) -> list[RowEstimate]:
    """Return the active rows after the decisions are applied."""
    preempted = {id for _, decision in decided if isinstance(decision, Admit) for id in decision.preempt}
    admitted = (row for row, decision in decided if isinstance(decision, Admit))
    return [*(row for row in active if row.id not in preempted), *admitted]
