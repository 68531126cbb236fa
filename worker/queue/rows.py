"""How many more rows a lane may take."""

from collections.abc import Collection
from datetime import datetime

from schemas.keys import Lane
from worker.queue.job.claims import Claim
from worker.schedule_times import Hours
from worker.settings import Settings


def free_rows(lane: Lane, running: Collection[Claim], settings: Settings, now: datetime) -> int:
    """Negative where more run than may be begun.

    Interactive jobs have the offline ones put aside where rows are short, see `worker.schedule.admission`. Offline jobs
    leave the reserved rows free, so that the first few need not even do that, and outside of their hours all but a few.
    """
    offline = sum(claim.lane == "batch" for claim in running)
    if lane == "interactive":
        return settings.max_rows - (len(running) - offline)
    free = settings.max_rows - len(running)
    return min(free - settings.reserved_rows, offline_rows(settings, now) - offline)


def offline_rows(settings: Settings, now: datetime) -> int:
    """As many as the lane may have at this time, were there no interactive jobs."""
    hours = settings.batch_hours
    inside = hours is None or now in Hours.read(hours)
    most = settings.max_rows - settings.reserved_rows
    return most if inside else min(most, settings.batch_off_hours_rows)
