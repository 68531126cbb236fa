"""Times of offline work: a crontab expression for its start, and hours of the day for its rows, in UTC."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from math import ceil
from typing import Self

from cronsim import CronSim, CronSimError

_EXAMPLE = '"0 2 * * *" is every night at two'
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-(?:([01]\d|2[0-3]):([0-5]\d)|24:00)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Crontab:
    """The five fields of a crontab. If day of month and day of week are both given, either may match, as in cron.

    When clocks change, a time of day that does not exist is the next one that does, and one that exists twice is the
    first of them; a field `*` of minutes or hours follows the clock instead, as in Debian's cron.
    """

    expression: str
    zone: tzinfo = UTC

    def __post_init__(self) -> None:
        """Validate the expression. Raises ValueError, which shows an example."""
        if (fields := len(self.expression.split())) != 5:  # cronsim would accept a sixth, for seconds
            raise ValueError(f"a crontab expression has five fields, and this has {fields}: {_EXAMPLE}")
        try:
            slot = next(CronSim(self.expression, datetime.now(UTC)), None)
        except CronSimError as error:
            field = str(error).removeprefix("Bad ")
            raise ValueError(f"its {field} is not valid: {_EXAMPLE}") from None
        if slot is None:
            raise ValueError(f"no day of the next fifty years matches: {_EXAMPLE}")

    def after(self, moment: datetime) -> datetime:
        """Return the next time after `moment`, in UTC."""
        slots = CronSim(self.expression, moment.astimezone(self.zone))
        # In the second of two equal hours cronsim begins with the times of the first.
        return next(slot.astimezone(UTC) for slot in slots if slot.astimezone(UTC) > moment)

    def latest(self, after: datetime, until: datetime) -> datetime | None:
        """Return the last time that is later than `after` and not later than `until`; None if there is none."""
        for days in (0.05, 1, 31, 366, 366 * 50):  # so that a dense crontab has few times to go through
            start = max(after, until - timedelta(days=days))
            found, slot = None, self.after(start)
            while slot <= until:
                found, slot = slot, self.after(slot)
            if found or start == after:
                return found
        return None


@dataclass(frozen=True, slots=True)
class Hours:
    """Hours of each day, in minutes from midnight, end exclusive. They span midnight if begin is after end."""

    begin_min: int
    end_min: int

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse hours such as 22:00-06:00. Raises ValueError, which names the accepted form."""
        found = _HOURS.fullmatch(text)
        if not found:
            raise ValueError("hours look like 22:00-06:00")
        begin_h, begin_min, end_h, end_min = found.groups()
        begin = int(begin_h) * 60 + int(begin_min)
        end = int(end_h) * 60 + int(end_min) if end_h else 24 * 60
        if begin == end:
            raise ValueError("the hours begin and end at the same time; 00:00-24:00 is all day")
        return cls(begin, end)

    def __contains__(self, moment: datetime) -> bool:
        utc = moment.astimezone(UTC)
        minute = utc.hour * 60 + utc.minute
        if self.begin_min < self.end_min:
            return self.begin_min <= minute < self.end_min
        return minute >= self.begin_min or minute < self.end_min

    def reach(self, start: datetime, work_s: float) -> datetime:
        """Return when `work_s` seconds of these hours have passed since `start`."""
        day_s, utc = 86_400, start.astimezone(UTC)
        open_s = (self.end_min - self.begin_min) * 60 % day_s or day_s
        into_s = (utc.hour * 3600 + utc.minute * 60 + utc.second - self.begin_min * 60) % day_s
        if into_s >= open_s:
            utc, into_s = utc + timedelta(seconds=day_s - into_s), 0
        nights = max(ceil((into_s + work_s) / open_s) - 1, 0)  # that pass until then
        return utc + timedelta(seconds=work_s + nights * (day_s - open_s))
