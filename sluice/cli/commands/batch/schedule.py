"""`sluice batch schedule`: commands of `sluice batch` that the workers of a folder start at times of a crontab."""

import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli import worker_commands
from sluice.cli.commands.batch.tables import is_table
from sluice.cli.errors import CliError, needs_worker, sentence
from sluice.cli.options import AsJson, is_given
from sluice.cli.terminal.output import format_duration, print_json, print_table
from sluice.cli.terminal.view import note

if TYPE_CHECKING:
    from sluice.batch.schedules import Schedule, Schedules, ScheduleState

Folder = Annotated[
    Path, typer.Option("--dir", metavar="DIR", envvar="SLUICE_BATCH_DIR", help="The folder that the workers check.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the schedule.")]

schedule = typer.Typer(rich_markup_mode=None)
worker_commands.add_callback(schedule, "batch.schedule")


@schedule.command("add", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def add_schedule(
    context: typer.Context,
    crontab: Annotated[str, typer.Argument(metavar="CRONTAB", help='The times: "0 2 * * *" is every night at two.')],
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file of requests, read anew each time.")],
    folder: Folder,
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="FILE", help="Answers of `batch run`, such as out-%Y-%m-%d.jsonl."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the schedule.  [default: that of the file]")
    ] = None,
    tz: Annotated[str, typer.Option(metavar="ZONE", help="Time zone of the times, such as Europe/Berlin.")] = "UTC",
    on_miss: Annotated[
        str, typer.Option(metavar="run|skip", help="If no worker was up at a time: run once later, or skip it.")
    ] = "run",
) -> None:
    """Let the workers of a folder run a file at the times of a crontab.

    Each time the file is submitted as a run of the folder, with answers in DIR/done/ID/output.jsonl. With -o, a worker
    runs `sluice batch run FILE -o OUTPUT` in the present folder instead. Options after FILE that are not listed here
    are those of that command. FILE and OUTPUT may contain the date of the time, with the directives of date(1).

    A time is skipped if the run before it has not ended, or if no worker was up for five minutes after it and --on-miss
    is skip. When clocks change, a time that does not exist is the next one, and one that exists twice the first.

    \b
    Examples:
      sluice batch schedule add "0 2 * * *" in.jsonl --dir /srv/batch --tz Europe/Berlin --completion-window 6h
      sluice batch schedule add "0 2 * * mon-fri" in.csv --dir /srv/batch -o out-%Y-%m-%d.csv --prompt prompt.txt
    """
    if file.startswith("-"):
        raise CliError(f"{file}: write the options of the run after FILE.")
    with _read(folder) as schedules:
        from sluice.batch.schedules import Schedule

        name = Path(file).name.partition(".")[0].replace("%", "") if name is None else name
        added = Schedule(
            crontab=crontab,
            tz=tz,
            on_miss=on_miss,  # type: ignore[arg-type]
            since=datetime.now(UTC).timestamp(),
            id=token_hex(4),
            file=str(Path(file).absolute()),
            output=output and str(Path(output).absolute()),
            options=tuple(context.args),
            cwd=str(Path.cwd()),
        )
        if name in schedules.names():
            raise CliError(f"there is a schedule {name} already: remove it with rm, or give this one a --name.")
        first = added.times.after(datetime.now(UTC))
        _check_command(context, _in(folder, added.command(name, first)))
        if not Path(added.dated(added.file, first)).is_file() and "%" not in file:
            raise CliError(f"{file}: there is no such file; make it first, or correct the name.")
        schedules.write(name, added)
    print(name)
    note(f"its first time is {_time(first)}, if a worker has SLUICE_BATCH_DIR={folder.absolute()}.")


