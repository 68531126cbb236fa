"""Runs the application with uvicorn until a signal arrives."""

import asyncio
import socket

import uvicorn

from sluice.client import Client
from sluice.gateway.app import app
from sluice.gateway.settings import CannotServe, ServeSettings


def run(redis_url: str, settings: ServeSettings) -> None:
    """Serve until Ctrl-C or SIGTERM. Raises `CannotServe`."""
    listening = _listen(settings)
    with listening:
        asyncio.run(_serve(listening, redis_url, settings))


def _listen(settings: ServeSettings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        return socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise CannotServe(f"cannot listen on {settings.host} port {settings.port}: {error}; choose another") from None


async def _serve(listening: socket.socket, redis_url: str, settings: ServeSettings) -> None:
    try:
        client = Client(redis_url)
    except ValueError as error:
        raise CannotServe(f"SLUICE_REDIS_URL: {error}") from None
    async with client:
        config = uvicorn.Config(
            app(client, settings),
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(settings.drain_s),
        )
        print(f"sluice: serving at http://{settings.host}:{listening.getsockname()[1]}/v1", flush=True)
        await uvicorn.Server(config).serve(sockets=[listening])
