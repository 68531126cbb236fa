"""Groups of rows that decode together. A batch's KV cache is a rectangle, so a long row makes every row of its group
pay for its length; a separate group costs another pass over the weights instead."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.engine.admission.tuning import LEAST_GAIN
from worker.engine.fitting import LeastSquares
from worker.engine.step.tuning import PACE_WEIGHT

_CELLS = 1e4  # cells are counted in this unit, so that all three unknowns have similar magnitude


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decode step: for each group, each row, and each cell (token position) of a group's rectangle."""

    group_s: float = 0.0
    row_s: float = 0.0
    cell_s: float = 0.0

    def rows_s(self, rows: int, longest: int) -> float:
        """Return the seconds of a group of `rows`, of which the longest has `longest` tokens; 0 without rows."""
        return self.group_s + rows * (self.row_s + longest * self.cell_s) if rows else 0.0

    def step_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the seconds of a step of these groups, given by their rows' lengths in tokens."""
        return sum(self.rows_s(len(group), max(group, default=0)) for group in groups)


class MeasuredCost:
    """Estimates a `StepCost` from measured steps."""

    def __init__(self) -> None:
        # Priors that groups, rows and cells cost nothing, in measurements. Weak for groups: while all steps are alike,
        # their cost is assigned to the passes over the weights, so rows are not divided before length is measured to
        # cost. test_grouping.
        self._fit = LeastSquares((1e-3, 10.0, 0.3))
        # Seconds of the latest steps, relative to those by their groups: it follows changes of the device quickly.
        self._pace = 1.0
        self.most_rows = 0  # of a step that was measured

    def observe(self, groups: Sequence[Sequence[int]], seconds: float) -> None:
        """Record the measured seconds of a step without drafts of these groups, given by their rows' lengths in
        tokens."""
        rows = sum(map(len, groups))
        self.most_rows = max(self.most_rows, rows)
        cells = sum(len(group) * max(group, default=0) for group in groups)
        self._fit.observe((len(groups), rows, cells / _CELLS), seconds)
        if usual_s := self.cost().step_s(groups):
            pace = seconds / usual_s
            # A fast step after slow ones ends their expectation. test_grouping.
            self._pace = min(self._pace + PACE_WEIGHT * (pace - self._pace), 1.25 * pace)

    def expected_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Return the expected seconds of the next step, if it is of these groups and verifies no drafts. 0 before any
        measurement."""
        return self._pace * self.cost().step_s(groups)

    def added_s(self, groups: Sequence[Sequence[int]], length: int) -> float:
        """Return the expected seconds that a step of these groups takes longer with another row of `length` tokens."""
        joined = [*map(list, groups), []]
        joined[place(length, groups, self.cost())].append(length)
        return self.expected_s([group for group in joined if group]) - self.expected_s(groups)

    def divided(self, groups: Sequence[Sequence[int]], seconds: float) -> list[tuple[int, float]]:
        """Return the rows of each of these groups, and the part of a step's seconds that it is expected to have
        taken."""
        cost = self.cost()
        expected = [cost.rows_s(len(group), max(group, default=0)) for group in groups]
        whole_s = sum(expected)
        shares = [each / whole_s for each in expected] if whole_s else [1 / len(groups)] * len(groups)
        return [(len(group), share * seconds) for group, share in zip(groups, shares, strict=True)]

    def cost(self) -> StepCost:
        """Return the current estimate."""
        group_s, row_s, cells_s = self._fit.costs()
        return StepCost(group_s, row_s, cells_s / _CELLS)


def place(length: int, groups: Sequence[Sequence[int]], cost: StepCost) -> int:
    """Return the index of the group that a new row slows down the least, or `len(groups)` for a new group if that is
    worth another pass over the weights; 0 if there are no groups. `length` and `groups` are in tokens."""
    return placing(groups, cost)(length)


def placing(groups: Sequence[Sequence[int]], cost: StepCost) -> Callable[[int], int]:
    """Return `place` for these groups as a function of a row's length, for many rows."""
    shapes = [(len(group), max(group, default=0)) for group in groups]
    now_s = [cost.rows_s(rows, longest) for rows, longest in shapes]
    before_s = sum(now_s)

    def at(length: int) -> int:
        if not shapes:
            return 0
        added_s = [
            cost.rows_s(rows + 1, max(length, longest)) - each_s
            for (rows, longest), each_s in zip(shapes, now_s, strict=True)
        ]
        least_s = min(added_s)
        alone_s, together_s = before_s + cost.rows_s(1, length), before_s + least_s
        return len(shapes) if LEAST_GAIN * alone_s < together_s else added_s.index(least_s)

    return at


def regroup(
    groups: Sequence[Sequence[int]], cost: StepCost, classes: Sequence[int] | None = None
) -> list[list[int]] | None:
    """Return faster groups as indices into the flattened lengths, or None if the gain is too small. Rows of different
    `classes` (one number per row, in the flattened order) are never grouped together."""
    lengths = [length for group in groups for length in group]
    chosen = list[list[int]]()
    classes = classes or [0] * len(lengths)
    for number in sorted({*classes}):
        members = [i for i, each in enumerate(classes) if each == number]
        chosen += [[members[i] for i in group] for group in partition([lengths[i] for i in members], cost)]
    better_s = cost.step_s([[lengths[i] for i in group] for group in chosen])
    return chosen if LEAST_GAIN * better_s < cost.step_s(groups) else None


def partition(lengths: Sequence[int], cost: StepCost) -> list[list[int]]:
    """Return the cheapest of all groupings, as indices into `lengths`. Its groups are contiguous in order of length,
    since swapping two rows between groups that overlap never makes a rectangle wider."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    cheapest, begins = [0.0], list[int]()  # seconds of the first n rows; index at which their last group begins
    hull, first = list[int](), 0  # beginnings that are the best, or may become so, from the index `first` on
    group_s = cost.group_s
    row_s = cost.row_s
    cell_s = cost.cell_s
    for end, index in enumerate(order, 1):
        # The longer its rows, the more a group saves by beginning later, so a beginning that is better once stays
        # better. Only corners of the lower hull of `cheapest` are ever the best.
        while len(hull) > first + 1:
            a, b = hull[-2], hull[-1]
            if (cheapest[b] - cheapest[a]) * (end - 1 - b) < (cheapest[end - 1] - cheapest[b]) * (b - a):
                break  # the line through a, b and the new beginning bends up at b
            hull.pop()
        hull.append(end - 1)
        each_s = row_s + lengths[index] * cell_s
        best_s = cheapest[hull[first]] + (group_s + (end - hull[first]) * each_s)
        while len(hull) > first + 1:
            later_s = cheapest[hull[first + 1]] + (group_s + (end - hull[first + 1]) * each_s)
            if later_s > best_s:
                break
            first, best_s = first + 1, later_s
        begins.append(hull[first])
        cheapest.append(best_s)
    groups, end = list[list[int]](), len(order)
    while end:
        groups.append(order[begins[end - 1] : end])
        end = begins[end - 1]
    return groups[::-1]
