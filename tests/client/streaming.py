"""Events as a worker would write them, and a client that follows them. Needs neither worker nor arq."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from sluice import Client
from sluice.contract import keys
from tests.line import Line
from tests.waiting import until

HELLO = [{"role": "user", "content": "Hello"}]


def event(seq: int, type: str = "delta", **more: Any) -> bytes:
    fields = {"token_ids": []} if type == "delta" else {"reason": "requested", "usage": {}}
    return json.dumps({"id": "a", "seq": seq, "attempt": 1, "type": type, "ts": 0, **fields, **more}).encode()


async def say(db: Redis, *events: bytes) -> None:
    for raw in events:
        await db.rpush(keys.log("a"), raw)
        await db.publish(keys.channel("a"), raw)


@asynccontextmanager
async def behind(url: str, *, own: bool = False, **options: Any) -> AsyncIterator[tuple[Line, Client]]:
    """A client behind a proxy; with `own`, one that was given a redis-py client as a backend makes it."""
    async with Line(url) as line:
        if not own:
            async with Client(line.url, **options) as client:
                yield line, client
            return
        async with Redis.from_url(line.url) as redis, Client(redis=redis, **options) as client:
            yield line, client


async def seqs(client: Client, job_id: str, **how: Any) -> list[int]:
    return [event.seq async for event in client.stream(job_id, **how)]


async def subscribed(db: Redis, channel: str, *, times: int = 1) -> None:
    async def is_subscribed() -> bool:
        return bool((await db.pubsub_numsub(channel))[0][1] == times)

    await until(is_subscribed)
