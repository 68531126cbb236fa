"""Clients that leave are noticed, whatever they have announced and not sent."""

import asyncio

import httpx
import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.contract import keys
from sluice.gateway import ServeSettings
from tests.fakes import FakeChat
from tests.gateway.gateways import serving
from tests.queue.helpers import settings, until, working

TIMEOUT_S = 0.2
JOB = "chatcmpl-left"


@pytest.mark.parametrize("body", [b"Content-Length: 10\r\n\r\n", b"Content-Length: 10\r\n\r\n{", b"\r\n"])
async def test_the_stream_of_a_client_that_leaves_without_its_body_ends(
    redis_url: str, db: Redis, client: Client, chat: FakeChat, body: bytes
) -> None:
    async def subscribers() -> int:
        ((_, number),) = await db.pubsub_numsub(keys.channel(JOB))
        return int(number)

    async def is_read() -> bool:
        return await subscribers() == 1

    async def is_read_no_more() -> bool:
        return await subscribers() == 0

    with serving(redis_url, ServeSettings(_env_file=None, client_timeout_s=TIMEOUT_S)) as gateway:
        async with working(settings(redis_url), chat.chat):
            request = {"messages": [{"role": "user", "content": "Hi."}]}
            await client.submit({**request, "say": ["word"] * 10_000, "pace_s": 0.02}, id=JOB)
            url = httpx.URL(gateway.url)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f"GET /v1/chat/completions/{JOB}/stream HTTP/1.1\r\nHost: localhost\r\n".encode() + body)
            await until(is_read)
            await reader.readuntil(b"word")
            await asyncio.sleep(2 * TIMEOUT_S)  # beyond the time that a body may take
            assert await subscribers() == 1
            writer.close()
            await until(is_read_no_more)
