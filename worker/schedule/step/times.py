"""Times of decode steps by their rows, by which workers compare their speed."""

from math import inf

# Rows by powers of two, so that steps are compared with steps of about as many rows: 1, 2 to 3, ..., 128 and more.
CLASSES = 8
_WEIGHT = 0.05  # of the newest step: an average of some 20
_VALID_S = 60.0  # a machine may get other work, so older times say nothing; a chat takes less


class StepTimes:
    """Mean seconds of the latest decode steps, for each class of rows."""

    def __init__(self) -> None:
        self._seconds = [0.0] * CLASSES
        self._valid_until = [-inf] * CLASSES

    def observe(self, rows: int, seconds: float, now: float) -> None:
        """Record the seconds of a decode step of `rows`, unless it has no rows, or unknown seconds: 0.
        `now`: seconds of any clock that never goes back."""
        if not rows or not seconds:
            return
        place = min(rows.bit_length(), CLASSES) - 1
        weight = _WEIGHT if now < self._valid_until[place] else 1.0
        self._seconds[place] += weight * (seconds - self._seconds[place])
        self._valid_until[place] = now + _VALID_S

    def seconds(self, now: float) -> tuple[float, ...]:
        """Return the mean of each class; 0 if it has no step of the last minute."""
        each = zip(self._seconds, self._valid_until, strict=True)
        return tuple(seconds if now < valid_until else 0.0 for seconds, valid_until in each)