def _check_command(context: typer.Context, arguments: list[str]) -> None:
    """Parse the arguments of `sluice batch`; for bad ones click's error tells how to use its command. Raises `CliError`
    for those that a schedule cannot have."""
    if arguments[0] == "submit" and is_table(Path(arguments[1])):
        raise CliError(f"{arguments[1]} is a table: give -o OUTPUT and --prompt FILE after it.")
    batch = context.find_root().command.commands["batch"]  # type: ignore[attr-defined]
    made = batch.commands[arguments[0]].make_context(f"sluice batch {arguments[0]}", arguments[1:])
    if arguments[0] == "submit" and is_given(made, "url"):
        raise CliError("--url: the file goes to the workers' folder; give -o too, and they run it at the gateway.")
    if is_given(made, "key"):
        raise CliError("--key: all users of the folder can read a schedule; set SLUICE_API_KEY for the workers.")
    if is_given(made, "redis_url") and re.search(r"@|[?&]password=", made.params["redis_url"]):
        raise CliError(
            "--redis-url: it has a user or a password, and all users of the folder can read a schedule; set "
            "SLUICE_REDIS_URL for the workers, and leave it out."
        )


def _in(folder: Path, arguments: list[str]) -> list[str]:
    return [*arguments, "--dir", str(folder.absolute())] if arguments[0] == "submit" else arguments


@schedule.command("list")
def list_schedules(folder: Folder, as_json: AsJson = False) -> None:
    """List schedules: their next times, and what became of the last.

    \b
    Example:
      sluice batch schedule list --dir /srv/batch
    """
    rows, now = list[dict[str, object]](), datetime.now(UTC)
    with _read(folder) as schedules:
        for name in schedules.names():
            try:
                each, state = schedules.read(name), schedules.state(name)
                rows.append(_row(name, each, state, now, is_running=schedules.is_running(name)))
            except ValueError as error:
                rows.append({"name": name, "problem": str(error)})
    if as_json:
        for row in rows:
            print_json(row)
    elif rows:
        print_table(
            "Schedules",
            {"name": "left", "next": "left", "crontab": "left", "state": "left", "command": "left"},
            [tuple(_cells(row)) for row in rows],
        )
    else:
        note(f"no schedules in {folder}.")


def _row(name: str, each: "Schedule", state: "ScheduleState", now: datetime, *, is_running: bool) -> dict[str, object]:
    return {
        "name": name,
        "crontab": each.crontab,
        "tz": each.tz,
        "next": None if each.paused else int(each.times.after(now).timestamp()),
        "on_miss": each.on_miss,
        "paused": each.paused,
        "running": is_running,
        "command": each.command(name, each.times.after(now)),
        "last": state.ran,
        "exit_code": None if state.ran is None else state.code,
        "run": state.run_id,
        "skipped": state.skipped,
        "skipped_because": state.why or None,
    }


def _cells(row: dict[str, object]) -> Iterator[str]:
    yield str(row["name"])
    if "problem" in row:
        yield from ("", "", str(row["problem"]), "")
        return
    after = row["next"]
    yield _time(datetime.fromtimestamp(after, UTC)) if isinstance(after, int) else "-"
    yield f"{row['crontab']} {row['tz']}"
    state = ["paused"] if row["paused"] else []
    state += ["running"] if row["running"] else []
    if isinstance(row["last"], float):
        state.append(f"ran {_time(datetime.fromtimestamp(row['last'], UTC))} with code {row['exit_code']}")
    if isinstance(row["skipped"], float):
        state.append(f"skipped {_time(datetime.fromtimestamp(row['skipped'], UTC))}: {row['skipped_because']}")
    yield ", ".join(state) or "waits for its first time"
    command = row["command"]
    yield " ".join(str(each) for each in command) if isinstance(command, list) else ""


@schedule.command("rm")
def remove_schedule(name: Name, folder: Folder) -> None:
    """Remove a schedule. A run of it that has begun goes on, but a command that is interrupted is not resumed.

    \b
    Example:
      sluice batch schedule rm reviews --dir /srv/batch
    """
    with _known(folder, name) as schedules:
        schedules.remove(name)
    print(name)


