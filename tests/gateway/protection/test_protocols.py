"""The HTTP protocol of the gateway: limits of headers, several requests on a connection, and offers of an upgrade."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from sluice.gateway.protection import MAX_HEADER_BYTES, protocol

HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
CLOSING = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def early_answer(scope: Any, receive: Any, send: Any) -> None:
    """Answer without reading the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """The port of a server that answers every request at once."""
    async with serving(early_answer) as number:
        yield number


@asynccontextmanager
async def serving(application: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(
        application, port=0, http=protocol(30), lifespan="off", log_level="warning", log_config=None, ws="none",
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )  # fmt: skip
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await running


async def answer(port: int, *parts: bytes) -> bytes:
    """Send the parts, and return all that is answered until the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    read = b""
    try:
        async with asyncio.timeout(20):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.01)
            while part := await reader.read(65_536):
                read += part
    except ConnectionResetError:
        pass
    finally:
        writer.close()
    return read


async def test_headers_that_do_not_end_are_431_beyond_the_limit(port: int) -> None:
    read = await answer(port, HEAD + b"X: ", *[b"a" * 8_192] * (MAX_HEADER_BYTES // 8_192 + 1))
    assert read.startswith(b"HTTP/1.1 431")
    assert json.loads(read.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


async def test_what_is_not_http_is_400(port: int) -> None:
    assert (await answer(port, b"\x16\x03\x01\x02\r\n\r\n")).startswith(b"HTTP/1.1 400")


async def test_headers_below_the_limit_are_accepted_on_each_request_of_a_connection(port: int) -> None:
    long = HEAD + b"X: " + b"a" * (MAX_HEADER_BYTES - 1_000) + b"\r\nContent-Length: 2\r\n\r\nhi"
    assert (await answer(port, long, long, CLOSING)).count(b"200 OK") == 3


async def test_requests_that_are_sent_at_once_are_answered_in_turn(port: int) -> None:
    assert (await answer(port, HEAD + b"Content-Length: 2\r\n\r\nhi" + CLOSING)).count(b"200 OK") == 2


async def test_the_body_of_a_request_that_offers_an_upgrade_is_read_and_nothing_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Java's HttpClient offers HTTP/2 with every request."""

    async def echo(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
        await send({"type": "http.response.body", "body": b"read: " + body})

    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    async with serving(echo) as number:
        with caplog.at_level("WARNING", "uvicorn.error"):
            assert b"read: hi" in await answer(number, HEAD + offer + b"Content-Length: 2\r\n\r\nhi")
    assert caplog.messages == []
