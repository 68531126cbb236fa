"""Which rows decode together. A batch's KV is a rectangle, so one long row makes every row beside it pay for its
length; a group of its own costs another pass over the weights instead."""

from collections.abc import Sequence
from dataclasses import dataclass

from worker.schedule.fitting import LeastSquares

_CELLS = 1e4  # cells are counted in these, so that all three unknowns are of one size
# Rows are parted, and moved, only for a step shorter than this share: moving costs a copy, and a measurement is noisy.
_LEAST_GAIN = 0.85
# A belief that groups, rows and cells cost nothing, in steps that would say so. For groups it is faint: while all steps
# look alike, it is the passes over the weights that cost, and rows are not parted before it was seen that length does.
_PRIOR = 1e-3, 10.0, 0.3


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one decode step: so much for each group, each row, and each token position of a rectangle."""

    group_s: float = 0.0
    row_s: float = 0.0
    cell_s: float = 0.0

    def of(self, rows: int, longest: int) -> float:
        return self.group_s + rows * (self.row_s + longest * self.cell_s) if rows else 0.0

    def step_s(self, groups: Sequence[Sequence[int]]) -> float:
        """Of groups of rows, each given by its length in tokens."""
        return sum(self.of(len(group), max(group, default=0)) for group in groups)


class MeasuredCost:
    """Learns a `StepCost` from the steps as they run."""

    def __init__(self) -> None:
        self._fit = LeastSquares(_PRIOR)

    def observe(self, groups: Sequence[Sequence[int]], seconds: float) -> None:
        rows, cells = sum(map(len, groups)), sum(len(group) * max(group, default=0) for group in groups)
        self._fit.observe((len(groups), rows, cells / _CELLS), seconds)

    def cost(self) -> StepCost:
        group_s, row_s, cells_s = self._fit.costs()
        return StepCost(group_s, row_s, cells_s / _CELLS)


def place(length: int, groups: Sequence[Sequence[int]], cost: StepCost) -> int:
    """The group that a new row makes least dearer; `len(groups)` is a new one, where that is worth it."""

    def dearer(group: Sequence[int]) -> float:
        longest = max(group, default=0)
        return cost.of(len(group) + 1, max(length, longest)) - cost.of(len(group), longest)

    best = min(range(len(groups)), key=lambda i: dearer(groups[i]), default=0)
    if not groups:
        return best
    before_s = cost.step_s(groups)
    alone_s, together_s = before_s + cost.of(1, length), before_s + dearer(groups[best])
    return len(groups) if alone_s < _LEAST_GAIN * together_s else best


def regroup(
    groups: Sequence[Sequence[int]], cost: StepCost, classes: Sequence[int] | None = None
) -> list[list[int]] | None:
    """Better groups, as indices into the flattened lengths; None where what there is does well enough. Rows of
    different `classes` are never put together."""
    lengths = [length for group in groups for length in group]
    best = list[list[int]]()
    classes = classes or [0] * len(lengths)
    for one in sorted({*classes}):
        theirs = [i for i, each in enumerate(classes) if each == one]
        best += [[theirs[i] for i in group] for group in partition([lengths[i] for i in theirs], cost)]
    better_s = cost.step_s([[lengths[i] for i in group] for group in best])
    return best if better_s < _LEAST_GAIN * cost.step_s(groups) else None


def partition(lengths: Sequence[int], cost: StepCost) -> list[list[int]]:
    """The cheapest groups of all, as indices. They are runs of the rows in order of length, since swapping two
    rows between groups that overlap never makes a rectangle wider."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    cheapest, begins = [0.0], list[int]()  # of the first n rows; where the last group of those begins
    hull = list[int]()  # beginnings that are, or may become, the best

    def total(begin: int, end: int) -> float:
        return cheapest[begin] + cost.of(end - begin, lengths[order[end - 1]])

    for end in range(1, len(order) + 1):
        # The longer its rows, the more a group saves by beginning later: what is better once stays better. And only
        # corners of the lower hull of `cheapest` are ever the best.
        while len(hull) > 1 and _bends_down(cheapest, hull[-2], hull[-1], end - 1):
            hull.pop()
        hull.append(end - 1)
        while len(hull) > 1 and total(hull[1], end) <= total(hull[0], end):
            del hull[0]
        begins.append(hull[0])
        cheapest.append(total(hull[0], end))
    groups, end = list[list[int]](), len(order)
    while end:
        groups.append(order[begins[end - 1] : end])
        end = begins[end - 1]
    return groups[::-1]


def _bends_down(heights: Sequence[float], a: int, b: int, c: int) -> bool:
    """Whether the line through a, b and c does so at b, or is straight there."""
    return (heights[b] - heights[a]) * (c - b) >= (heights[c] - heights[b]) * (b - a)
