"""The two rules by which drafts are verified: a width must pay by measured seconds, and a source may lose only part."""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from worker.engine.speculation.offer import Offer
from worker.engine.speculation.tuning import (
    CREDIT,
    DRAFT_COST,
    LEAST_GAIN,
    LOSS_SHARE,
    PLAIN_EVERY,
    PLAIN_WANTED,
    ROW_COST,
    SAMPLES,
    STALE,
    STALLED,
    TOKEN_COST,
    TRIAL_EVERY,
    TRIALS,
)


def lower_quartile(samples: Collection[float]) -> float:
    """Return a value that a quarter of the samples do not exceed. Other work on the machine makes some samples longer,
    and none shorter, so a low one says more than the median about the cost itself."""
    return sorted(samples)[len(samples) // 4]


class _Shape:
    """Measured seconds of the last forwards with as many rows and tokens per row."""

    def __init__(self) -> None:
        self._seconds = deque[float](maxlen=SAMPLES)
        self._plain_s = 0.0  # seconds of a plain step at their time
        self._observed_at = 0

    def observe(self, seconds: float, plain_s: float, at: int) -> None:
        """Record a forward. `at`: its number."""
        if self._seconds and self._is_old(at):
            self._seconds = deque([self._seconds[-1]], SAMPLES)
        self._seconds.append(seconds)
        self._plain_s, self._observed_at = plain_s, at

    def _is_old(self, at: int) -> bool:
        """Return True if plain steps were measured anew since the last forward."""
        return at - self._observed_at > PLAIN_EVERY

    def is_known(self, at: int) -> bool:
        """Return True if there are enough measurements, and recent ones."""
        return len(self._seconds) >= TRIALS and at - self._observed_at <= STALE

    @property
    def seconds(self) -> float:
        """Their lower quartile."""
        return lower_quartile(self._seconds)

    def plain_steps(self, plain_s: float, at: int, estimate: float | None = None) -> float:
        """Return the lower quartile in plain steps, which take `plain_s` seconds now. `estimate`: of a shape that is
        not known; the last measurement counts if it is lower."""
        then_s = self._plain_s if self._is_old(at) else plain_s
        if estimate is None:
            return self.seconds / max(then_s, 1e-9)
        return min(estimate, self._seconds[-1] / max(then_s, 1e-9))


class ForwardCosts:
    """Seconds of a forward by rows and width, which is the number of tokens per row, and of networks that draft for it,
    learned as they ran.

    Wider forwards are compared with the plain steps of their time, since rows grow longer and devices slow down; so
    plain steps must run now and then: see `is_plain_due`. The cost may rise by steps, as kernels change with the number
    of tokens. A shape that never ran is estimated by its neighbours, so one that may pay is tried a few times, and one
    that does not is left."""

    def __init__(self) -> None:
        self._plain = dict[int, _Shape]()  # by rows: plain steps
        self._shapes = dict[tuple[int, int], _Shape]()  # by rows and width: wider forwards
        self._forwards = 0
        self._tried_at = 0  # the last forward of a shape that was hardly known
        self._plain_s = dict[int, float]()  # by rows: a plain step
        self._counts = Counter[int]()  # of plain steps, by rows
        self._means = dict[int, float]()  # by rows: the mean seconds of plain steps without stalls
        self._drafts = dict[str, dict[tuple[int, int], deque[float]]]()  # plain steps, by network, rows and tokens
        self._steps = 0  # since plain steps were measured
        self._wanted = PLAIN_WANTED  # measurements, in the plain steps that are due

    def is_plain_due(self, groups: Iterable[int]) -> bool:
        """Advance by a step in which drafts might be verified, and return True if it should be a plain one, so that
        these are measured. One is timed if it follows two others, and no row joins meanwhile, so that is given up after
        twice as many as are wanted. Far fewer rows than were measured take less time, so drafts that lose would seem to
        gain: they are measured sooner. `groups`: rows of each group."""
        self._steps += 1
        if self._steps > PLAIN_EVERY + 2 * PLAIN_WANTED or self._wanted <= 0:
            self._steps, self._wanted = 0, PLAIN_WANTED
        far_fewer = min(groups, default=0) < 0.75 * min(self._plain, default=0)
        if far_fewer and PLAIN_EVERY // 3 < self._steps <= PLAIN_EVERY:
            self._steps = PLAIN_EVERY + 1
        return self._steps > PLAIN_EVERY

    def observe(self, rows: int, width: int, seconds: float) -> None:
        """Record the seconds of a step: with its host's work, and as far as it delayed the next. A wider one counts
        only after a plain one."""
        self._forwards += 1
        if width == 1:
            usual_s = self._observe_plain(rows, seconds)
            self._counts[rows] += 1
            # About 24 steps count: three in a hundred are plain while drafts are verified, and single ones vary by a
            # fifth.
            most_s = STALLED * usual_s
            mean_s = min(self._means.get(rows, seconds), most_s)
            self._means[rows] = mean_s + (min(seconds, most_s) - mean_s) / min(self._counts[rows], 24)
            if self._steps > PLAIN_EVERY:
                self._wanted -= 1
            else:
                self._steps = 0
            return
        if not self.measured:
            return
        if rows in self._plain and seconds < self._plain_s[rows]:  # then a plain one takes no longer either
            self._observe_plain(rows, seconds)
        shape = self._shapes.setdefault((rows, width), _Shape())
        if not shape.is_known(self._forwards):
            self._tried_at = self._forwards
        shape.observe(seconds, self.seconds(rows, 1), self._forwards)

    def _observe_plain(self, rows: int, seconds: float) -> float:
        """Record a plain step, and return what they usually take."""
        shape = self._plain.setdefault(rows, _Shape())
        shape.observe(seconds, seconds, self._forwards)
        self._plain_s[rows] = shape.seconds
        return shape.seconds

    def observe_draft(self, network: str, rows: int, tokens: int, seconds: float) -> None:
        """Record how long a network has drafted so many tokens for each row. Counts only after a plain step."""
        if self.measured:
            samples = self._drafts.setdefault(network, {}).setdefault((rows, tokens), deque(maxlen=SAMPLES))
            samples.append(seconds / max(self.seconds(rows, 1), 1e-9))

    def draft_s(self, network: str, rows: int, tokens: int) -> float:
        """Return the expected seconds of a network's draft; 0 before any forward was measured."""
        if not self.measured:
            return 0.0
        known = {shape: each for shape, each in self._drafts.get(network, {}).items() if len(each) >= TRIALS}
        if not known:
            return DRAFT_COST * tokens * self.seconds(rows, 1)
        nearest = min(known, key=lambda shape: (abs(shape[0] - rows), abs(shape[1] - tokens)))
        return lower_quartile(known[nearest]) * tokens / nearest[1] * self.seconds(rows, 1)

    @property
    def measured(self) -> bool:
        """True if a plain step was measured, so that others can be estimated."""
        return bool(self._plain)

    def mean_plain_s(self, rows: int) -> float:
        """Return the mean seconds of plain steps without stalls: more than `seconds`, and steadier, which sums of many
        steps are compared with. Only once one was measured."""
        return _seconds_of(rows, self._means)

    def seconds(self, rows: int, width: int, network: str | None = None) -> float:
        """Return the expected seconds of a forward, once a plain one was measured, and of the network that drafts for
        it, if any."""
        draft_s = self.draft_s(network, rows, width - 1) if network and width > 1 else 0.0
        return _seconds_of(rows, self._plain_s) * self._plain_steps(rows, width) + draft_s

    def hopeful_seconds(self, rows: int, width: int, network: str | None = None) -> float:
        """Return `seconds`, but now and then, for a shape that is hardly known, the lowest that is possible: those of
        the widest known forward that is narrower. Otherwise no width after a sudden rise would ever be tried."""
        expected = self.seconds(rows, width, network)
        if self._forwards - self._tried_at < TRIAL_EVERY or self._is_known(rows, width):
            return expected
        narrower = max((each for each in range(1, width) if self._is_known(rows, each)), default=None)
        return expected if narrower is None else min(expected, self.seconds(rows, narrower, network))

    def _is_known(self, rows: int, width: int) -> bool:
        if width == 1:
            return rows in self._plain
        shape = self._shapes.get((rows, width))
        return shape is not None and shape.is_known(self._forwards)

    def _plain_steps(self, rows: int, width: int) -> float:
        """Return the cost of a forward in plain steps."""
        if width == 1:
            return 1.0
        if self._is_known(rows, width):
            return self._measured_steps(rows, width)
        estimate = 1 + self._excess(rows, width)
        return self._measured_steps(rows, width, estimate) if (rows, width) in self._shapes else estimate

    def _measured_steps(self, rows: int, width: int, estimate: float | None = None) -> float:
        return self._shapes[rows, width].plain_steps(self.seconds(rows, 1), self._forwards, estimate)

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


def _seconds_of(rows: int, measured: Mapping[int, float]) -> float:
    """Return the seconds of a plain step of this number of rows. If none was measured: on the line between those of
    fewer and of more rows; the usual part of those of more rows; or the same as those of fewer. `measured`: by rows."""
    if rows in measured:
        return measured[rows]
    fewer = max((each for each in measured if each < rows), default=None)
    more = min((each for each in measured if each > rows), default=None)
    if more is None:
        return measured[_nearest(measured, rows)]
    if fewer is None:
        return measured[more] * max(rows / more, 1 - ROW_COST * (more - rows))
    low_s, high_s = measured[fewer], measured[more]
    return low_s + (high_s - low_s) * (rows - fewer) / (more - fewer)


def _nearest(numbers: Iterable[int], number: int) -> int:
    return min(numbers, key=lambda each: abs(each - number))


def _usual_excess(rows: int, width: int) -> float:
    return (TOKEN_COST + ROW_COST * rows) * (width - 1)


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


def choose_width(
    offers: Sequence[Offer | None],
    costs: ForwardCosts,
    cap: int,
    budget_s: float | None = None,
    network: str | None = None,
) -> int:
    """Return the tokens per row, 1 to `cap`, of a group's next forward: the most expected tokens per second.

    `offers`: of each row. `budget_s`: most seconds of the forward and of the network that drafts for it, if any; a
    plain step may always run."""
    rows = len(offers)
    widest = min(cap, 1 + max((len(offer.tokens) for offer in offers if offer), default=0))
    if widest <= 1 or not costs.measured:
        return 1
    if sum(expected_tokens(offer, widest) for offer in offers) <= LEAST_GAIN * rows:
        return 1  # even if a wider forward cost no more
    best, best_rate = 1, LEAST_GAIN * rows / costs.seconds(rows, 1)
    for width in range(2, widest + 1):
        rate = sum(expected_tokens(offer, width) for offer in offers) / costs.hopeful_seconds(rows, width, network)
        if rate > best_rate and (budget_s is None or costs.seconds(rows, width, network) <= budget_s):
            best, best_rate = width, rate
    return best


# What drafts may lose: the second of the two rules.

_ASKS = "asks"  # what looking for drafts in vain is charged to


class DraftBudget:
    """Keeps account of what drafts lose and gain, as measured, whatever was expected of them.

    Each source of drafts has a balance, and so has looking for drafts that no forward verifies. What that takes, and
    what a step with drafts takes longer, is subtracted; the time of the plain steps that drafts save is added. Who has
    nothing left pauses, until its part of `LOSS_SHARE` has filled its balance again. So all decoding takes at most 1 +
    `LOSS_SHARE` times the time of plain steps, and for each source `CREDIT` plain steps and one step with drafts more.

    Balances are in plain steps of as many rows as decode, so there is as much left when rows join or leave."""

    def __init__(self) -> None:
        self._left = dict[object, float]({_ASKS: 0.0})  # by source: plain steps that it may still lose
        self._step_s = 0.0  # of the last plain step; 0: none was measured, and no draft is verified before

    @property
    def may_ask(self) -> bool:
        """True if drafts may be looked for in this step."""
        return self._step_s > 0 and self.allows(_ASKS)

    def allows(self, source: object) -> bool:
        """Return True if the source may take time."""
        return self._left.get(source, 0.0) >= 0

    def is_full(self, source: object) -> bool:
        """Return True if the source may lose all of its credit."""
        return self._left.get(source, CREDIT) >= CREDIT

    def pass_time(self, step_s: float, steps: float = 1.0) -> None:
        """Record that `steps` plain steps of `step_s` seconds have run, or that drafts have made the tokens of as
        many."""
        self._step_s = step_s
        short = [source for source in self._left if not self.is_full(source)]
        for source in short:
            self.charge(source, -LOSS_SHARE * steps * step_s / len(short))

    def charge_asks(self, seconds: float) -> None:
        """Subtract seconds for which drafts were looked for, if no forward has verified any."""
        self.charge(_ASKS, seconds)

    def charge(self, source: object, seconds: float) -> None:
        """Subtract seconds that a source took and that plain decoding does not take; fewer than 0 were gained."""
        if self._step_s:
            self._left[source] = min(CREDIT, self._left.get(source, CREDIT) - seconds / self._step_s)

    def charge_verified(
        self,
        rows: int,
        seconds: float,
        step_s: float,
        drafts: Sequence[tuple[object, int, int]],
        network: tuple[object, float] | None = None,
    ) -> None:
        """Record a step that has verified drafts of `rows` rows. `seconds`: all that it took. `step_s`: seconds of a
        plain step of these rows. `drafts`: source, tokens and right tokens of each. `network`: that has drafted for
        them, and its seconds. It bears these, and each source a part of what the forward takes longer, by its
        tokens."""
        self.pass_time(step_s, 1 + sum(right for *_, right in drafts) / rows)
        lost_s = defaultdict[object, float](float)
        if network:
            lost_s[network[0]] += network[1]
        wider_s = seconds - step_s - (network[1] if network else 0.0)
        proposed = sum(tokens for _, tokens, _ in drafts)
        for source, tokens, right in drafts:
            lost_s[source] += wider_s * tokens / proposed - step_s * right / rows
        for source, lost in lost_s.items():
            self.charge(source, lost)
        self.charge_asks(min(0.0, sum(lost_s.values())))  # gains pay for looking for more
