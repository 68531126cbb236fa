"""Runs a folder of offline batches: takes in the inbox on schedule, and restarts feeders of abandoned runs."""

import asyncio
import fcntl
import logging
import math
import sys
import time
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from sluice.batch.schedules import Schedules
from sluice.batch.times import Crontab
from worker.environment import child_environment
from worker.errors import CannotStart
from worker.queue.cron import Cron
from worker.queue.services import wait_first
from worker.settings import Settings

logger = logging.getLogger("sluice.batch")


async def feed(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stopping: asyncio.Event,
    force_stop: asyncio.Event,
    grace_s: float,
    name: str = "the feeder",
    takes: asyncio.Event | None = None,
) -> bool:
    """Run a feeder to its end, and stop it at `stopping`. Returns False if it failed; the reason is only logged. It is
    a child process, since files of 200 MB would block the loop that publishes tokens, and ends when its stdin is
    closed: on request, or because its worker died in any way.

    `grace_s`: seconds that it may take to stop; `force_stop` ends them early. Then it is killed. `name`: in the log.
    When `takes` is set, it is cleared and the feeder told to take in the inbox.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            limit=1 << 20,  # bytes of a line of its log
            env=env,
            process_group=0,  # so Ctrl-C reaches only the worker
        )
    except OSError as error:
        logger.error("cannot start %s: %s", name, error)
        return False
    assert child.stdin is not None
    assert child.stdout is not None
    log = asyncio.create_task(_log_lines(child.stdout))
    try:
        takes = takes or asyncio.Event()
        while child.returncode is None and not stopping.is_set():
            await wait_first(child.wait(), stopping.wait(), takes.wait())
            if takes.is_set() and child.returncode is None:
                child.stdin.write(b"take\n")
                takes.clear()
        child.stdin.close()
        await wait_first(child.wait(), force_stop.wait(), timeout_s=grace_s)
    finally:
        if child.returncode is None:
            child.kill()
        last = await log
    if (code := await child.wait()) and not stopping.is_set():
        logger.error("%s failed with code %d: %s", name, code, last)
        return False
    return True


async def _log_lines(lines: asyncio.StreamReader) -> str:
    """Log the lines. Returns the last one."""
    last = ""
    while True:
        try:
            line = await lines.readline()
        except ValueError:
            continue  # longer than the limit; the stream reader has dropped it
        if not line:
            return last
        if text := line.decode("utf-8", "replace").rstrip():
            logger.info("%s", text)
            last = text


_BATCH = ("nice", sys.executable, "-m", "sluice.cli", "batch")
FEED = (*_BATCH, "feed")
_FOLLOW = (*_BATCH, "schedule", "follow")
_INPUT, _LOCK = "*/input.jsonl", "run"  # in a run's folder; its feeder holds the lock


class BatchDirectory:
    """Feeds the runs of one folder by child processes; workers that share the folder take turns."""

    def __init__(
        self,
        folder: str,
        settings: Settings,
        *,
        command: Sequence[str] = FEED,
        search_s: float = 60.0,
        start_s: float = 60.0,
        look_s: float = 10.0,
    ):
        """`search_s`: interval of the search for runs without a feeder. `start_s`: a feeder that fails sooner may not
        have taken any file. `look_s`: interval at which schedules are looked at. Raises `CannotStart`."""
        self._folder = Path(folder).absolute()
        self._schedules, self._look_s = Schedules(self._folder), look_s
        self._settings = settings
        self._search_s, self._start_s = search_s, start_s
        models = ["--models", settings.batch_models] if settings.batch_models else []
        hours = ["--hours", settings.batch_hours] if settings.batch_hours and not settings.batch_off_hours_rows else []
        self._command = [*command, str(self._folder), "--until-eof", *models, *hours]
        self._slot, self._slot_at = asyncio.Event(), 0.0
        self._starts_each_minute = settings.batch_schedule.split() == ["*"] * 5
        if any(find_spec(name) is None for name in ("sluice", "typer", "rich")):
            raise CannotStart(
                "SLUICE_BATCH_DIR: the command `sluice`, which reads its files, is not installed: in a checkout of "
                "Sluice, run ./scripts/setup worker,server"
            )
        try:
            (self._folder / "inbox").mkdir(parents=True, exist_ok=True)
            name = _identity(self._folder)
        except OSError as error:
            raise CannotStart(f"SLUICE_BATCH_DIR={folder}: cannot create its inbox: {error.strerror}") from None
        crontab, self._arrived = Crontab(settings.batch_schedule), False
        self.cron = Cron(name, self._take, crontab, free=lambda: not self._slot.is_set(), early=self._has_arrived)

    async def run(self, stopping: asyncio.Event, force_stop: asyncio.Event) -> None:
        """Run until `stopping`. A running feeder then has `SLUICE_GRACE_S` to end, and is killed at `force_stop`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_feeders(stopping, force_stop))
            group.create_task(self._follow_schedules(stopping, force_stop))
            if self._starts_each_minute:  # another schedule was set for a reason
                group.create_task(self._watch_inbox(stopping))

    async def _watch_inbox(self, stopping: asyncio.Event) -> None:
        """Take runs that are handed over before the minute ends. Other files may not be complete yet."""
        seen = set[str]()
        while not stopping.is_set():
            found = await asyncio.to_thread(_handed_over, self._folder / "inbox")
            self._arrived = self._arrived or not found <= seen
            seen = found
            await wait_first(stopping.wait(), timeout_s=0.5)

    def _has_arrived(self) -> bool:
        """Return True once after a run has arrived."""
        arrived, self._arrived = self._arrived, False
        return arrived

    async def _follow_schedules(self, stopping: asyncio.Event, force_stop: asyncio.Event) -> None:
        """Start a child process for each schedule with something to do; the workers' processes exclude each other."""
        followed, told = dict[str, asyncio.Task[bool]](), set[str]()
        while not stopping.is_set():
            try:
                due = await asyncio.to_thread(self._schedules.due, self.cron.now, told) if self.cron.now else []
            except OSError as error:
                logger.warning("cannot read the schedules: %s", error)
                due = []
            followed = {name: task for name, task in followed.items() if not task.done()}
            for name in [name for name in due if name not in followed][: 8 - len(followed)]:  # processes at once
                followed[name] = asyncio.create_task(self._follow(name, stopping, force_stop))
            await wait_first(stopping.wait(), timeout_s=self._look_s)
        await asyncio.gather(*followed.values())

    async def _follow(self, name: str, stopping: asyncio.Event, force_stop: asyncio.Event) -> bool:
        assert self.cron.now is not None
        command = [*_FOLLOW, name, "--dir", str(self._folder), "--at", str(self.cron.now.timestamp())]
        grace_s = self._settings.grace_s
        return await feed(
            command,
            self._environment(),
            stopping=stopping,
            force_stop=force_stop,
            grace_s=grace_s,
            name=f"schedule {name}",
        )

    def _environment(self) -> dict[str, str]:
        return child_environment(self._settings.redis_url, self._settings.redis_urls)

    async def _run_feeders(self, stopping: asyncio.Event, force_stop: asyncio.Event) -> None:
        owed = False  # True if this worker took a slot of the schedule, and its feeder may have taken no file
        while not stopping.is_set():
            if owed or self._slot.is_set():
                owed = await self._feed("--take", stopping=stopping, force_stop=force_stop)
            elif await asyncio.to_thread(self._has_run):
                owed = await self._feed(stopping=stopping, force_stop=force_stop)
            await wait_first(self._slot.wait(), stopping.wait(), timeout_s=self._search_s)

    async def _feed(self, *more: str, stopping: asyncio.Event, force_stop: asyncio.Event) -> bool:
        """Run a feeder to its end. Returns True if it was to take files, and may have taken none."""
        began = time.monotonic()
        takes_at = began if more else -math.inf
        self._slot.clear()
        well = await feed(
            [*self._command, *more],
            self._environment(),
            stopping=stopping,
            force_stop=force_stop,
            grace_s=self._settings.grace_s,
            takes=self._slot,
        )
        if self._slot_at > began:  # it was told of a slot: it may have ended at that moment, before it could read that
            return time.monotonic() - self._slot_at < (5.0 if well else self._start_s)
        return not well and time.monotonic() - takes_at < self._start_s

    def _has_run(self) -> bool:
        """Return True if there is a run without a feeder, or one that waits for its time: it may be cancelled."""
        may_be_cancelled = not self._starts_each_minute and _handed_over(self._folder / "inbox")
        return bool(may_be_cancelled) or _has_abandoned_run(self._folder / "running")

    def _take(self) -> None:
        self._slot_at = time.monotonic()
        self._slot.set()


