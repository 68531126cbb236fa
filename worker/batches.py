"""A folder of offline batches: at its times one worker takes the inbox in, and no run is without a feeder for long."""

import asyncio
import fcntl
import logging
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

from worker.errors import CannotStart
from worker.feeder import either, feed
from worker.queue.cron import Cron
from worker.settings import Settings, environment
from worker.timetable import Crontab

logger = logging.getLogger("sluice.batch")

FEED = ("nice", sys.executable, "-m", "sluice.cli", "batch", "feed")
_INPUT, _LOCK = "*/input.jsonl", "run"  # of a run's folder; the second is held by its feeder
_LOOK_S = 60.0
_START_S = 60.0  # a feeder that fails sooner may have taken nothing in


class Batches:
    def __init__(self, folder: str, settings: Settings, *, command: Sequence[str] = FEED, look_s: float = _LOOK_S):
        """`look_s`: how often to look for runs that nobody feeds. Raises `CannotStart`."""
        self._folder, self._settings, self._look_s = Path(folder).absolute(), settings, look_s
        models = ["--models", settings.batch_models] if settings.batch_models else []
        self._command = [*command, str(self._folder), "--until-eof", *models]
        self._slot, self.feeding = asyncio.Event(), False
        if any(find_spec(name) is None for name in ("sluice", "typer", "rich")):
            raise CannotStart(
                "SLUICE_BATCH_DIR: the command `sluice` reads its files and is not installed here: in a checkout of "
                "Sluice, pip install './sluice[cli]'"
            )
        try:
            (self._folder / "inbox").mkdir(parents=True, exist_ok=True)
            name = _identity(self._folder)
        except OSError as error:
            raise CannotStart(f"SLUICE_BATCH_DIR={folder}: it can have no inbox: {error.strerror}") from None
        self.cron = Cron(name, self._taken, Crontab(settings.batch_schedule), free=self._is_free)

    async def run(self, stopping: asyncio.Event, hurry: asyncio.Event) -> None:
        """Until `stopping`. A feeder at work has the worker's grace then, and none when there is a `hurry`."""
        owed = False  # a slot that is ours, and that we have made nothing of
        while not stopping.is_set():
            if owed or self._slot.is_set():
                began = time.monotonic()
                taken = await self._feed("--take", stopping=stopping, hurry=hurry)
                owed = not taken and time.monotonic() - began < _START_S
            elif await asyncio.to_thread(_is_left_alone, self._folder / "running"):
                await self._feed(stopping=stopping, hurry=hurry)
            await either(self._slot.wait(), stopping.wait(), timeout_s=self._look_s)

    async def _feed(self, *more: str, stopping: asyncio.Event, hurry: asyncio.Event) -> bool:
        self.feeding = True
        self._slot.clear()
        env, grace_s = environment(self._settings.redis_url), self._settings.grace_s
        well = await feed([*self._command, *more], env, stopping=stopping, hurry=hurry, grace_s=grace_s)
        self.feeding = False
        return well

    async def _taken(self, ctx: dict[Any, Any]) -> None:
        self._slot.set()

    def _is_free(self) -> bool:
        return not self.feeding and not self._slot.is_set()


def _identity(folder: Path) -> str:
    """Of the folder, wherever it is mounted: machines that have one each at the same path share no slot. Made by
    whoever comes first. Raises OSError."""
    known, new = folder / ".id", uuid4().hex
    mine = folder / f".id.{new}"
    mine.write_text(new)
    try:
        known.hardlink_to(mine)  # there at once with what is in it
    except OSError:
        pass  # it is there already, or the file system has no links
    finally:
        mine.unlink()
    return known.read_text() if known.exists() else str(folder)


def _is_left_alone(running: Path) -> bool:
    """Whether there is a run that nobody feeds."""
    try:
        return any(_is_unlocked(input.with_name(_LOCK)) for input in running.glob(_INPUT))
    except OSError as error:
        logger.warning("cannot look for offline runs: %s", error)
        return False


def _is_unlocked(lock: Path) -> bool:
    """A feeder that comes for the lock in this very moment finds it held, and leaves the run to the next look."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True  # its feeder died before it began
    return True
