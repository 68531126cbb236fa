"""`sluice serve`, the HTTP gateway, and `sluice up`: a server, a worker and the gateway on this machine together."""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.cli.embedded_server import EmbeddedServer, default_folder, pick_port
from sluice.cli.errors import INSTALL, CliError, needs_gateway
from sluice.cli.options import (
    REDIS_URL,
    Checkpoints,
    ServedName,
    UntilStdinCloses,
    named_checkpoints,
    stop_when_stdin_closes,
)
from sluice.client import Client
from sluice.errors import SluiceError
from sluice.service_status import serving

if TYPE_CHECKING:
    from sluice.gateway.settings import ServeSettings


class GatewayProcess:
    """A process `sluice serve`. Without the extra `serve` it is none: `base_url` is None and `start` does nothing.
    `serves` is True from the time when it answers."""

    def __init__(self, redis_url: str, port: int | None) -> None:
        """`port`: by default SLUICE_SERVE_PORT, else 8000, or a free one if that is in use. Raises `CliError` for an
        invalid setting and a port in use."""
        self._process: asyncio.subprocess.Process | None = None
        self._redis_url = redis_url
        self.base_url: str | None = None
        self.needs_key = False
        self.serves = False
        if _is_installed():
            settings = _settings()
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            self._port = _port(settings, port)
            self._host = settings.host
            self.base_url = f"http://{host}:{self._port}/v1"
            self.needs_key = settings.keys is not None

    async def start(self, stdin: int) -> None:
        """Start the process, which prints its address and stops when `stdin` closes; return when it answers or has
        ended."""
        if self.base_url is None:
            return
        self.serves = False
        command = [sys.executable, "-m", "sluice.cli", "serve", "--port", str(self._port), "--until-stdin-closes"]
        # Command lines are public. An empty map overrides that of `.env`: here is one server.
        env = {**os.environ, "SLUICE_REDIS_URL": self._redis_url, "SLUICE_REDIS_URLS": ""}
        # Without its own session Ctrl-C would reach it twice, from the terminal and from `stop`.
        self._process = await asyncio.create_subprocess_exec(*command, start_new_session=True, stdin=stdin, env=env)
        while self._process.returncode is None and not self.serves:
            await asyncio.sleep(0.1)
            self.serves = await _answers(self._host, self._port)

    async def wait(self) -> int:
        """Wait until the process has ended, and return its exit code; without a process, wait forever."""
        if self._process is None:
            await asyncio.get_running_loop().create_future()
        assert self._process is not None
        return await self._process.wait()

    def drain(self) -> None:
        """Let the process finish its open responses and end; called again, end at once."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def stop(self) -> None:
        """End the process, and wait until it has ended."""
        if self._process is None:
            return
        self.drain()
        self.drain()
        try:
            async with asyncio.timeout(5.0):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def _answers(host: str, port: int) -> bool:
    """Return True if an HTTP server answers there."""
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return bool(await reader.readline())
    except OSError:
        return False
    finally:
        writer.close()


def _is_installed() -> bool:
    return all(
        find_spec(name) for name in ("httpcore2", "prometheus_client", "pydantic_settings", "starlette", "uvicorn")
    )


def _settings() -> "ServeSettings":
    from sluice.gateway.settings import CannotServe, read_serve_settings

    try:
        return read_serve_settings()
    except CannotServe as error:
        raise CliError(str(error)) from None


def _port(settings: "ServeSettings", port: int | None) -> int:
    is_set = "port" in settings.model_fields_set
    wanted = settings.port if port is None and is_set else port
    return pick_port(wanted, default=8000, option="--http-port")


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def up(
    model: Checkpoints = None,
    name: ServedName = None,
    max_rows: Annotated[int | None, typer.Option(metavar="N", help="SLUICE_MAX_ROWS: jobs at once.")] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            help="Port of the server.  [default: 6379, or a free one]",
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            metavar="PORT",
            help="SLUICE_SERVE_PORT: port of the HTTP gateway.  [default: 8000, or a free one]",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder in which the server keeps jobs and results for the next start.  "
            "[default: a folder of this user, which is printed]",
        ),
    ] = None,
) -> None:
    """Serve models here: start a server, a worker and the gateway.

    They run until Ctrl-C or SIGTERM. No Redis is needed. OpenAI clients reach the gateway at
    http://127.0.0.1:8000/v1. When the model is loaded, the command prints how other terminals reach it. The worker
    reads its settings from SLUICE_... and .env, as `sluice worker` does, and the gateway its own, SLUICE_SERVE_...,
    both except SLUICE_REDIS_URL. Several models share the memory: each is loaded when jobs ask for it, in a process of
    its own.

    \b
    Examples:
      sluice up --model mlx-community/Qwen3-4B-4bit
      sluice up --model small=mlx-community/Qwen3-4B-4bit --model mlx-community/Qwen3-32B-4bit
    """
    models = model or []
    if len(models) > 1:
        named_checkpoints(models, name)  # before anything starts
    flags = [*(("--model", each) for each in models), ("--name", name), ("--max-rows", max_rows)]
    options = [part for flag, value in flags if value is not None for part in (flag, str(value))]
    server = EmbeddedServer((data or default_folder()).expanduser(), port)
    code = asyncio.run(_Up(server, GatewayProcess(server.url, http_port), options).run())
    if code:
        raise typer.Exit(code)


class _Up:
    """Starts the server, then the worker and the gateway, and stops them in reverse order. Signals are forwarded.

    Worker and gateway read a pipe that closes with this process, also if it is killed.
    """

    def __init__(self, server: EmbeddedServer, gateway: GatewayProcess, options: list[str]) -> None:
        self._server, self._started_at = server, time.time()
        self._gateway = gateway
        worker = "worker", "--until-stdin-closes", *options, "--redis-url", server.url
        self._command = [sys.executable, "-m", "sluice.cli", *worker]
        self._lives, _ = os.pipe()  # its other end stays open as long as this process lives
        self._worker: asyncio.subprocess.Process | None = None
        self._stopped = False
        self._ready = False

    async def run(self) -> int:
        """Run until the worker or the server ends, and return the exit status of the command. Raises `CliError`."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._forward_signal, number)
        async with self._server:
            _print(f"server on port {self._server.port}, data in {self._server.folder}")
            if self._stopped:
                return 0
            # Without its own session Ctrl-C would reach it twice, from the terminal and from here.
            self._worker = await asyncio.create_subprocess_exec(
                *self._command, start_new_session=True, stdin=self._lives
            )
            try:
                return await self._watch(self._worker)
            finally:
                await self._gateway.stop()

    def _forward_signal(self, number: int) -> None:
        self._stopped = True
        self._gateway.drain()
        if self._worker is not None:
            with suppress(ProcessLookupError):
                self._worker.send_signal(number)

    async def _watch(self, worker: asyncio.subprocess.Process) -> int:
        """Wait until the worker has ended, or stop it if the server ends first. Return the exit status."""
        announcing = asyncio.create_task(self._serve_http())
        working, serving = asyncio.create_task(worker.wait()), asyncio.create_task(self._server.wait())
        await asyncio.wait([working, serving], return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        await asyncio.wait([announcing])
        if not working.done():
            _print(f"the server has ended (exit code {serving.result()}); see {self._server.log_file}")
            await _stop_worker(worker, working)
            return 1
        serving.cancel()
        if not self._stopped:
            _print(f"the worker has ended (exit code {working.result()})")
        elif not self._ready:
            return 0  # stopped while it loaded its model, so it held no job
        return working.result()

    async def _serve_http(self) -> None:
        """Wait until the worker and the gateway are ready and print how to reach them. Then start the gateway again
        whenever it ends, unless its settings are wrong."""
        worker = await self._serving_worker()
        self._ready = True
        await self._gateway.start(self._lives)
        _print_instructions(self._server.url, worker, self._gateway)
        async with serving():
            code = await self._gateway.wait()
            while code != 2 and not self._stopped:
                _print(f"the gateway has ended (exit code {code}); it is started again")
                await asyncio.sleep(2.0)  # as a service is
                if not self._stopped:
                    await self._gateway.start(self._lives)
                code = await self._gateway.wait()
            if not self._stopped:
                _print("the gateway cannot start; the worker continues. Start another with `sluice serve`")
            await asyncio.Event().wait()  # until cancelled

    async def _serving_worker(self) -> Mapping[str, str]:
        """Return what a worker publishes, as soon as it serves."""
        async with Client(self._server.url) as client:
            while True:
                with suppress(SluiceError):
                    for worker in await client.workers():
                        if float(worker["started_at"]) >= self._started_at:
                            return worker
                await asyncio.sleep(0.1)


async def _stop_worker(worker: asyncio.subprocess.Process, working: "asyncio.Task[int]") -> None:
    """Stop the worker quickly, with repeated signals. Without its server it cannot return its jobs; the next start
    resumes them."""
    while not working.done():
        with suppress(ProcessLookupError):
            worker.terminate()
        await asyncio.wait([working], timeout=1.0)  # seconds between two signals


def _print_instructions(url: str, worker: Mapping[str, str], gateway: GatewayProcess) -> None:
    """Print how to reach the model of a worker: to chat with it, or for embeddings if it is for these."""
    model, embeds = worker["model"], worker.get("embeddings") == "yes"
    command = "sluice" if shutil.which("sluice") or Path(sys.argv[0]).name != "sluice" else sys.argv[0]
    option = "" if model == "default" else f" --model {model}"
    call = f'{command} chat{option} "Count to 12."'
    if embeds:
        code = f'import sluice; print(sluice.SyncClient("{url}").embed("Hello!", model="{model}"))'
        call = f"{sys.executable} -c '{code}'"
    _print(
        "ready. In another terminal:\n\n"
        f"  export SLUICE_REDIS_URL={url}\n"
        f"  {call}\n\n"
        f"{_clients(gateway, model if embeds else None)}\n\n"
        "Ctrl-C here stops the worker, then the server. Waiting jobs are kept."
    )


def _clients(gateway: GatewayProcess, embedding_model: str | None = None) -> str:
    if gateway.base_url is None:
        return f"For OpenAI clients, install the HTTP gateway: {INSTALL}"
    if not gateway.serves:
        return "The HTTP gateway does not run; the lines above say why."
    key, about_key = ("KEY", ", with KEY one of SLUICE_SERVE_KEYS") if gateway.needs_key else ("none", "")
    variables = f"  export OPENAI_BASE_URL={gateway.base_url} OPENAI_API_KEY={key}"
    if embedding_model is None:
        example = f"\nIn a browser, a chat page: {gateway.base_url.removesuffix('/v1')}"
    else:
        header = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if gateway.needs_key else ""
        body = json.dumps({"model": embedding_model, "input": "Hello!"})
        example = f"  curl $OPENAI_BASE_URL/embeddings{header} \\\n    -d '{body}'"
    return f"For OpenAI clients{about_key}:\n\n{variables}\n{example}"


def _print(sentence: str) -> None:
    print(f"sluice: {sentence}", file=sys.stderr, flush=True)


def serve(
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="SLUICE_SERVE_HOST: address to listen on.  [default: 127.0.0.1]"),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65_535, metavar="PORT", help="SLUICE_SERVE_PORT: port to listen on.  [default: 8000]"),
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(metavar="URL", help="SLUICE_REDIS_URL: URL of the Redis server.")
    ] = None,
    until_stdin_closes: UntilStdinCloses = False,
) -> None:
    """Serve the queue over HTTP, to OpenAI's and Anthropic's clients.

    It runs until Ctrl-C or SIGTERM. Any number of these processes may serve one queue. Each setting is a variable
    SLUICE_SERVE_..., read from the environment or from .env in this folder; an option overrides both. .env.example
    in the repository lists them.

    \b
    Example:
      sluice serve --port 8000 --redis-url redis://localhost:6379/0
    """
    if until_stdin_closes:
        stop_when_stdin_closes()
    given = {"host": host, "port": port}
    with needs_gateway():
        from sluice.gateway.app import run_gateway
        from sluice.gateway.settings import CannotServe, read_redis_url, read_serve_settings
    try:
        settings = read_serve_settings(**{name: value for name, value in given.items() if value is not None})
        run_gateway(redis_url or read_redis_url(REDIS_URL), settings)
    except CannotServe as error:
        raise CliError(str(error)) from None
