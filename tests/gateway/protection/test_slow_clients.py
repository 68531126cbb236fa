"""Clients that send or read too slowly lose their connections, and the gateway's memory stays bounded."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from sluice.gateway.protection import MAX_HEADER_BYTES, protocol
from tests.gateway.gateways import gateway_process
from tests.support.stack import GatewayProcess

TIMEOUT_S = 1.0
LENGTH = 2_000_000  # bytes of an answer in one piece
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def process(server_url: str) -> Iterator[GatewayProcess]:
    with gateway_process(server_url, client_timeout_s=TIMEOUT_S, max_body_bytes=1_000, no_worker_s=0) as gateway:
        yield gateway


@asynccontextmanager
async def connected(
    gateway: GatewayProcess, *parts: bytes
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = httpx.URL(gateway.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        for part in parts:
            writer.write(part)
        yield reader, writer
    finally:
        writer.close()


async def answer(gateway: GatewayProcess, *parts: bytes) -> tuple[bytes, float]:
    """Send the parts, and return all that is answered until the connection is closed, and the seconds until the first
    byte or the end."""
    started = time.monotonic()
    async with connected(gateway, *parts) as (reader, _), asyncio.timeout(60):
        first = await reader.read(1)
        seconds = time.monotonic() - started
        return first + await read_to_the_end(reader), seconds


async def read_to_the_end(reader: asyncio.StreamReader) -> bytes:
    read = bytearray()
    try:
        while part := await reader.read(2**16):
            read += part
    except ConnectionResetError:
        pass
    return bytes(read)


@pytest.mark.parametrize("sent", [b"", b"POST ", HEAD, HEAD + b"X: " + b"a" * 10_000])
async def test_a_client_that_does_not_complete_its_headers_is_disconnected(
    process: GatewayProcess, sent: bytes
) -> None:
    read, seconds = await answer(process, sent)
    assert read == b""
    assert TIMEOUT_S - 0.2 <= seconds < 5


async def test_a_client_that_drips_its_headers_is_disconnected_all_the_same(process: GatewayProcess) -> None:
    started = time.monotonic()
    async with connected(process, HEAD) as (reader, writer):
        reading = asyncio.create_task(reader.read())
        while not reading.done() and time.monotonic() < started + 10:
            writer.write(b"X: a\r\n")
            await asyncio.sleep(0.1)
        assert reading.done()
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    assert time.monotonic() - started < 5


async def test_half_a_second_request_on_a_connection_is_timed_too(process: GatewayProcess) -> None:
    read, seconds = await answer(process, b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEAD)
    assert read.startswith(b"HTTP/1.1 404")
    assert seconds < 5


async def test_a_body_that_does_not_arrive_is_408_and_the_end_of_the_connection(process: GatewayProcess) -> None:
    read, seconds = await answer(process, HEAD + b"Content-Length: 500\r\n\r\n{")
    assert read.startswith(b"HTTP/1.1 408")
    assert json.loads(read.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
    assert TIMEOUT_S - 0.2 <= seconds < 5


async def test_headers_beyond_the_limit_are_431_in_openai_s_form(process: GatewayProcess) -> None:
    read, _ = await answer(process, HEAD + b"X: " + b"a" * (MAX_HEADER_BYTES + 1))
    assert read.startswith(b"HTTP/1.1 431")
    assert json.loads(read.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9\r\n\r\n", HEAD + b"Content-Length: x\r\n\r\n"]
)
async def test_what_is_not_http_is_400_and_the_end_of_the_connection(process: GatewayProcess, sent: bytes) -> None:
    read, seconds = await answer(process, sent)
    assert read.startswith(b"HTTP/1.1 400")
    assert seconds < 5  # after the timeout it would be 408


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_beyond_the_limit_is_413_before_it_is_complete(process: GatewayProcess, chunked: bool) -> None:
    rest = b"Transfer-Encoding: chunked\r\n\r\n" if chunked else b"Content-Length: 1000000\r\n\r\n"
    body = b"2000\r\n" + b"a" * 0x2000 if chunked else b"a" * 2_000
    read, seconds = await answer(process, HEAD + rest + body)
    assert read.startswith(b"HTTP/1.1 413")
    assert seconds < 5  # after the timeout it would be 408


async def test_a_client_that_does_not_read_its_stream_is_disconnected(redis_url: str, fake_worker: None) -> None:
    say = ["x" * 50_000] * 200  # more than the buffers of two sockets hold
    body = json.dumps({"messages": [{"role": "user", "content": "Hi."}], "stream": True, "say": say}).encode()
    request = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    with gateway_process(redis_url, client_timeout_s=TIMEOUT_S) as gateway:
        async with connected(gateway, request) as (reader, writer):
            await writer.drain()
            await asyncio.sleep(4 * TIMEOUT_S)
            async with asyncio.timeout(10):
                read = await read_to_the_end(reader)
    assert b"200 OK" in read[:50]
    assert 50_000 < len(read) < len(body)


async def whole_answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer with `LENGTH` bytes in one message."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LENGTH)]})
    await send({"type": "http.response.body", "body": b"x" * LENGTH})


@asynccontextmanager
async def small_buffers() -> AsyncIterator[socket.socket]:
    """Serve `whole_answer` with a limit of 0.4 s, and yield a connected socket."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.socket() as client:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        server = uvicorn.Server(uvicorn.Config(whole_answer, http=protocol(0.4), lifespan="off", log_level="error"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listening.getsockname())
        try:
            yield client
        finally:
            client.close()
            server.should_exit = True
            await serving


@pytest.mark.timing
async def test_a_client_that_reads_a_long_answer_slowly_but_steadily_receives_all_of_it() -> None:
    loop, read = asyncio.get_running_loop(), 0
    async with small_buffers() as client:
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        while part := await loop.sock_recv(client, 65_536):
            read += len(part)
            await asyncio.sleep(0.05)
    assert read > LENGTH


def open_files(gateway: GatewayProcess) -> int:
    return len(list(Path(f"/proc/{gateway.pid}/fd").iterdir()))


async def test_connections_that_were_left_open_are_freed(process: GatewayProcess) -> None:
    before = open_files(process)
    for _ in range(20):
        async with connected(process, HEAD):
            pass
    async with httpx.AsyncClient(base_url=process.url) as http:
        assert (await http.get("/nowhere")).status_code == 404
    await until(lambda: open_files(process) <= before)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.05)
