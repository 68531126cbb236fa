"""Chooses how many tokens of each row a forward computes, by what forwards have cost."""

from collections import deque
from collections.abc import Sequence
from statistics import median_low
from typing import Protocol

from worker.schedule.speculation.offer import Offer

_SAMPLES = 9  # of the last forwards of a shape, of which the median counts
_TRIALS = 2  # forwards of a shape until they are believed: the first one may compile kernels
_STALE = 1_000  # forwards after which a shape's costs are measured anew when it would pay by its neighbours' costs
_LEAST_GAIN = 1.03  # a verify forward cannot be launched before the last one's tokens are read
_TRIAL_EVERY = 16  # forwards from one trial of a shape that is hardly known to the next
_SLOWDOWN_WEIGHT = 0.3
_MAX_SLOWDOWN = 2.0  # of one observation, so that a single slow step does not count much
# Cost of a token more per row, in plain steps, before any measurement: from a dense model on a CPU.
_TOKEN_COST = 0.05
_ROW_TOKEN_COST = 0.03


class Costs(Protocol):
    """Expected seconds of forwards by rows and width, the tokens per row."""

    @property
    def measured(self) -> bool:
        """True if any forward was measured, so that others can be estimated."""

    def seconds(self, rows: int, width: int) -> float:
        """Return the expected seconds of a forward, once any was measured."""

    def hopeful_seconds(self, rows: int, width: int) -> float:
        """Return `seconds`, but now and then less, for a shape that is hardly known and should be tried."""


class _Shape:
    """Measured seconds of the forwards with as many rows and tokens per row, relative to the slowdown at their time."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=_SAMPLES)
        self.observed_at = 0

    def observe(self, seconds: float, at: int) -> None:
        if at - self.observed_at > _STALE:
            while len(self._seconds) > 1:
                self._seconds.popleft()
        self._seconds.append(seconds)
        self.observed_at = at

    def is_known(self, at: int) -> bool:
        """Return True if there are enough measurements, and recent ones."""
        return len(self._seconds) >= _TRIALS and at - self.observed_at <= _STALE

    def seconds(self, estimate: float | None = None) -> float:
        """Return the median. `estimate`: of a shape that is not known; the last measurement counts if it is lower."""
        if estimate is None:
            return median_low(self._seconds)
        return min(estimate, self._seconds[-1])


class ForwardCosts:
    """Seconds of a forward by rows and width, which is the number of tokens per row, learned from forwards as they ran.

    The cost may rise by steps, as kernels change with the number of tokens. A shape that never ran is estimated by its
    neighbours, so one that may pay is tried a few times, and one that does not is left."""

    def __init__(self) -> None:
        self._shapes = dict[tuple[int, int], _Shape]()
        self._slowdown = 1.0  # of all forwards, relative to their first: rows grow longer, and devices slow down
        self._forwards = 0
        self._tried_at = 0  # the last forward of a shape that was hardly known

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Record the seconds of a step: with its host's work, and as far as it delayed the next."""
        self._forwards += 1
        shape = self._shapes.setdefault((rows, width), _Shape())
        if not shape.is_known(self._forwards):
            self._tried_at = self._forwards
        else:
            ratio = seconds / max(self._slowdown * shape.seconds(), 1e-9)
            self._slowdown *= 1 + _SLOWDOWN_WEIGHT * (min(ratio, _MAX_SLOWDOWN) - 1)
        shape.observe(seconds / self._slowdown, self._forwards)

    @property
    def measured(self) -> bool:
        """True if any forward was measured, so that others can be estimated."""
        return bool(self._shapes)

    def seconds(self, rows: int, width: int) -> float:
        """Return the expected seconds of a forward, once any was measured."""
        return self._slowdown * self._relative(rows, width)

    def hopeful_seconds(self, rows: int, width: int) -> float:
        """Return `seconds`, but now and then, for a shape that is hardly known, the lowest that is possible: those of
        the widest known forward that is narrower. Otherwise no width after a sudden rise would ever be tried."""
        expected = self.seconds(rows, width)
        if self._forwards - self._tried_at < _TRIAL_EVERY or self._is_known(rows, width):
            return expected
        narrower = max((each for each in range(1, width) if self._is_known(rows, each)), default=None)
        return expected if narrower is None else min(expected, self._slowdown * self._relative(rows, narrower))

    def _is_known(self, rows: int, width: int) -> bool:
        shape = self._shapes.get((rows, width))
        return shape is not None and shape.is_known(self._forwards)

    def _relative(self, rows: int, width: int) -> float:
        shape = self._shapes.get((rows, width))
        if shape and shape.is_known(self._forwards):
            return shape.seconds()
        estimate = self._estimate(rows, width)
        return shape.seconds(estimate) if shape else estimate

    def _estimate(self, rows: int, width: int) -> float:
        """Return the cost by that of other shapes."""
        if width == 1:
            return self._plain(rows)
        return self._plain(rows) * (1 + self._excess(rows, width))

    def _plain(self, rows: int) -> float:
        """Return the cost of a plain step, by the nearest number of rows that has run one."""
        if (rows, 1) in self._shapes:
            return self._shapes[rows, 1].seconds()
        measured = [number for number, width in self._shapes if width == 1]
        if not measured:
            (number, width), shape = min(self._shapes.items(), key=lambda item: abs(item[0][0] - rows))
            return shape.seconds() / (1 + _usual_excess(number, width))
        nearest = min(measured, key=lambda number: abs(number - rows))
        return self._shapes[nearest, 1].seconds()

    def _excess(self, rows: int, width: int) -> float:
        """Return the cost of a width beyond a plain step's, as a share of it: between those of the next narrower and
        wider ones that have run, or in proportion to the nearest."""
        known = {each: self._known_excess(rows, each) for number, each in self._shapes if number == rows and each > 1}
        known.pop(width, None)
        if not known:
            return self._excess_of_other_rows(rows, width)
        narrower = max((each for each in known if each < width), default=1)
        wider = min((each for each in known if each > width), default=None)
        low = known.get(narrower, 0.0)
        if wider is None:
            return low * (width - 1) / (narrower - 1)
        return low + (known[wider] - low) * (width - narrower) / (wider - narrower)

    def _known_excess(self, rows: int, width: int) -> float:
        return max(0.0, self._shapes[rows, width].seconds() / self._plain(rows) - 1)

    def _excess_of_other_rows(self, rows: int, width: int) -> float:
        """Return the excess by the nearest number of rows that has run the width: in proportion to the rows."""
        others = {number for number, each in self._shapes if each == width and (number, 1) in self._shapes} - {rows}
        if not others:
            return _usual_excess(rows, width)
        nearest = min(others, key=lambda number: abs(number - rows))
        return self._known_excess(nearest, width) * rows / nearest


