"""A backend that imports nothing of ours gets its tokens from the channel and the list, as the contract says."""

import asyncio
import json
import time
from typing import Any

import pytest
import redis.asyncio
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings

from tests.support.stack import WorkerProcess

QUEUE = "sluice:queue:default:interactive"
COUNT = {"messages": [{"role": "user", "content": "Count to 12."}]}


async def plain_pool(url: str) -> ArqRedis:
    return await create_pool(RedisSettings.from_dsn(url), job_serializer=lambda job: json.dumps(job).encode())


async def follow(db: redis.asyncio.Redis, job_id: str) -> list[dict[str, Any]]:
    """The contract's subscribe, by hand."""
    events: dict[int, dict[str, Any]] = {}
    async with db.pubsub() as pubsub:
        await pubsub.subscribe(f"sluice:ch:{job_id}")
        while not any(e["type"] in ("finished", "failed", "cancelled") for e in events.values()):
            message = await pubsub.get_message(timeout=1)
            if message is not None and message["type"] == "message":
                event = json.loads(message["data"])
                events.setdefault(event["seq"], event)
            else:
                said = await db.lrange(f"sluice:log:{job_id}", 0, -1)
                events |= {e["seq"]: e for e in map(json.loads, said)}
    return [events[seq] for seq in sorted(events)]


async def test_a_plain_arq_producer_reads_every_token_from_the_channel(
    worker: WorkerProcess, redis_url: str, db: redis.asyncio.Redis
) -> None:
    pool = await plain_pool(redis_url)
    following = asyncio.create_task(follow(db, "raw-1"))
    await asyncio.sleep(0.1)
    await pool.enqueue_job("chat", COUNT, _job_id="raw-1", _queue_name=QUEUE)
    events = await asyncio.wait_for(following, 20)

    assert [e["seq"] for e in events] == list(range(len(events)))
    assert {e["attempt"] for e in events} == {1}
    assert events[0]["type"] == "started"
    assert events[-1]["type"] == "finished"
    deltas = [e for e in events if e["type"] == "delta"]
    assert "".join(e.get("content", "") for e in deltas) == "1 2 3 4 5 6 7 8 9 10 11 12"
    assert events[-1]["usage"]["completion_tokens"] == sum(len(e["token_ids"]) for e in deltas)
    assert [json.loads(e) for e in await db.lrange("sluice:log:raw-1", 0, -1)] == events


async def test_the_result_and_the_state_are_there_with_the_final_event(
    worker: WorkerProcess, redis_url: str, db: redis.asyncio.Redis
) -> None:
    pool = await plain_pool(redis_url)
    await pool.enqueue_job("chat", COUNT, _job_id="raw-2", _queue_name=QUEUE)
    await asyncio.wait_for(follow(db, "raw-2"), 20)
    result = json.loads(await db.get("sluice:result:raw-2"))
    assert result["object"] == "chat.completion"
    assert result["choices"][0]["message"]["content"] == "1 2 3 4 5 6 7 8 9 10 11 12"
    assert result["usage"]["total_tokens"] == sum(
        result["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    )
    job = await db.hgetall("sluice:job:raw-2")
    assert (job[b"state"], job[b"attempt"], job[b"crashes"]) == (b"finished", b"1", b"0")
    left = {key async for key in db.scan_iter() if b"raw-2" in key}
    assert left == {b"sluice:log:raw-2", b"sluice:result:raw-2", b"sluice:job:raw-2"}
    assert all([await db.ttl(key) > 0 for key in left])
    assert await db.zcard(QUEUE) == 0


@pytest.mark.timing
async def test_a_plain_producer_is_served_without_waiting_for_a_poll(
    worker: WorkerProcess, redis_url: str, db: redis.asyncio.Redis
) -> None:
    """The worker polls once a second; keyspace events wake it in milliseconds."""
    pool = await plain_pool(redis_url)
    waits = []
    for i in range(8):
        began = time.perf_counter()
        await pool.enqueue_job("chat", COUNT | {"max_tokens": 1}, _job_id=f"quick-{i}", _queue_name=QUEUE)
        while not await db.exists(f"sluice:log:quick-{i}"):
            await asyncio.sleep(0.002)
        waits.append(time.perf_counter() - began)
    assert sorted(waits)[4] < 0.3, f"the median of {waits}"
