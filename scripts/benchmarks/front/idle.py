"""What an idle stream costs a gateway: memory, and CPU time while nothing happens."""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from scripts.benchmarks.front.processes import cpu_s, resident_bytes
from scripts.benchmarks.front.ways import post
from scripts.scenarios.harness import paced_worker
from scripts.stack import FrontProcess, Server

STREAMS = 1_000
_ROWS = 512  # the most that a worker has; the other streams wait in the queue
_NEVER_MS = 3_600_000.0  # between two tokens
_HEARTBEAT_S = 5.0
_AT_ONCE = 250
_WATCHED_S = 10.0
_FILES = 4 * STREAMS


@dataclass(frozen=True, slots=True)
class Idle:
    """Costs of the gateway for each idle stream."""

    streams: int
    bytes_each: float
    cpu_us_per_s: float  # CPU microseconds in each second


def measure() -> Idle:
    """Open the streams on a gateway that has served as many before, and watch it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _FILES)), hard))
    with (
        Server() as server,
        paced_worker(server.url, step_ms=_NEVER_MS, lease_s=10, max_rows=_ROWS, reserved_rows=0),
        FrontProcess(server.url, heartbeat_s=_HEARTBEAT_S) as front,
    ):
        return asyncio.run(_measure(front))


async def _measure(front: FrontProcess) -> Idle:
    assert front.process is not None
    pid = front.process.pid
    async with _waiting(front.url):
        pass  # so that modules and pools are loaded
    before = resident_bytes(pid)
    async with AsyncExitStack() as stack:
        for _ in range(STREAMS // _AT_ONCE):
            await asyncio.gather(*(stack.enter_async_context(_waiting(front.url)) for _ in range(_AT_ONCE)))
        after, began = resident_bytes(pid), cpu_s(pid)
        await asyncio.sleep(_WATCHED_S)
        used_s = cpu_s(pid) - began
    return Idle(STREAMS, (after - before) / STREAMS, 1e6 * used_s / _WATCHED_S / STREAMS)


@asynccontextmanager
async def _waiting(url: str) -> AsyncIterator[None]:
    """Hold a stream whose response has begun."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(post({"messages": [{"role": "user", "content": "Hi."}]}))
        await reader.readuntil(b"\r\n\r\n")
        yield
    finally:
        writer.close()