def _usual_excess(rows: int, width: int) -> float:
    return (_TOKEN_COST + _ROW_TOKEN_COST * rows) * (width - 1)


def expected_tokens(offer: Offer | None, width: int) -> float:
    """Return the tokens that a row is expected to draw in a forward of this width: one, and those of its draft."""
    expected = reached = 1.0
    for rate in offer.acceptance[: width - 1] if offer else ():
        reached *= rate
        expected += reached
    return expected


def likeliest(offers: Sequence[Offer | None]) -> Offer | None:
    """Return the offer of which the most tokens are expected; None if there is none. The first wins a tie."""
    return max(filter(None, offers), key=lambda offer: expected_tokens(offer, 1 + len(offer.tokens)), default=None)


def choose_width(offers: Sequence[Offer | None], costs: Costs, cap: int, budget_s: float | None = None) -> int:
    """Return the tokens per row, 1 to `cap`, of a group's next forward: the most expected tokens per second.

    `offers`: of each row. `budget_s`: most seconds of the forward; a plain step may always run."""
    rows = len(offers)
    widest = min(cap, 1 + max((len(offer.tokens) for offer in offers if offer), default=0))
    if widest <= 1 or not costs.measured:
        return 1
    if sum(expected_tokens(offer, widest) for offer in offers) <= _LEAST_GAIN * rows:
        return 1  # even if a wider forward cost no more
    best, best_rate = 1, _LEAST_GAIN * rows / costs.seconds(rows, 1)
    for width in range(2, widest + 1):
        rate = sum(expected_tokens(offer, width) for offer in offers) / costs.hopeful_seconds(rows, width)
        if rate > best_rate and (budget_s is None or costs.seconds(rows, width) <= budget_s):
            best, best_rate = width, rate
    return best
