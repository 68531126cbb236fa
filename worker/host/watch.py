"""Watches the machine beside the event loop: tells engine and queue what to leave to others, and holds sleep off while
jobs run."""

import asyncio
import logging
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from sluice.contract.keys import Lane
from worker.host.courtesy import Courtesy, Reclaim, Signals, Throttle
from worker.host.linux import Linux
from worker.host.macos import MacOS
from worker.monitoring.sink import MetricsSink
from worker.settings import Settings

logger = logging.getLogger("sluice.host")


class Host(Protocol):
    """The machine that a worker runs on. For one thread at a time, which is not the event loop's."""

    @property
    def awake_command(self) -> Sequence[str]:
        """The command that holds idle sleep off while the command after it runs; empty if there is none."""

    def read(self, *, busy: bool = True) -> Signals:
        """Return the state of the machine. May block for some seconds. `busy`: jobs run; without any, what costs much
        to ask may be some minutes old."""


def this_host() -> Host:
    """Return the machine that this process runs on."""
    return MacOS() if platform.system() == "Darwin" else Linux()


class HostWatch:
    """Reads the signals of the machine once a second while the worker serves. For the event loop's thread."""

    def __init__(
        self,
        settings: Settings,
        metrics: MetricsSink,
        set_throttle: Callable[[Throttle], None],
        host: Host | None = None,
        *,
        every_s: float = 1.0,
    ) -> None:
        """`set_throttle` receives every change. `host`: by default the machine of this process."""
        self._metrics, self._set_throttle = metrics, set_throttle
        self._host, self._every_s = host, every_s
        self._courtesy, self._throttle = Courtesy(settings.courtesy), Throttle()
        self._awake = _StayAwake(settings.stay_awake)
        self._failed = False

    @property
    def reclaim(self) -> Reclaim:
        """Memory that the worker gives back now."""
        return self._throttle.reclaim

    async def run(self, running: Callable[[], Mapping[Lane, int]]) -> None:
        """Watch until this task is cancelled. `running` returns the number of running jobs by lane."""
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "host")
        try:
            while True:
                # A reading that hangs holds up the next ones, and nothing else.
                signals, is_awake = await loop.run_in_executor(thread, self._look, dict(running()))
                self._take_over(signals, is_awake)
                await asyncio.sleep(self._every_s)
        finally:
            thread.submit(self._awake.release)
            thread.shutdown(wait=False)

    def _take_over(self, signals: Signals, is_awake: bool) -> None:
        before, self._throttle = self._throttle, self._courtesy.decide(signals, time.monotonic())
        self._metrics.set_host(signals, self._throttle, is_awake=is_awake)
        if self._throttle != before:
            self._set_throttle(self._throttle)
            logger.info(
                "the machine: %s; memory pressure %s, gives back %s; steps take %d %% of the time, %d %% if offline",
                ", ".join(signals.reasons) or "all is well",
                signals.pressure.name.lower(),
                self._throttle.reclaim.name.lower(),
                100 * self._throttle.share,
                100 * self._throttle.offline_share,
            )

    # On the thread

    def _look(self, running: Mapping[Lane, int]) -> tuple[Signals, bool]:
        """Return the signals, and True if sleep is held off."""
        try:
            self._host = self._host or this_host()
            signals = self._host.read(busy=any(running.values()))
            return signals, self._awake.hold(self._host.awake_command, running, signals, time.monotonic())
        except Exception:  # the border of a thread: a machine that cannot be read is served as any other
            if not self._failed:
                logger.exception("the state of the machine cannot be read")
            self._failed = True
            self._awake.release()
            return Signals(), False


class _StayAwake:
    """Holds sleep off by a child process, which ends with this one: its child reads a pipe that nobody writes to."""

    def __init__(self, setting: str) -> None:
        """`setting`: `SLUICE_STAY_AWAKE`."""
        self._setting = setting
        self._wanted_at = float("-inf")  # monotonic
        self._child: subprocess.Popen[bytes] | None = None
        self._denied = False

    def hold(self, command: Sequence[str], running: Mapping[Lane, int], signals: Signals, now: float) -> bool:
        """Hold sleep off if jobs run, or did within a minute. Returns True if it is held off. `command`: see `Host`."""
        offline = not signals.on_battery or self._setting == "always"
        if running.get("interactive") or (offline and running.get("batch")):
            self._wanted_at = now
        if not command or self._setting == "off" or self._denied or now - self._wanted_at >= 60.0:
            self.release()
        elif self._child is None:
            self._start([*command, "cat"])
        elif self._child.poll() is not None:
            logger.info(
                "%s failed with code %d: the machine may sleep while jobs run", command[0], self._child.returncode
            )
            self._denied = True
            self.release()
        return self._child is not None

    def _start(self, command: Sequence[str]) -> None:
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            logger.info("%s: the machine may sleep while jobs run", error)
            self._denied = True

    def release(self) -> None:
        """Let the machine sleep. Blocks for two seconds at most."""
        if self._child is None or self._child.stdin is None:
            return
        self._child.stdin.close()
        try:
            self._child.wait(2.0)
        except subprocess.TimeoutExpired:
            self._child.kill()
        self._child = None
