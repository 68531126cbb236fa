"""The HTTP gateway that `sluice up` starts next to its worker."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sluice.cli.embedded_server import pick_port
from sluice.cli.errors import CliError

if TYPE_CHECKING:
    from sluice.gateway.settings import ServeSettings

_PORT = 8000
_POLL_S = 0.1  # between two checks if the process serves
_EXIT_S = 5.0  # after which the process is killed


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

    async def start(self) -> None:
        """Start the process, which prints its address; return when it answers or has ended."""
        if self.base_url is None:
            return
        command = [sys.executable, "-m", "sluice.cli", "serve", "--port", str(self._port)]
        env = {**os.environ, "SLUICE_REDIS_URL": self._redis_url}  # command lines are public
        # Without its own session Ctrl-C would reach it twice, from the terminal and from `stop`.
        self._process = await asyncio.create_subprocess_exec(
            *command, start_new_session=True, stdin=subprocess.DEVNULL, env=env
        )
        while self._process.returncode is None and not self.serves:
            await asyncio.sleep(_POLL_S)
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
            async with asyncio.timeout(_EXIT_S):
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
    return all(find_spec(name) for name in ("prometheus_client", "pydantic_settings", "starlette", "uvicorn"))


def _settings() -> "ServeSettings":
    from sluice.gateway.settings import CannotServe, read_settings

    try:
        return read_settings()
    except CannotServe as error:
        raise CliError(str(error)) from None


def _port(settings: "ServeSettings", port: int | None) -> int:
    is_set = "port" in settings.model_fields_set
    wanted = settings.port if port is None and is_set else port
    return pick_port(wanted, default=_PORT, option="--http-port")