def _identity(folder: Path) -> str:
    """Return the folder's id, which the first worker writes into it.

    It is independent of the mount point, and folders at the same path on two machines have different ids. Raises
    OSError.
    """
    known, new = folder / ".id", uuid4().hex
    mine = folder / f".id.{new}"
    mine.write_text(new, "utf-8")
    try:
        known.hardlink_to(mine)  # atomic: the file never exists without its content
    except OSError:
        pass  # it exists already, or the file system has no hard links
    finally:
        mine.unlink()
    return known.read_text("utf-8") if known.exists() else str(folder)


def _handed_over(inbox: Path) -> set[str]:
    """Return the names of the runs in the inbox that were submitted: their files are complete."""
    try:
        return {path.name for path in inbox.glob("batch_*.jsonl")}
    except OSError:
        return set()


def _has_abandoned_run(running: Path) -> bool:
    """True if there is a run without a feeder."""
    try:
        return any(_is_unlocked(input.with_name(_LOCK)) for input in running.glob(_INPUT))
    except OSError as error:
        logger.warning("cannot search for offline runs: %s", error)
        return False


def _is_unlocked(lock: Path) -> bool:
    """True if no feeder holds the lock.

    A feeder that tries to take the lock at this moment fails, and the next search finds its run.
    """
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True  # its feeder died before it began
    return True
