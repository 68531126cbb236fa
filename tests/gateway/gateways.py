"""Gateways on real sockets: in a thread of this process, which is quick, or as processes that can be killed."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from sluice.gateway import ServeSettings, app
from sluice.mapped import open_client
from tests.support.stack import GatewayProcess, free_port


@dataclass(frozen=True)
class HttpGateway:
    """A gateway that accepts connections; `base_url` is what OpenAI clients are given."""

    url: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def serving(redis_url: str, settings: ServeSettings) -> Iterator[HttpGateway]:
    """Serve in a thread until the end of the block."""
    port, ready = free_port(), threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with open_client(redis_url) as client:
            config = uvicorn.Config(app(client, settings), port=port, log_level="error", timeout_graceful_shutdown=1)
            servers.append(uvicorn.Server(config))
            ready.set()
            await servers[0].serve()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        ready.wait(20)
        while not servers[0].started:
            time.sleep(0.005)
        yield HttpGateway(f"http://127.0.0.1:{port}")
    finally:
        servers[0].should_exit = True
        thread.join()


@contextmanager
def gateway_process(redis_url: str, *, port: int | None = None, **settings: object) -> Iterator[GatewayProcess]:
    """Run `sluice serve` until the end of the block, and kill it there: it would wait for streams that are open."""
    gateway = GatewayProcess(redis_url, port=port, **settings)
    try:
        yield gateway.start()
    finally:
        gateway.kill()
        gateway.stop()


def events(body: str) -> list[Any]:
    """Return the JSON data of the events of a stream."""
    lines = (line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]
