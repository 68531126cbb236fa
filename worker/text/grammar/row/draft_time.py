"""Time of the engine's thread that drafts may take to be read: of one row, and of all rows together."""

import time
from collections.abc import Callable

# Seconds that drafts may take for each token of the answer. A mask of 150,000 tokens mostly takes less than a tenth of
# a millisecond.
_PER_TOKEN_S = 0.000_25
_AT_ONCE_S = 0.002  # that may be saved up
# Share of all time that drafts of all rows may take together, and the seconds of it that may be saved up: many rows may
# draft in the same step.
_SHARE = 0.25
_ALL_AT_ONCE_S = 0.01


class AllDraftsTime:
    """Time of the engine's thread that the drafts of all rows may take together: a share of the time that passes. For
    the engine's thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: seconds that have passed."""
        self._now = now
        self._taken_at = now()
        self._left_then_s = _ALL_AT_ONCE_S

    @property
    def left(self) -> bool:
        """True if there is time for a draft."""
        return self._left_s(self._now()) > 0

    def _left_s(self, now: float) -> float:
        return min(self._left_then_s + (now - self._taken_at) * _SHARE, _ALL_AT_ONCE_S)

    def take(self, seconds: float) -> None:
        """Record that a draft has taken so long."""
        now = self._now()
        self._left_then_s = self._left_s(now) - seconds
        self._taken_at = now


class DraftTime:
    """Time of the engine's thread that one row may take for drafts: an amount for each token of its answer, since the
    other rows of the batch wait for it. A context that measures some work. Work that takes longer is not interrupted;
    the row then takes no drafts until its answer has made up for it. So drafts of a schema that is slow to read hardly
    delay the others."""

    def __init__(self, clock: Callable[[], float], every: AllDraftsTime) -> None:
        """`clock`: seconds that the thread has computed. `every`: the time of all rows."""
        self._clock, self._all = clock, every
        self._left_s = _AT_ONCE_S
        self._tokens = 0
        self._began = 0.0

    @property
    def left(self) -> bool:
        """True if there is time for a draft."""
        return self._left_s > 0 and self._all.left

    def __enter__(self) -> None:
        self._began = self._clock()

    def __exit__(self, *raised: object) -> None:
        taken_s = self._clock() - self._began
        self._left_s -= taken_s
        self._all.take(taken_s)

    def advance(self, tokens: int) -> None:
        """Add the time for the tokens that the answer has gained. `tokens`: of the answer."""
        gained = max(0, tokens - self._tokens)
        self._tokens += gained
        self._left_s = min(self._left_s + gained * _PER_TOKEN_S, _AT_ONCE_S)
