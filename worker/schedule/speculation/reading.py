"""How many tokens a draft model reads in a step, by what reading has cost."""

from math import inf

from worker.schedule.fitting import LeastSquares

MOST_READ = 256  # tokens: memory is reserved for a chunk of as many
LEAST_READ = 16  # tokens: a chunk of fewer would be little more than its pass over the weights
_TRIAL_EVERY = 16  # asks without time for a chunk, after which the costs are measured anew
_PRIOR = 1e-3, 1e-3  # weak: two chunks of different length tell what a pass costs
_UNIT = 1e2  # tokens are counted in this unit
_GROWTH = 2  # times the longest chunk that was measured; the cost of a much longer one is not known
_PACE_WEIGHT = 0.3
_MOST_PACE = 2.0  # of one observation, so that a single slow chunk does not count much


class ReadingCosts:
    """Seconds that a draft model takes to read a chunk of a row's tokens: a pass over its weights, and each token."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._fit = LeastSquares(_PRIOR)
        self._pace = 1.0  # of the last chunks, relative to earlier ones: rows grow longer, and devices slow down
        self._longest = 0  # tokens of the longest chunk so far; 0: none was measured
        self._too_slow = 0  # asks in a row without time for a chunk

    def observe(self, tokens: int, seconds: float) -> None:
        """Record how long a chunk has taken."""
        pass_s, unit_s = self._fit.costs()
        expected_s = self._pace * (pass_s + tokens / _UNIT * unit_s)
        self._fit.observe((1.0, tokens / _UNIT), seconds / self._pace)
        if self._longest:
            self._pace *= 1 + _PACE_WEIGHT * (min(seconds / max(expected_s, 1e-9), _MOST_PACE) - 1)
        self._longest = max(self._longest, tokens)

    def tokens_within(self, seconds: float) -> int:
        """Return the tokens of a chunk that is expected to take at most this long; 0 if there is no time for
        `LEAST_READ`. Now and then these are tried all the same, unless there is no time at all: one slow chunk must not
        end all reading."""
        if seconds == inf:
            return MOST_READ
        if seconds <= 0:
            return 0
        most = max(LEAST_READ, min(MOST_READ, _GROWTH * self._longest))
        if not self._longest:
            return most
        pass_s, unit_s = (self._pace * cost for cost in self._fit.costs())
        tokens = int(min(most, (seconds - pass_s) / max(unit_s / _UNIT, 1e-9)))
        if tokens >= LEAST_READ:
            self._too_slow = 0
            return tokens
        self._too_slow += 1
        if self._too_slow < _TRIAL_EVERY:
            return 0
        self._forget()
        return LEAST_READ
