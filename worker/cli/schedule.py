"""`sluice batch schedule`: shows when workers start the files of the inbox, and how many rows offline jobs may use."""

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.errors import CliError, needs_worker
from sluice.cli.options import AsJson, integer
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note

if TYPE_CHECKING:
    from worker.settings import Settings

_FORMAT = "%a %Y-%m-%d %H:%M"


def schedule(
    context: typer.Context,
    schedule: Annotated[
        str | None, typer.Option(metavar="CRONTAB", help="SLUICE_BATCH_SCHEDULE: five fields, in UTC.")
    ] = None,
    hours: Annotated[
        str | None, typer.Option(metavar="FROM-TO", help="SLUICE_BATCH_HOURS: hours of the day, in UTC.")
    ] = None,
    runs: Annotated[
        int,
        typer.Option("-n", "--runs", parser=integer(1, 100), metavar="N", help="Number of start times to show."),
    ] = 5,
    as_json: AsJson = False,
) -> None:
    """Show when workers start the inbox's files; manage schedules.

    In UTC and in local time. Uses the settings that a worker here would have, from the environment or .env; an
    option overrides both. If the schedule restricts both the day of the month and the day of the week, a day that
    matches either one counts.

    \b
    Examples:
      sluice batch schedule
      sluice batch schedule --schedule "0 2 * * mon-fri" --hours 22:00-06:00 -n 10
    """
    if context.invoked_subcommand is not None:
        return
    settings = _read({"batch_schedule": schedule, "batch_hours": hours})
    now = datetime.now(UTC)
    slots = _slots(settings, now, runs)
    if as_json:
        for slot in slots:
            print_json({"at": int(slot.timestamp()), "utc": slot.isoformat(), "local": slot.astimezone().isoformat()})
        return
    if not settings.batch_dir:
        note("SLUICE_BATCH_DIR is not set: a worker started here runs no files.")
    print_table(
        f"Schedule: {settings.batch_schedule}",
        {"UTC": "left", "local": "left", "in": "right"},
        [
            (f"{at:{_FORMAT}}", f"{at.astimezone():{_FORMAT} %Z}", format_duration((at - now).total_seconds()))
            for at in slots
        ],
    )
    print(_hours(settings, now))


def _read(options: dict[str, str | None]) -> "Settings":
    with needs_worker():
        from worker.errors import CannotStart
        from worker.settings import read_settings
    try:
        # The settings require a model, and none is loaded here.
        return read_settings(model="any", **{name: value for name, value in options.items() if value is not None})
    except CannotStart as error:
        raise CliError(str(error)) from None


def _slots(settings: "Settings", now: datetime, count: int) -> list[datetime]:
    from sluice.batch.times import Crontab

    crontab, slots = Crontab(settings.batch_schedule), [now]
    while len(slots) <= count:
        slots.append(crontab.after(slots[-1]))
    return slots[1:]


def _hours(settings: "Settings", now: datetime) -> str:
    from sluice.batch.times import Hours
    from worker.queue.job.claims import offline_rows

    rows = f"Offline jobs may take {offline_rows(settings, now)} of a worker's {settings.max_rows} rows now"
    if settings.batch_hours is None:
        return f"{rows}, at any hour."
    hours = Hours.read(settings.batch_hours)
    local = f"{_by_local_clock(hours.begin_min, now)}-{_by_local_clock(hours.end_min, now)}"
    return f"{rows}; their hours are {settings.batch_hours} UTC, {local} here."


def _by_local_clock(minute: int, now: datetime) -> str:
    """Return a minute of the UTC day in local time, as HH:MM."""
    return f"{(now.replace(hour=0, minute=0) + timedelta(minutes=minute)).astimezone():%H:%M}"
