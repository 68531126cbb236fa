"""Fronts on real sockets: in a thread of this process, which is quick, or as processes that can be killed."""

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from scripts.stack import ROOT, free_port
from sluice import Client
from sluice.gateway import ServeSettings, app


@dataclass(frozen=True)
class Front:
    """A front that accepts connections; `base_url` is what OpenAI clients are given."""

    url: str

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def serving(redis_url: str, settings: ServeSettings) -> Iterator[Front]:
    """Serve in a thread until the end of the block."""
    port, ready = free_port(), threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with Client(redis_url) as client:
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
        yield Front(f"http://127.0.0.1:{port}")
    finally:
        servers[0].should_exit = True
        thread.join()


@dataclass(frozen=True)
class FrontProcess(Front):
    """A process `sluice serve`."""

    process: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")


@contextmanager
def front_process(
    redis_url: str, folder: Path, on_port: int | None = None, **settings: object
) -> Iterator[FrontProcess]:
    """Run `sluice serve` in `folder` until the end of the block. `no_worker_s=1` is SLUICE_SERVE_NO_WORKER_S=1."""
    port = on_port or free_port()
    ours = {f"SLUICE_SERVE_{name.upper()}": str(value) for name, value in settings.items()}
    others = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    env = {**others, **ours, "SLUICE_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
    log_file = folder / f"front-{port}.log"
    command = [sys.executable, "-m", "sluice.cli", "serve", "--port", str(port)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    front = FrontProcess(f"http://127.0.0.1:{port}", process, log_file)
    try:
        _wait_until_it_accepts(front)
        yield front
    finally:
        process.kill()
        process.wait()


def events(body: str) -> list[Any]:
    """Return the JSON data of the events of a stream."""
    lines = (line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _wait_until_it_accepts(front: FrontProcess) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            httpx.get(front.url)
            return
        except httpx.TransportError:
            assert front.process.poll() is None, front.log()
            assert time.monotonic() < deadline, front.log()
            time.sleep(0.02)