@schedule.command("pause")
def pause_schedule(name: Name, folder: Folder) -> None:
    """Start nothing by a schedule until it is resumed. A run of it that has begun goes on.

    \b
    Example:
      sluice batch schedule pause reviews --dir /srv/batch
    """
    with _known(folder, name) as schedules:
        schedules.write(name, replace(schedules.read(name), paused=True))
    print(name)


@schedule.command("resume")
def resume_schedule(name: Name, folder: Folder) -> None:
    """Follow a paused schedule again. The times that passed meanwhile are left out.

    \b
    Example:
      sluice batch schedule resume reviews --dir /srv/batch
    """
    with _known(folder, name) as schedules:
        now = datetime.now(UTC)
        resumed = replace(schedules.read(name), paused=False, since=now.timestamp())
        schedules.write(name, resumed)
    print(name)
    note(f"its next time is {_time(resumed.times.after(now))}.")


@schedule.command("run")
def run_schedule(context: typer.Context, name: Name, folder: Folder) -> None:
    """Run the command of a schedule now, whatever the time. If it is interrupted, a worker resumes it.

    The exit code is that of the command; 2 if its last run has not ended.

    \b
    Example:
      sluice batch schedule run reviews --dir /srv/batch
    """
    with _known(folder, name) as schedules:
        code = schedules.run_now(name, datetime.now(UTC), _runner(context))
    if code is None:
        raise CliError(f"the last run of {name} has not ended: wait for it, or cancel it.")
    raise typer.Exit(code)


@schedule.command("follow", hidden=True)
def follow_schedule(
    context: typer.Context,
    name: Name,
    folder: Folder,
    at: Annotated[float, typer.Option(help="The time, in Unix seconds.")],
) -> None:
    """Do what the schedule asks for now, as the child process of a worker. Ends when its stdin does."""
    logging.basicConfig(level="WARNING", format="%(message)s")
    logging.getLogger("sluice").setLevel("INFO")
    ahead_s = at - datetime.now(UTC).timestamp()  # of the server's clock, which all workers follow

    def now() -> datetime:
        return datetime.fromtimestamp(datetime.now(UTC).timestamp() + ahead_s, UTC)

    threading.Thread(target=_stop_at_eof, daemon=True).start()
    with _known(folder, name) as schedules:
        schedules.follow(name, now, _runner(context))


def _stop_at_eof() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # which `batch run` takes as a pause


def _runner(context: typer.Context) -> "Callable[[Schedule, list[str]], int]":
    """Return a function that runs a command of `sluice batch` in this process."""
    root = context.find_root().command

    def run(schedule: "Schedule", arguments: list[str]) -> int:
        arguments = _in(context.params["folder"], arguments)
        try:
            os.chdir(schedule.cwd)
            return int(root.main(["batch", *arguments], "sluice", standalone_mode=False) or 0)
        except (CliError, OSError) as error:
            print(f"sluice: {error}", file=sys.stderr)
        return 2

    return run


@contextmanager
def _read(folder: Path) -> "Iterator[Schedules]":
    """Yield the schedules of a folder. Errors of its files, or of what the user gave, become `CliError`."""
    with needs_worker():
        from sluice.batch.schedules import Schedules
    if not folder.is_dir():
        raise CliError(f"{folder}: there is no such folder; give that of the workers, or make it first.")
    try:
        yield Schedules(folder.absolute())
    except OSError as error:
        raise CliError(f"{error.filename}: {error.strerror}.") from None
    except ValueError as error:
        raise CliError(sentence(str(error))) from None


@contextmanager
def _known(folder: Path, name: str) -> "Iterator[Schedules]":
    with _read(folder) as schedules:
        if name not in schedules.names():
            raise CliError(f"there is no schedule {name!r} in {folder}. See: sluice batch schedule list")
        yield schedules


def _time(moment: datetime) -> str:
    in_s = (moment - datetime.now(UTC)).total_seconds()
    distance = f"in {format_duration(in_s)}" if in_s >= 0 else f"{format_duration(-in_s)} ago"
    return f"{moment.astimezone():%a %Y-%m-%d %H:%M} ({distance})"
