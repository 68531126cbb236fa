"""Choose how many tokens of drafts a forward verifies, by the measured seconds of forwards and of drafting."""

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from worker.engine.speculation.offer import Offer

_SAMPLES = 9  # of the last forwards of a shape
_TRIALS = 2  # forwards of a shape until they are believed: the first one may compile kernels
_OUTDATED = 64  # forwards after which seconds are compared with those of plain steps at their time, not of now
_STALE = 500  # forwards after which a shape's costs are measured anew when it would pay by its neighbours' costs
_LEAST_GAIN = 1.03  # a verify forward cannot be launched before the last one's tokens are read
_TRIAL_EVERY = 16  # forwards from one trial of a shape that is hardly known to the next
_MEAN_OF = 24  # plain steps: three in a hundred are while drafts are verified, and single ones vary by a fifth
_STALLED = 3.0  # times its usual seconds, from which a step was stalled by other work of the machine
# Cost of a token more per row, in plain steps, before any measurement: from a dense model on a CPU.
_TOKEN_COST = 0.05
_ROW_TOKEN_COST = 0.03
_ROW_COST = 0.03  # of a row, in plain steps of a few more rows, likewise
_NEAR = 0.75  # share of a number of rows down to which its plain steps tell what those of fewer rows take


def lower_quartile(samples: Collection[float]) -> float:
    """Return a value that a quarter of the samples do not exceed. Other work on the machine makes some samples longer,
    and none shorter, so a low one says more than the median about the cost itself."""
    return sorted(samples)[len(samples) // 4]


def without_stall(seconds: float, usual_s: float) -> float:
    """Return the seconds that a step counts as which usually takes `usual_s`: at most so many times these. A machine
    stalls any step, with drafts or without, so what is more says nothing about drafts."""
    return min(seconds, _STALLED * usual_s)


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
    """Measured seconds of the last forwards with as many rows and tokens per row."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=_SAMPLES)
        self._plain_s = 0.0  # seconds of a plain step at their time
        self._observed_at = 0

    def observe(self, seconds: float, plain_s: float, at: int) -> None:
        """Record a forward. `at`: its number."""
        age = at - self._observed_at
        if age > _OUTDATED:
            self._keep_last(1 if age > _STALE else _TRIALS)
        self._seconds.append(seconds)
        self._plain_s, self._observed_at = plain_s, at

    def _keep_last(self, number: int) -> None:
        while len(self._seconds) > number:
            self._seconds.popleft()

    def is_known(self, at: int) -> bool:
        """Return True if there are enough measurements, and recent ones."""
        return len(self._seconds) >= _TRIALS and at - self._observed_at <= _STALE

    @property
    def seconds(self) -> float:
        """Their lower quartile."""
        return lower_quartile(self._seconds)

    def plain_steps(self, plain_s: float, at: int, estimate: float | None = None) -> float:
        """Return the lower quartile in plain steps, which take `plain_s` seconds now. `estimate`: of a shape that is
        not known; the last measurement counts if it is lower."""
        then_s = self._plain_s if at - self._observed_at > _OUTDATED else plain_s
        if estimate is None:
            return self.seconds / max(then_s, 1e-9)
        return min(estimate, self._seconds[-1] / max(then_s, 1e-9))


class _Mean:
    """Mean seconds of the last plain steps of as many rows, without stalls."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=_MEAN_OF)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Record a plain step."""
        self._seconds.append(seconds)
        ordered = sorted(self._seconds)
        most_s = _STALLED * ordered[len(ordered) // 4]
        stalled = len(ordered) - bisect_right(ordered, most_s)
        usual_s = sum(ordered[: len(ordered) - stalled])  # summed at once: this runs in every plain step
        self.seconds = (usual_s + stalled * most_s) / len(ordered)


class ForwardCosts:
    """Seconds of a forward by rows and width, which is the number of tokens per row, learned from forwards as they ran.

    Wider forwards are compared with the plain steps of their time, since rows grow longer and devices slow down; so
    plain steps must run now and then, see `Baseline`. The cost may rise by steps, as kernels change with the number of
    tokens. A shape that never ran is estimated by its neighbours, so one that may pay is tried a few times, and one
    that does not is left."""

    def __init__(self) -> None:
        self._plain = dict[int, _Shape]()  # by rows: plain steps
        self._shapes = dict[tuple[int, int], _Shape]()  # by rows and width: wider forwards
        self._forwards = 0
        self._tried_at = 0  # the last forward of a shape that was hardly known
        self._means = dict[int, _Mean]()  # by rows, of plain steps

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Record the seconds of a step: with its host's work, and as far as it delayed the next. A wider one counts
        only after a plain one."""
        self._forwards += 1
        if width == 1:
            self._plain.setdefault(rows, _Shape()).observe(seconds, seconds, self._forwards)
            self._means.setdefault(rows, _Mean()).observe(seconds)
            return
        if not self.measured:
            return
        if rows in self._plain and seconds < self._plain_s(rows):  # then a plain one takes no longer either
            self._plain[rows].observe(seconds, seconds, self._forwards)
        shape = self._shapes.setdefault((rows, width), _Shape())
        if not shape.is_known(self._forwards):
            self._tried_at = self._forwards
        shape.observe(seconds, self._plain_s(rows), self._forwards)

    @property
    def measured(self) -> bool:
        """True if a plain step was measured, so that others can be estimated."""
        return bool(self._plain)

    def mean_plain_s(self, rows: int) -> float:
        """Return the mean seconds of plain steps without stalls: more than `seconds`, and steadier, which sums of many
        steps are compared with. Only once one was measured."""
        return _seconds_of(rows, self._means)

    def knows_plain(self, rows: int) -> bool:
        """Return True unless plain steps of this number of rows must be measured before anything is compared with them:
        those of many more rows take longer. Also True before any was measured."""
        return not self._plain or rows >= _NEAR * min(self._plain)

    def seconds(self, rows: int, width: int) -> float:
        """Return the expected seconds of a forward, once a plain one was measured."""
        return self._plain_s(rows) * self._plain_steps(rows, width)

    def hopeful_seconds(self, rows: int, width: int) -> float:
        """Return `seconds`, but now and then, for a shape that is hardly known, the lowest that is possible: those of
        the widest known forward that is narrower. Otherwise no width after a sudden rise would ever be tried."""
        expected = self.seconds(rows, width)
        if self._forwards - self._tried_at < _TRIAL_EVERY or self._is_known(rows, width):
            return expected
        narrower = max((each for each in range(1, width) if self._is_known(rows, each)), default=None)
        return expected if narrower is None else min(expected, self.seconds(rows, narrower))

    def _is_known(self, rows: int, width: int) -> bool:
        if width == 1:
            return rows in self._plain
        shape = self._shapes.get((rows, width))
        return shape is not None and shape.is_known(self._forwards)

    def _plain_s(self, rows: int) -> float:
        """Return the seconds of a plain step."""
        return _seconds_of(rows, self._plain)

    def _plain_steps(self, rows: int, width: int) -> float:
        """Return the cost of a forward in plain steps."""
        if width == 1:
            return 1.0
        if self._is_known(rows, width):
            return self._measured_steps(rows, width)
        estimate = 1 + self._excess(rows, width)
        return self._measured_steps(rows, width, estimate) if (rows, width) in self._shapes else estimate

    def _measured_steps(self, rows: int, width: int, estimate: float | None = None) -> float:
        return self._shapes[rows, width].plain_steps(self._plain_s(rows), self._forwards, estimate)

    def _excess(self, rows: int, width: int) -> float:
        """Return the cost of a width beyond a plain step's, as a share of it: between those of the next narrower and
        wider ones that have run, or in proportion to the nearest."""
        known = {each: self._known_excess(rows, each) for number, each in self._shapes if number == rows}
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
        return max(0.0, self._measured_steps(rows, width) - 1)

    def _excess_of_other_rows(self, rows: int, width: int) -> float:
        """Return the excess by the nearest number of rows that has run the width: in proportion to the rows."""
        others = {number for number, each in self._shapes if each == width} - {rows}
        if not others:
            return _usual_excess(rows, width)
        nearest = _nearest(others, rows)
        return self._known_excess(nearest, width) * rows / nearest


class _Timed(Protocol):
    """Measured plain steps of some number of rows."""

    @property
    def seconds(self) -> float:
        """What one of them takes."""


def _seconds_of(rows: int, measured: Mapping[int, _Timed]) -> float:
    """Return the seconds of a plain step of this number of rows. If none was measured: on the line between those of
    fewer and of more rows; the usual part of those of more rows; or the same as those of fewer. `measured`: by rows."""
    if rows in measured:
        return measured[rows].seconds
    fewer = max((each for each in measured if each < rows), default=None)
    more = min((each for each in measured if each > rows), default=None)
    if more is None:
        return measured[_nearest(measured, rows)].seconds
    if fewer is None:
        return measured[more].seconds * max(rows / more, 1 - _ROW_COST * (more - rows))
    low_s, high_s = measured[fewer].seconds, measured[more].seconds
    return low_s + (high_s - low_s) * (rows - fewer) / (more - fewer)


def _nearest(numbers: Iterable[int], number: int) -> int:
    return min(numbers, key=lambda each: abs(each - number))


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


_UNMEASURED = 0.2  # plain steps for each token of a draft: a head is a layer of a few dozen, and an output head

_DraftShape = tuple[int, int]  # rows, and tokens of a draft


class DraftingCosts:
    """Time that a network takes to draft, by rows and depth, the number of tokens of a draft. In plain steps of as many
    rows, since rows grow longer and devices slow down."""

    def __init__(self) -> None:
        self._samples = dict[_DraftShape, deque[float]]()
        self._known = dict[_DraftShape, float]()  # the lower quartiles

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


def _distance(shape: _DraftShape, other: _DraftShape) -> tuple[int, int]:
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
