"""Runs the application with uvicorn until a signal arrives."""

import asyncio
import logging
import signal
import socket
import sys
from types import FrameType

import uvicorn

from sluice.client import Client
from sluice.gateway.app import app
from sluice.gateway.gateway import Gateway
from sluice.gateway.settings import CannotServe, ServeSettings


def run(redis_url: str, settings: ServeSettings) -> None:
    """Serve until Ctrl-C or SIGTERM, and finish the open responses. Raises `CannotServe`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))  # uvicorn raises its signal again when it has drained
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    with _listen(settings) as listening:
        asyncio.run(_serve(listening, redis_url, settings))


def _listen(settings: ServeSettings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CannotServe(f"cannot listen on {settings.host} port {settings.port}: {reason}; choose another") from None


async def _serve(listening: socket.socket, redis_url: str, settings: ServeSettings) -> None:
    try:
        client = Client(redis_url)
    except ValueError as error:
        raise CannotServe(f"SLUICE_REDIS_URL: {error}") from None
    async with client:
        application = app(client, settings)
        config = uvicorn.Config(
            application,
            log_config=None,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=int(settings.drain_s),
        )
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        print(f"sluice: serving at http://{host}:{listening.getsockname()[1]}/v1", file=sys.stderr, flush=True)
        await _Server(config, application.state.gateway).serve(sockets=[listening])


class _Server(uvicorn.Server):
    """A uvicorn server that tells the front when it begins to drain."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain, in a signal handler."""
        self._gateway.drain()
        super().handle_exit(sig, frame)
