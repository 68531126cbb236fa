"""Computes the rows of a worker that are in use, and those that each lane may still take."""

from collections.abc import Collection, Sequence
from datetime import datetime

from schemas.keys import LANES, Lane
from worker.queue.job.claims import Claim, WorkerRows
from worker.schedule_times import Hours
from worker.settings import Settings

MAX_COUNTS = 8  # token counts at once that take no row: they share the text threads with the prompts of chats


def free_rows(lane: Lane, running: Collection[Claim], settings: Settings, now: datetime) -> int:
    """Return the number of rows that the lane may still take; negative if it has more than it may have.

    Interactive jobs ignore offline rows: if rows are short, offline rows are preempted, see
    `worker.schedule.admission`. Offline jobs leave `reserved_rows` free, so that the first interactive jobs need no
    preemption, and outside of `batch_hours` they take at most `batch_off_hours_rows`. `MAX_COUNTS` token counts take
    no row; further ones count as rows, so that a worker claims no more of them than of chats.
    """
    taken = _with_rows(running)
    rows, offline = len(taken), sum(claim.lane == "batch" for claim in taken)
    if lane == "interactive":
        return settings.max_rows - (rows - offline)
    free = settings.max_rows - rows
    return min(free - settings.reserved_rows, offline_rows(settings, now) - offline)


def worker_rows(
    running: Collection[Claim], settings: Settings, now: datetime, step_times: Sequence[float]
) -> WorkerRows:
    """Return the rows of this worker, as other workers need them to share jobs. `step_times`: see `WorkerRows`."""
    free = {lane: max(0, free_rows(lane, running, settings, now)) for lane in LANES}
    return WorkerRows(len(_with_rows(running)), settings.max_rows, free, tuple(step_times))


def _with_rows(running: Collection[Claim]) -> list[Claim]:
    """Return the claims that take a row."""
    counts = [claim for claim in running if claim.is_count]
    return [*(claim for claim in running if not claim.is_count), *counts[MAX_COUNTS:]]


def offline_rows(settings: Settings, now: datetime) -> int:
    """Return the number of rows that offline jobs may have at this time if there are no interactive jobs."""
    hours = settings.batch_hours
    inside = hours is None or now in Hours.read(hours)
    unreserved = settings.max_rows - settings.reserved_rows
    return unreserved if inside else min(unreserved, settings.batch_off_hours_rows)
