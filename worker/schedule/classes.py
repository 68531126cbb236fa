"""Which rows decode apart when memory is short. Every row of a group takes as much as its longest, so classes of like
length take less, at the price of a pass over the weights for each."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from worker.schedule.admission import Admit, Decision, RowEstimate, Wait
from worker.schedule.grouping import StepCost, partition, place

# The longest rows of all classes but the last, ascending. No bounds: rows are grouped for speed alone.
Bounds = tuple[int, ...]

_MOST_CLASSES = 4
# Other classes are taken only for so many times the tokens per second, since rows that decode are not moved at once.
_LEAST_GAIN = 1.15
# And only for so much of what one class after the other would make. With lengths of 100 and 2,000 tokens and passes
# that cost as much as 100 rows, classes made 0.72 of that and ran 0.87 times as fast as no classes.
_LEAST_OF_TURNS = 0.8


def class_of(length: int, bounds: Bounds) -> int:
    return bisect_left(bounds, length)


@dataclass(frozen=True, slots=True)
class Decoding:
    """The groups that decode now."""

    cost: StepCost
    lengths: Sequence[Sequence[int]] = ()  # of their rows, in tokens
    ends: Sequence[Sequence[int]] = ()  # their lengths at the end, prompt and answer together
    buffers: Sequence[int] = ()  # bytes that they take now

    def group_of(self, length: int, bounds: Bounds) -> int:
        """Return the number of the group that a row of this length at its end will decode in; those that are yet to be
        opened count on."""
        if not bounds:
            return place(length, self.lengths, self.cost)
        number = class_of(length, bounds)
        return next(self.of_class(number, bounds), len(self.lengths) + number)

    def of_class(self, number: int, bounds: Bounds) -> Iterator[int]:
        """Yield the groups of that class, the one of its longest row."""
        return (i for i, ends in enumerate(self.ends) if class_of(max(ends, default=0), bounds) == number)


@dataclass(frozen=True, slots=True)
class Trial:
    """What would become of the rows with these bounds."""

    bounds: Bounds
    inside: Sequence[int]  # lengths at the end of all rows that would be inside
    left: Sequence[RowEstimate] = ()  # that would wait

    def rate(self, cost: StepCost) -> float:
        """Return the tokens per second when all of them decode."""
        step_s = cost.step_s(apart(self.inside, self.bounds))
        return len(self.inside) / step_s if step_s else 0.0


def choices(lengths: Iterable[int]) -> list[Bounds]:
    """Return ways to part rows of these lengths by memory, each with more classes than the one before."""
    ordered = sorted(lengths)
    spread = sum(ordered[-1] - length for length in ordered) if ordered else 0
    found, cell_s = list[Bounds](), 1.0
    while len(found) < _MOST_CLASSES - 1 and cell_s < spread:
        cell_s *= 2
        bounds = bounds_of(ordered, StepCost(group_s=1.0, cell_s=cell_s / spread))
        if len(bounds) >= _MOST_CLASSES:
            break
        if len(bounds) > len(found[-1] if found else ()):
            found.append(bounds)
    return found


def bounds_of(ordered: Sequence[int], cost: StepCost) -> Bounds:
    """Return the bounds of the cheapest groups of rows of these lengths, ascending."""
    return tuple(dict.fromkeys(ordered[run[-1]] for run in partition(ordered, cost)[:-1]))


def apart(lengths: Iterable[int], bounds: Bounds) -> list[list[int]]:
    """Return the lengths by class; a class without rows is empty."""
    classes: list[list[int]] = [[] for _ in range(len(bounds) + 1)]
    for length in lengths:
        classes[class_of(length, bounds)].append(length)
    return classes


def best(
    now: Bounds,
    lengths: Sequence[int],
    cost: StepCost,
    attempt: Callable[[Bounds], Trial | None],
    most_rows: Callable[[int], int],
) -> Bounds:
    """Return the bounds with which rows make the most tokens per second; of like ones, the fewest classes. `now`: those
    in force; `lengths`: of all rows inside and waiting, at their end; `attempt` returns None where the rows inside do
    not fit; `most_rows` of a length are in memory at once, if there are no others."""
    there = attempt(now)
    if cost.group_s + cost.row_s + cost.cell_s == 0 or (there and not now and not there.left):
        return now
    fastest = bounds_of(sorted(lengths), cost)
    others = [bounds for bounds in dict.fromkeys([(), *choices(lengths), fastest]) if bounds != now]
    chosen = there
    for trial in filter(None, map(attempt, others)):
        least = _LEAST_GAIN * chosen.rate(cost) if chosen else 0.0
        if trial.bounds:
            least = max(least, _LEAST_OF_TURNS * rate_in_turns(lengths, trial.bounds, cost, most_rows))
        if chosen is None or trial.rate(cost) > least:
            chosen = trial
    return chosen.bounds if chosen else now


def rate_in_turns(lengths: Iterable[int], bounds: Bounds, cost: StepCost, most_rows: Callable[[int], int]) -> float:
    """Return the tokens per second if one class decoded after the other, each with all the memory. That is what comes
    of no classes in the long run: the rows of a group that leave make room for others of their length."""
    seconds, rows = 0.0, 0
    for each in filter(None, apart(lengths, bounds)):
        together = max(1, min(len(each), most_rows(max(each))))
        seconds += len(each) * cost.of(together, max(each)) / together
        rows += len(each)
    return rows / seconds if seconds else 0.0


def left(decided: Iterable[tuple[RowEstimate, Decision]]) -> list[RowEstimate]:
    return [row for row, decision in decided if isinstance(decision, Wait)]


def inside(running: Iterable[RowEstimate], decided: Sequence[tuple[RowEstimate, Decision]]) -> list[RowEstimate]:
    """Return the rows that are inside once this is done."""
    parked = {id for _, decision in decided if isinstance(decision, Admit) for id in decision.preempt}
    coming = (row for row, decision in decided if isinstance(decision, Admit))
    return [*(row for row in running if row.id not in parked), *coming]
