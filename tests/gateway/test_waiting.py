"""Streams of the gateway in whose middle the last worker goes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from tests.waiting import until

HELLO = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO, "stream": True},
    "/v1/messages": {"model": "default", "max_tokens": 9, "messages": HELLO, "stream": True},
    "/v1/responses": {"model": "default", "input": "Hi.", "stream": True},
}


async def serve(db: Redis) -> None:
    await db.hset(keys.model("default"), "ada", f"100 0 {time.time() + 60:.0f} 0 0")
    await db.hset(keys.worker("ada"), mapping={"name": "ada", "model": "default"})


async def write(db: Redis, job_id: str, seq: int, type: str, **more: Any) -> None:
    raw = json.dumps({"id": job_id, "seq": seq, "attempt": 1, "type": type, "ts": 1, **more})
    await db.rpush(keys.log(job_id), raw)
    await db.publish(keys.channel(job_id), raw)


async def begun(db: Redis) -> str:
    """Return the id of the job that was queued, after a worker has begun it."""

    async def ids() -> list[bytes]:
        found: list[bytes] = await db.zrange(keys.queue("default", "interactive"), 0, -1)
        return found

    await until(ids)
    job_id = (await ids())[0].decode()
    await db.hset(keys.job(job_id), mapping={"state": "running", "attempt": 1})
    await write(db, job_id, 0, "started", model="default", fingerprint="f", worker="ada", seed=1)
    await write(db, job_id, 1, "delta", token_ids=[1], content="Hi")
    return job_id


async def until_line(lines: AsyncIterator[str], wanted: str) -> None:
    async with asyncio.timeout(10):
        async for line in lines:
            if line == wanted:
                return
    raise AssertionError("the stream ended before")


@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_tells_that_its_last_worker_has_gone(db: Redis, http: httpx.AsyncClient, path: str) -> None:
    await serve(db)
    beginning = asyncio.create_task(begun(db))  # the reply comes with the first event
    async with http.stream("POST", path, json=BODIES[path]) as reply:
        lines, _ = reply.aiter_lines(), await beginning
        await db.delete(keys.model("default"))
        await until_line(lines, ": waiting, workers=0")
        await serve(db)
        await until_line(lines, ": waiting, workers=1")


async def test_a_stream_without_a_worker_ends_at_its_deadline(db: Redis, http: httpx.AsyncClient) -> None:
    await serve(db)
    body = {**BODIES["/v1/chat/completions"], "deadline_s": 2}
    beginning = asyncio.create_task(begun(db))
    async with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        job_id = await beginning
        await db.delete(keys.model("default"))
        text = (await asyncio.wait_for(reply.aread(), 20)).decode()
    assert '"code":"deadline"' in text
    assert await db.hget(keys.job(job_id), "state") == b"failed"
    assert await db.exists(keys.body(job_id)) == 0
