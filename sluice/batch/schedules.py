"""Schedules of a folder: commands of `sluice batch` that its workers start at times of a crontab."""

import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal, get_args
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from sluice.batch.folder import RunFolder, run_paths
from sluice.batch.store import tried_lock
from sluice.batch.times import Crontab
from sluice.contract.events import parse_as

logger = logging.getLogger("sluice.batch")

OnMiss = Literal["run", "skip"]
_ON_TIME = timedelta(minutes=5)  # workers look every ten seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Times, and the command that they start: with an output `sluice batch run`, else `sluice batch submit`. Raises
    ValueError."""

    crontab: str
    tz: str = "UTC"
    on_miss: OnMiss = "run"
    paused: bool = False
    since: float  # Unix seconds: earlier times count for nothing
    id: str  # eight hexadecimal digits, which end the ids of its runs
    file: str
    output: str | None = None
    options: tuple[str, ...] = ()  # of the command
    cwd: str

    def __post_init__(self) -> None:
        """Check what a person may have written."""
        if self.on_miss not in get_args(OnMiss):
            raise ValueError(f"on_miss: it must be run or skip, not {self.on_miss!r}")
        if not re.fullmatch("[0-9a-f]{8}", self.id):
            raise ValueError(f"id: {self.id!r} is not eight hexadecimal digits")
        first = self.times.after(datetime.now(UTC))
        if self.output and self.dated(self.output, first) == self.dated(self.output, self.times.after(first)):
            raise ValueError(
                f"output: several times would write to {self.dated(self.output, first)}; name the file by their date, "
                "as in out-%Y-%m-%d.csv, or by their minute, %Y-%m-%dT%H%M"
            )

    @property
    def times(self) -> Crontab:
        """The times of the crontab in its zone."""
        try:
            zone = ZoneInfo(self.tz)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"tz: {self.tz!r} is no time zone that is known here; one is Europe/Berlin") from None
        try:
            return Crontab(self.crontab, zone)
        except ValueError as error:
            raise ValueError(f"crontab: {self.crontab!r}: {error}") from None

    def dated(self, text: str, slot: datetime) -> str:
        """Return a name with the local date of a time for its directives of strftime."""
        return slot.astimezone(ZoneInfo(self.tz)).strftime(text)

    def run_id(self, name: str, slot: datetime) -> str:
        """Return the id of the run of a time: always the same, so that no crash submits it twice."""
        return f"batch_{name}_{slot.astimezone(UTC):%Y%m%d%H%M%S}{self.id}"

    def command(self, name: str, slot: datetime) -> list[str]:
        """Return the arguments of `sluice batch` for a time. Those of `submit` lack the folder."""
        file = self.dated(self.file, slot)
        if self.output is None:
            return ["submit", file, "--id", self.run_id(name, slot), *self.options]
        return ["run", file, "--output", self.dated(self.output, slot), *self.options]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleState:
    """Unix seconds of a schedule's times, and what became of them."""

    handled: float = 0.0  # the latest that was run or skipped
    started: float | None = None  # the one whose command has not ended
    ran: float | None = None  # the last whose command has
    code: int = 0  # exit code of it
    run_id: str | None = None  # of the last run that was submitted
    skipped: float | None = None  # the last that was skipped
    why: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """Start the command of a time, or resume it."""

    slot: datetime


@dataclass(frozen=True, slots=True)
class Skip:
    """Leave out the times up to this one."""

    slot: datetime
    why: str


def decide(schedule: Schedule, state: ScheduleState, now: datetime, *, is_busy: bool) -> Start | Skip | None:
    """Return what to do now; None for nothing. `is_busy`: the run that was submitted last has not ended.

    Of several times that have passed, the latest counts.
    """
    if state.started is not None:
        return Start(_utc(state.started))
    if schedule.paused:
        return None
    if _utc(state.handled) - now > timedelta(hours=1):  # else the schedule would stand still until then
        return Skip(now, "the clock was ahead")
    slot = schedule.times.latest(_utc(max(schedule.since, state.handled)), now)
    if slot is None:
        return None
    if is_busy:
        return Skip(slot, "the run before it had not ended")
    if schedule.on_miss == "skip" and now - slot > _ON_TIME:
        return Skip(slot, "no worker was up")
    return Start(slot)


