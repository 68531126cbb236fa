"""Where a program runs: a home of its own, no network but loopback, no keys, no telemetry."""

import ctypes
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.support.stack import ROOT

_CLONE_NEWUSER, _CLONE_NEWNET = 0x1000_0000, 0x4000_0000  # of <linux/sched.h>
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # of <linux/sockios.h> and <linux/if.h>
_POLL_S = 0.1
QUIET = {
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "CI": "1",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "LANG": "C.UTF-8",
    "GIT_CONFIG_GLOBAL": "/dev/null",
}


class NoSandbox(Exception):
    """This machine gives no network namespace; the message has the reason."""


def leave_network() -> None:
    """Put this thread, and all that it starts, into a network that has loopback alone. Raises `NoSandbox`."""
    if not sys.platform.startswith("linux"):
        raise NoSandbox("programs run without network but loopback, which needs Linux: use a container or a machine")
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) != 0:
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            raise NoSandbox(f"`unshare -n` is not allowed here ({reason}); allow user namespaces, or run as root")
        _map_user(user, group)
    request = struct.pack("16sh", b"lo", _IFF_UP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, request)


def try_to_leave_network() -> None:
    """Do `leave_network` in a process of its own. Raises `NoSandbox`."""
    code = f"from {__name__} import NoSandbox, leave_network\ntry: leave_network()\nexcept NoSandbox as e: exit(str(e))"
    tried = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    if tried.returncode != 0:
        raise NoSandbox(tried.stderr.strip())


def _map_user(user: int, group: int) -> None:
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1", encoding="ascii")


@dataclass(frozen=True, slots=True)
class Ran:
    """What a program printed, and its exit code; None if it was stopped after its time."""

    code: int | None
    output: str
    errors: str

    @property
    def last_words(self) -> str:
        """The end of what it printed, for a reason."""
        return " ".join(f"{self.output[-200:]} {self.errors[-300:]}".split())[-400:]


@dataclass(frozen=True, slots=True)
class Started:
    """A program that runs, and the files that it prints to."""

    process: "subprocess.Popen[bytes]"
    output: Path
    errors: Path

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the program and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def end(self, timeout_s: float) -> Ran:
        """Wait for the program, and stop it and its children after `timeout_s`."""
        code: int | None
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        self.signal(signal.SIGKILL)
        self.process.wait()
        return Ran(code, self.output.read_text("utf-8", "replace"), self.errors.read_text("utf-8", "replace"))


def _with_home(folder: Path) -> list[int]:
    """Return the processes whose HOME is this folder."""
    sought, found = f"HOME={folder}".encode(), list[int]()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            if sought in environment.read_bytes().split(b"\0"):
                found.append(int(environment.parent.name))
    return found


class Home:
    """A home folder and a project in it, deleted after the block."""

    def __init__(self, path: str, environment: Mapping[str, str]) -> None:
        """`path`: of executables. `environment`: in addition to `QUIET`."""
        self._temporary = tempfile.TemporaryDirectory(prefix="sluice-home-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name) / "home"
        self.project = self.folder / "project"
        self._started = list[Started]()
        self.project.mkdir(parents=True)
        self._environment = {**QUIET, "HOME": str(self.folder), "PATH": path, **environment}

    def __enter__(self) -> Self:
        git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
        for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "Begin"]):
            if shutil.which("git"):
                subprocess.run([*git, *command], cwd=self.project, check=True, env=self._environment)
        return self

    def __exit__(self, *_: object) -> None:
        for started in self._started:  # also after Ctrl-C, or a check that failed before the end of its program
            started.end(0)
        for process in _with_home(
            self.folder
        ):  # a program may leave a process of its own session behind, as Cline does
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._temporary.cleanup()

    def start(self, command: Sequence[str]) -> Started:
        """Start a program in the project. It prints to files: children that outlive it must not hold it up."""
        number = len(list(self.folder.glob("output-*")))
        output, errors = self.folder / f"output-{number}", self.folder / f"errors-{number}"
        with output.open("w", encoding="utf-8") as out, errors.open("w", encoding="utf-8") as err:
            process = subprocess.Popen(
                command, cwd=self.project, env=self._environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        self._started.append(Started(process, output, errors))
        return self._started[-1]

    def run(self, command: Sequence[str], timeout_s: float) -> Ran:
        """Run a program to its end."""
        return self.start(command).end(timeout_s)
