"""Starts one server at a time, and stops it again."""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from scripts.benchmarks.serve import clients
from scripts.benchmarks.serve.driver import Send
from tests.support.stack import ROOT, GatewayProcess, Server, WorkerProcess, free_port

OURS = "sluice"
BASELINE = "baseline"
MLX_SERVER = "mlx_lm.server"
ROWS = 32
_MLX_COMMAND = f"{shlex.quote(sys.executable)} -m mlx_lm server --model {{model}} --port {{port}} --log-level ERROR"
_LOG_CHARACTERS = 2000  # of a log that is quoted

Connect = Callable[[bool], AbstractAsyncContextManager[Send]]  # True: over HTTP, also to our worker


class NotServing(RuntimeError):
    """A server that does not come up, or an endpoint that does not answer."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A server to measure; `serve` runs it as long as its context lasts and yields the way to it."""

    name: str
    serve: Callable[[Path], AbstractContextManager[Connect]]  # of the model's folder
    ours: bool = False  # a worker of this project, or of another checkout of it


def worker(name: str = OURS, root: Path = ROOT) -> Contender:
    """Return a worker with the code of the checkout at `root`: 32 rows, all other settings by default."""
    return Contender(name, partial(_worker, root), ours=True)


def mlx_server() -> Contender:
    """Return the server that comes with mlx-lm, with its defaults."""
    return command(f"{MLX_SERVER}={_MLX_COMMAND}", start_s=120.0)


def command(text: str, start_s: float) -> Contender:
    """Return a server that a command starts: `NAME=COMMAND` with `{model}` and `{port}`. Raises ValueError."""
    name, equals, line = text.partition("=")
    if not equals or not name.strip() or "{model}" not in line or "{port}" not in line:
        raise ValueError("give NAME=COMMAND, and in the command {model} and {port}")
    return Contender(name.strip(), partial(_command, name.strip(), shlex.split(line), start_s))


def endpoint(url: str, model: str | None, key: str | None) -> Contender:
    """Return a server that already runs; it must serve the same model. Raises ValueError if `url` is no URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    root = url.rstrip("/").removesuffix("/v1") + "/v1"
    return Contender(parts.netloc.rpartition("@")[2], lambda _: _endpoint(root, model, key))


@contextmanager
def _worker(root: Path, model: Path) -> Iterator[Connect]:
    with Server() as server, ExitStack() as stack:
        process = WorkerProcess(server.url, model=model, root=root, max_rows=ROWS)
        stack.callback(process.stop)
        try:
            process.start()
        except RuntimeError as error:
            raise NotServing(f"{root}: {error}") from None

        def connect(over_http: bool) -> AbstractAsyncContextManager[Send]:
            if not over_http:
                return clients.queue(server.url, "default")
            gateway = GatewayProcess(server.url, root=root)
            stack.callback(gateway.stop)
            try:
                gateway.start()
            except RuntimeError as error:
                raise NotServing(f"{root}: {error}") from None
            return clients.openai(gateway.base_url, "default")

        yield connect


@contextmanager
def _endpoint(url: str, model: str | None, key: str | None) -> Iterator[Connect]:
    served = model or _first_model(url, key)
    yield lambda _: clients.openai(url, served, key)


@contextmanager
def _command(name: str, arguments: list[str], start_s: float, model: Path) -> Iterator[Connect]:
    port = free_port()
    filled = [each.replace("{model}", str(model)).replace("{port}", str(port)) for each in arguments]
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(filled, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise NotServing(f"{name}: cannot be started ({error}); check the command") from None
        try:
            _wait(name, process, port, start_s, lambda: _tail(log.fileno()))
            url = f"http://127.0.0.1:{port}/v1"
            # mlx_lm.server lists the models of the hub's cache, and has another name for its own.
            served = None if name == MLX_SERVER else _first_model(url, None)
            yield lambda _: clients.openai(url, served)
        finally:
            _kill(process)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the server and its children: it has no state to save."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _wait(name: str, process: "subprocess.Popen[bytes]", port: int, start_s: float, log: Callable[[], str]) -> None:
    deadline = time.monotonic() + start_s
    while not _healthy(port):
        if process.poll() is not None:
            raise NotServing(f"{name}: ended with {process.returncode} before it answered. Its log ends:\n{log()}")
        if time.monotonic() > deadline:
            raise NotServing(f"{name}: no answer from port {port} within {start_s:g} s. Its log ends:\n{log()}")
        time.sleep(0.1)


def _healthy(port: int) -> bool:
    """True if the server answers a health check, or lists its models if it has no such check."""
    try:
        codes = (
            httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5, trust_env=False).status_code
            for path in ("/health", "/v1/models")
        )
        return 200 in codes
    except httpx.TransportError:
        return False


def _first_model(url: str, key: str | None) -> str:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        listed = httpx.get(f"{url}/models", headers=headers, timeout=10, trust_env=False).raise_for_status().json()
        return str(listed["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise NotServing(f"{url}/models: no list of models ({error!r}); check the URL, or name the model") from None


def _tail(file: int) -> str:
    size = os.fstat(file).st_size
    return os.pread(file, _LOG_CHARACTERS, max(0, size - _LOG_CHARACTERS)).decode(errors="replace")
