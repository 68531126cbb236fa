"""The pace of a run, and when it will end at this pace."""

from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Protocol


class OpenHours(Protocol):
    """Hours of the day in which offline jobs run."""

    def __contains__(self, moment: datetime, /) -> bool:
        """Return True if they run at this moment."""

    def reach(self, start: datetime, work_s: float) -> datetime:
        """Return when so many seconds of these hours have passed since the start."""


class Pace:
    """Estimates the end of a run from the lines that ended in the last ten minutes in which offline jobs ran."""

    def __init__(self, hours: OpenHours | None) -> None:
        """`hours`: those of the workers; None for always."""
        self._hours = hours
        self._samples = deque[tuple[float, Mapping[str, int]]]()  # seconds of these hours, lines left by model
        self._open_s, self._last = 0.0, 0.0

    def add(self, now: float, left: Mapping[str, int]) -> None:
        """Record the number of unfinished lines of each model. `now`: Unix seconds."""
        if self._samples and self._is_open(now):
            self._open_s += min(max(now - self._last, 0.0), 60.0)  # more: the machine slept, or its clock was set
        self._last = now
        if self._samples and self._open_s - self._samples[-1][0] < 1.0:  # second: as often as a status is written
            return
        self._samples.append((self._open_s, left))
        while self._open_s - self._samples[0][0] > 600.0:
            self._samples.popleft()

    def end(self, now: float, left: Mapping[str, int]) -> int | None:
        """Return when the last model has done its lines, in Unix seconds; None while a model has done none of late."""
        if not self._samples:
            return None
        since_s, first = self._samples[0]
        work_s = 0.0
        for model, lines in left.items():
            done = first.get(model, 0) - lines
            if lines and done <= 0:
                return None
            if lines:
                work_s = max(work_s, lines * (self._open_s - since_s) / done)
        start = datetime.fromtimestamp(now, UTC)
        return int(now + work_s if self._hours is None else self._hours.reach(start, work_s).timestamp())

    def _is_open(self, now: float) -> bool:
        return self._hours is None or datetime.fromtimestamp(now, UTC) in self._hours
