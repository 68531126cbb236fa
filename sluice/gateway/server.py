"""Runs the application with uvicorn until a signal arrives."""

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import sys
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from sluice.client import Client
from sluice.gateway.app import app
from sluice.gateway.gateway import Gateway
from sluice.gateway.keys.file import BadKeyFile
from sluice.gateway.protection.local import LocalOnly
from sluice.gateway.protection.protocol import MAX_HEADER_BYTES, protocol
from sluice.gateway.settings import CannotServe, ServeSettings
from sluice.log_lines import line_handler

_GARBAGE_OBJECTS = 10_000  # allocated containers between two collections, instead of 700


def run(redis_url: str, settings: ServeSettings) -> None:
    """Serve until Ctrl-C or SIGTERM, and finish the open responses. Raises `CannotServe`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))  # uvicorn raises its signal again when it has drained
    set_up_logging()
    with listen(settings) as listening:
        asyncio.run(_serve(listening, redis_url, settings))


def set_up_logging() -> None:
    """Log to stderr; libraries from WARNING on."""
    logging.basicConfig(level=logging.WARNING, handlers=[line_handler()])
    logging.getLogger("sluice.gateway").setLevel(logging.INFO)


def listen(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens at the address of the settings. Raises `CannotServe`."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except OSError as error:
        problem = f"cannot listen on {settings.host} port {settings.port}: {_reason(error)}"
        raise CannotServe(problem) from None


def _reason(error: OSError) -> str:
    """Return why the gateway cannot listen, and what to change."""
    match error:
        case OSError(errno=errno.EADDRINUSE):
            return "another process listens there; choose another port with --port."
        case OSError(errno=errno.EACCES):
            return "this user may not listen there; choose a port from 1024 on with --port."
        case OSError(errno=errno.EADDRNOTAVAIL) | socket.gaierror():
            return "this machine does not have that address; choose another with --host."
    system = os.strerror(error.errno or 0)  # `strerror` of the error repeats the address
    return f"{system}; choose another with --host and --port."


async def _serve(listening: socket.socket, redis_url: str, settings: ServeSettings) -> None:
    try:
        client = Client(redis_url)
    except ValueError as error:
        raise CannotServe(f"SLUICE_REDIS_URL: {error}") from None
    async with client:
        application = _application(client, settings)
        config = uvicorn.Config(
            application if settings.keys else LocalOnly(application, settings.allowed_origins),
            http=protocol(settings.client_timeout_s),
            ws="none",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(settings.drain_s),
        )
        if settings.keys is None:
            print("sluice: no keys are set (SLUICE_SERVE_KEYS), so only this machine is answered", file=sys.stderr)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        print(f"sluice: serving at http://{host}:{listening.getsockname()[1]}/v1", file=sys.stderr, flush=True)
        _collect_garbage_rarely()
        await _Server(config, application.state.gateway).serve(sockets=[listening])


def _collect_garbage_rarely() -> None:
    """Exempt the loaded modules from garbage collection, and let more be allocated between two collections: a burst of
    requests would run it all the time, and find nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GARBAGE_OBJECTS)


def _application(client: Client, settings: ServeSettings) -> Starlette:
    try:
        return app(client, settings)
    except BadKeyFile as error:
        raise CannotServe(f"SLUICE_SERVE_KEYS: {error}") from None


class _Server(uvicorn.Server):
    """A uvicorn server that tells the gateway when it begins to drain."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, in a signal handler."""
        self._gateway.drain()
        super().handle_exit(sig, frame)
