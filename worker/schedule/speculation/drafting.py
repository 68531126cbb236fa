"""What it costs that a network drafts for all rows of a group."""

from collections import deque
from dataclasses import dataclass

from worker.schedule.speculation.width import Costs, lower_quartile

_SAMPLES = 9  # of the last drafts of a shape
_UNMEASURED = 0.2  # plain steps for each token of a draft: a head is a layer of a few dozen, and an output head
_TRIALS = 2  # drafts of a shape until they are believed: the first one may compile kernels

_Shape = tuple[int, int]  # rows, and tokens of a draft


class DraftingCosts:
    """Time that a network takes to draft, by rows and depth, the number of tokens of a draft. In plain steps of as many
    rows, since rows grow longer and devices slow down."""

    def __init__(self) -> None:
        self._samples = dict[_Shape, deque[float]]()
        self._known = dict[_Shape, float]()  # the lower quartiles

    def observe(self, rows: int, depth: int, plain_steps: float) -> None:
        """Record how long a draft for these rows has taken."""
        samples = self._samples.setdefault((rows, depth), deque(maxlen=_SAMPLES))
        samples.append(plain_steps)
        if len(samples) >= _TRIALS:
            self._known[rows, depth] = lower_quartile(samples)

    def plain_steps(self, rows: int, depth: int) -> float:
        """Return the expected time of a draft."""
        exact = self._known.get((rows, depth))
        if exact is not None:
            return exact
        if not self._known:
            return _UNMEASURED * depth
        nearest = min(self._known, key=lambda shape: _distance(shape, (rows, depth)))
        return self._known[nearest] * depth / nearest[1]


def _distance(shape: _Shape, other: _Shape) -> tuple[int, int]:
    return abs(shape[0] - other[0]), abs(shape[1] - other[1])


@dataclass(frozen=True, slots=True)
class DraftedCosts:
    """Costs of forwards together with the drafts that they verify."""

    forwards: Costs
    drafting: DraftingCosts

    @property
    def measured(self) -> bool:
        """See `Costs`."""
        return self.forwards.measured

    def seconds(self, rows: int, width: int) -> float:
        """See `Costs`."""
        return self.forwards.seconds(rows, width) + self._drafting_s(rows, width)

    def hopeful_seconds(self, rows: int, width: int) -> float:
        """See `Costs`."""
        return self.forwards.hopeful_seconds(rows, width) + self._drafting_s(rows, width)

    def _drafting_s(self, rows: int, width: int) -> float:
        if width <= 1:
            return 0.0
        return self.drafting.plain_steps(rows, width - 1) * self.forwards.seconds(rows, 1)
