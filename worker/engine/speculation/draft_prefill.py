"""How many tokens of a prompt a draft model computes in a step, by what its prefill has cost."""

from math import inf

from worker.engine.fitting import LeastSquares

MAX_PREFILL = 256  # tokens: memory is reserved for a chunk of as many
MIN_PREFILL = 16  # tokens: a chunk of fewer would be little more than its pass over the weights
_TRIAL_EVERY = 16  # calls without time for a chunk, after which the costs are measured anew
_PRIOR = 1e-3, 1e-3  # weak: two chunks of different length tell what a pass costs
_UNIT = 1e2  # tokens are counted in this unit
_GROWTH = 2  # times the longest chunk that was measured; the cost of a much longer one is not known
_PACE_WEIGHT = 0.3
_MAX_PACE = 2.0  # of one observation, so that a single slow chunk does not count much


class DraftPrefillBudget:
    """Chooses the chunks of a draft model's prefill, and learns what they cost: a pass over the weights, and each
    token."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._fit = LeastSquares(_PRIOR)
        self._pace = 1.0  # of the last chunks, relative to earlier ones: rows grow longer, and devices slow down
        self._longest = 0  # tokens of the longest chunk so far; 0: none was measured
        self._too_slow = 0  # calls of `next_chunk` in a row without time for a chunk

    def observe(self, tokens: int, seconds: float) -> None:
        """Record how long a chunk has taken."""
        pass_s, unit_s = self._fit.costs()
        expected_s = self._pace * (pass_s + tokens / _UNIT * unit_s)
        self._fit.observe((1.0, tokens / _UNIT), seconds / self._pace)
        if self._longest:
            self._pace *= 1 + _PACE_WEIGHT * (min(seconds / max(expected_s, 1e-9), _MAX_PACE) - 1)
        self._longest = max(self._longest, tokens)

    def next_chunk(self, seconds: float) -> int:
        """Return the tokens of the next chunk, which is expected to take at most `seconds`; 0 if there is no time for
        `MIN_PREFILL`.

        The 16th time in a row that there is none, it forgets the costs and returns `MIN_PREFILL` all the same: one slow
        chunk must not end all prefill."""
        if seconds <= 0:
            return 0
        tokens = self._expected_within(seconds)
        self._too_slow = 0 if tokens else self._too_slow + 1
        if self._too_slow < _TRIAL_EVERY:
            return tokens
        self._forget()
        return MIN_PREFILL

    def _expected_within(self, seconds: float) -> int:
        """Return the tokens of the longest chunk that is expected to take at most `seconds`; 0 for less than
        `MIN_PREFILL`."""
        if seconds == inf:
            return MAX_PREFILL
        most = max(MIN_PREFILL, min(MAX_PREFILL, _GROWTH * self._longest))
        if not self._longest:
            return most
        pass_s, unit_s = (self._pace * cost for cost in self._fit.costs())
        tokens = int(min(most, (seconds - pass_s) / max(unit_s / _UNIT, 1e-9)))
        return tokens if tokens >= MIN_PREFILL else 0