def _utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class Schedules:
    """The schedules of a folder: `schedules/NAME.json`, with `NAME.state` and `NAME.lock` beside it."""

    def __init__(self, root: Path) -> None:
        self._runs, self._dir = RunFolder(root), root / "schedules"

    def names(self) -> list[str]:
        """Return the names. Raises OSError."""
        return sorted(path.stem for path in self._dir.glob("*.json") if is_schedule_name(path.stem))

    def read(self, name: str) -> Schedule:
        """Return a schedule. Raises OSError, or ValueError if it is none that can be followed."""
        path = self._path(name, "json")
        with path.open(encoding="utf-8") as file:
            status, parsed = os.fstat(file.fileno()), json.load(file)
        schedule = _schedule(parsed)
        # `run` writes files with the rights of the worker, and may have options that start commands.
        if schedule.output and (status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022):
            raise ValueError("with an output, only the user of this process may own and write it; add it as that user")
        return schedule

    def state(self, name: str) -> ScheduleState:
        """Return the state. Raises OSError, ValueError."""
        try:
            state = parse_as(ScheduleState, json.loads(self._path(name, "state").read_text("utf-8")))
            times = (state.handled, state.started or 0, state.ran or 0, state.skipped or 0)
            if all(0 <= each < 1e10 for each in times):
                return state
        except FileNotFoundError:
            return ScheduleState()
        except TypeError:
            pass
        raise ValueError(f"{name}.state was not written by a schedule; remove it, and the last time may run again")

    def write(self, name: str, schedule: Schedule) -> None:
        """Add or replace a schedule. Raises OSError."""
        self._dir.mkdir(exist_ok=True)
        self._write(self._path(name, "json"), asdict(schedule))

    def remove(self, name: str) -> None:
        """Remove a schedule. A command of it that runs goes on. Raises OSError."""
        self._path(name, "json").unlink()
        self._path(name, "state").unlink(missing_ok=True)

    def due(self, now: datetime, told: set[str]) -> list[str]:
        """Return the names of those for which there is something to do now. `told`: problems that the log has."""
        found = []
        for name in self.names():
            try:
                schedule, state = self.read(name), self.state(name)
                if decide(schedule, state, now, is_busy=self._is_busy(state)) and not self.is_running(name):
                    found.append(name)
            except (OSError, ValueError) as error:
                problem = f"schedules/{name}.json: {error}"
                if problem not in told:
                    logger.warning("%s", problem)
                told.add(problem)
        return found

    def follow(self, name: str, clock: Callable[[], datetime], run: Callable[[Schedule, list[str]], int]) -> None:
        """Do what there is to do now, unless another process does. Raises OSError, ValueError.

        `run` runs the command and returns its exit code; 3 if it was stopped, and is to be resumed.
        """
        with self._locked(name) as is_mine:
            if not is_mine:
                return
            schedule, state = self.read(name), self.state(name)
            now = clock()
            match decide(schedule, state, now, is_busy=self._is_busy(state)):
                case Skip(slot, why):
                    self._save(name, _skipped(name, state, slot, why))
                case Start(slot):
                    state = replace(state, handled=max(state.handled, slot.timestamp()))
                    self._start(name, schedule, state, slot, run, may_fail=now - slot > _ON_TIME)
                    self._skip_passed(name, schedule, slot, clock())

    def run_now(self, name: str, now: datetime, run: Callable[[Schedule, list[str]], int]) -> int | None:
        """Run the command now, and return its exit code; None if its last run has not ended. Raises as `follow`."""
        with self._locked(name) as is_mine:
            schedule, state = self.read(name), self.state(name)
            if not is_mine or self._is_busy(state) or state.started:
                return None
            return self._start(name, schedule, state, now, run, may_fail=True)

    def _start(
        self,
        name: str,
        schedule: Schedule,
        state: ScheduleState,
        slot: datetime,
        run: Callable[[Schedule, list[str]], int],
        *,
        may_fail: bool,
    ) -> int:
        """Run the command. One that was stopped, or that did nothing unless it `may_fail`, is started again later."""
        started = slot.timestamp()
        state = replace(state, started=started)
        self._save(name, state)
        code = run(schedule, schedule.command(name, slot))
        if code == 2 and not may_fail:
            logger.warning("schedule %s: nothing was run; it is tried again for five minutes", name)
        elif code != 3:
            submitted = schedule.run_id(name, slot) if schedule.output is None else None
            self._save(name, replace(state, started=None, ran=started, code=code, run_id=submitted))
        return code

    def _skip_passed(self, name: str, schedule: Schedule, slot: datetime, now: datetime) -> None:
        """Skip the times that have passed while the command ran."""
        state = self.state(name)
        if state.started is None and (passed := schedule.times.latest(slot, now)):
            self._save(name, _skipped(name, state, passed, "the run before it had not ended"))

    def is_running(self, name: str) -> bool:
        """Return True if a process runs the command of the schedule."""
        with self._locked(name) as is_mine:
            return not is_mine

    def _is_busy(self, state: ScheduleState) -> bool:
        run_id = state.run_id
        return run_id is not None and (
            self._runs.inbox.joinpath(f"{run_id}.jsonl").exists()
            or run_paths(self._runs.running / run_id).input.exists()
        )

    def _locked(self, name: str) -> AbstractContextManager[bool]:
        """Return the lock of the schedule."""
        return tried_lock(self._path(name, "lock"))

    def _save(self, name: str, state: ScheduleState) -> None:
        if self._path(name, "json").exists():  # it may have been removed meanwhile
            self._write(self._path(name, "state"), asdict(state))

    def _write(self, path: Path, content: dict[str, object]) -> None:
        new = path.with_name(f".{path.name}.{os.getpid()}")
        new.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
        new.chmod(0o644)
        new.rename(path)

    def _path(self, name: str, suffix: str) -> Path:
        if not is_schedule_name(name):
            raise ValueError(f"{name!r} is not a name of a schedule: use 1 to 40 letters, digits, and . _ - inside")
        return self._dir / f"{name}.{suffix}"


def is_schedule_name(name: str) -> bool:
    """Return True for 1 to 40 letters, digits, dots, dashes and underscores that begin with a letter or digit."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", name, re.ASCII) is not None


def _schedule(parsed: Any) -> Schedule:
    """Return the schedule of a JSON value, which a person may have written. Raises ValueError."""
    match parsed:
        case {
            "crontab": str(),
            "since": int() | float() as since,
            "id": str(),
            "file": str(),
            "cwd": str(),
            **more,
        } if 0 <= since < 1e10 and isinstance(more.get("tz", ""), str):
            options, output = more.get("options", ()), more.get("output")
            if isinstance(options, list) and all(isinstance(each, str) for each in [*options, output or ""]):
                return parse_as(Schedule, {**parsed, "options": tuple(options)})
    raise ValueError("it is not a schedule as `sluice batch schedule add` writes it; add it again")


def _skipped(name: str, state: ScheduleState, slot: datetime, why: str) -> ScheduleState:
    logger.warning("schedule %s: %s is skipped: %s", name, f"{slot:%Y-%m-%d %H:%M} UTC", why)
    return replace(state, handled=slot.timestamp(), skipped=slot.timestamp(), why=why)
