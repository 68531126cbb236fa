"""Many clients at once on one gateway: what they cost while they wait, and what is left when they leave."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
import redis.asyncio

from tests.fakes import FakeChat
from tests.gateway.gateways import gateway_process
from tests.support.stack import GatewayProcess

CLIENTS = 200
IDLE = 1_000
MAX_BYTES_EACH = 100_000
BODY = json.dumps(
    {"messages": [{"role": "user", "content": "Hi."}], "stream": True, "say": ["a"], "then": "hang"}
).encode()


@pytest.fixture
def process(redis_url: str) -> Iterator[GatewayProcess]:
    with gateway_process(redis_url, heartbeat_s=60) as gateway:
        yield gateway


@asynccontextmanager
async def waiting(gateway: GatewayProcess, request: bytes) -> AsyncIterator[bytes]:
    """Send a request and hold its connection; yields what has come up to the first event."""
    url = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        writer.write(request)
        async with asyncio.timeout(60):
            yield await reader.readuntil(b"data: {")
    finally:
        writer.close()


def post(body: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def resident_bytes(gateway: GatewayProcess) -> int:
    status = Path(f"/proc/{gateway.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.slow
async def test_a_thousand_idle_streams_cost_at_most_100_kb_each(
    process: GatewayProcess, fake_worker: None, db: "redis.asyncio.Redis"
) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(waiting(process, post(BODY)))
        found = re.search(rb"x-request-id: (\S+)", first)
        assert found is not None
        resume = b"GET /v1/chat/completions/%b/stream HTTP/1.1\r\nHost: localhost\r\n\r\n" % found[1]
        before = resident_bytes(process)
        for _ in range(IDLE // 50):
            await asyncio.gather(*(stack.enter_async_context(waiting(process, resume)) for _ in range(50)))
        each = (resident_bytes(process) - before) / IDLE
        print(f"{each:,.0f} bytes for each of {IDLE:,} idle streams")
        assert 0 < each <= MAX_BYTES_EACH


async def test_clients_that_leave_free_their_connections_and_their_jobs(
    process: GatewayProcess, fake_worker: None, chat: FakeChat
) -> None:
    async with httpx.AsyncClient(base_url=process.url) as http:
        async with AsyncExitStack() as stack:
            for _ in range(CLIENTS // 20):
                await asyncio.gather(*(send_and_hold(stack, process) for _ in range(20)))
            await until_open(http, CLIENTS)
        await until_open(http, 0)
    async with asyncio.timeout(120):
        while chat.running:
            await asyncio.sleep(0.05)


async def until_open(http: httpx.AsyncClient, count: int) -> None:
    """Wait until the gateway answers so many requests, that for its metrics not counted."""
    async with asyncio.timeout(120):
        while f"sluice_serve_open_requests {count + 1}.0" not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.05)


async def send_and_hold(stack: AsyncExitStack, gateway: GatewayProcess) -> None:
    url = httpx.URL(gateway.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    stack.callback(writer.close)
    writer.write(post(BODY))
