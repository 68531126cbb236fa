"""Measures how soon a job is claimed and by which worker, and how soon a cancelled row is freed."""

import asyncio
import json
import time
from contextlib import AsyncExitStack

import redis.asyncio
from arq import create_pool
from arq.connections import RedisSettings

from sluice import Client
from sluice.contract.keys import Lane
from tests.support.chaos.harness import (
    FINAL,
    QUEUE,
    Figure,
    chat_request,
    paced_worker,
    percentile,
    record_all,
    running,
    submit_all,
    until_decoding,
)


async def pickups(client: Client, db: redis.asyncio.Redis, samples: int, *, every_s: float, tokens: int) -> list[float]:
    """Submit interactive jobs one by one, and return their seconds from submission to claim by the server's clock."""
    ids = []
    for i in range(samples):
        ids.append((await client.submit(chat_request(tokens), id=f"quick-{i:05}")).id)
        await asyncio.sleep(every_s)
    await record_all(client, ids)
    return [await queue_wait_s(db, job_id) for job_id in ids]


async def queue_wait_s(db: redis.asyncio.Redis, job_id: str) -> float:
    """Return the seconds from submission to claim."""
    times: list[bytes] = await db.hmget(f"sluice:job:{job_id}", ["queued_at", "started_at"])  # type: ignore[misc]
    return float(times[1]) - float(times[0])


async def keep_running(
    client: Client, rows: int, tokens: int, lane: Lane = "interactive", prefix: str = "long"
) -> list[str]:
    """Submit long jobs, wait until they decode, and return their ids."""
    ids = await submit_all(client, rows, chat_request(tokens), lane=lane, prefix=prefix)
    await until_decoding(client, ids, 2)
    return ids


async def with_running_rows(url: str, *, running: int, samples: int) -> list[Figure]:
    """Measure pickups while `running` rows decode."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced_worker(url, max_rows=running + 16, reserved_rows=0):
            long = await keep_running(client, running, 1_000_000)
            waits = await pickups(client, db, samples, every_s=0.012, tokens=2)
            for job_id in long:
                await client.cancel(job_id)
            await record_all(client, long)
    p50, p99 = percentile(waits, 0.5) * 1000, percentile(waits, 0.99) * 1000
    label = f"pickup with {running} running, {samples} samples"
    return [Figure(f"{label}: p99 (p50 {p50:.0f} ms)", "≤ 10 ms", f"{p99:.0f} ms", p99 <= 10)]


async def one_after_another(url: str, *, running: int, samples: int) -> list[Figure]:
    """Measure pickups of a plain arq producer that enqueues each job at the final event of the one before, while
    `running` rows decode. The worker claims at that moment too, in the same millisecond."""
    waits, redis_settings = [], RedisSettings.from_dsn(url)
    producer = await create_pool(redis_settings, job_serializer=_as_json, default_queue_name=QUEUE)
    async with Client(url) as client, producer as db:
        with paced_worker(url, max_rows=running + 16, reserved_rows=0, lease_s=10):
            long = await keep_running(client, running, 1_000_000, prefix=f"beside-{running}")
            async with db.pubsub() as events:
                await events.psubscribe("sluice:ch:plain-*")
                for i in range(samples):
                    began, job_id = time.time(), f"plain-{running}-{i:05}"
                    await db.enqueue_job("chat", chat_request(2), _job_id=job_id)
                    async for message in events.listen():
                        if message["type"] == "pmessage" and json.loads(message["data"])["type"] in FINAL:
                            break
                    waits.append(float(await db.hget(f"sluice:job:{job_id}", "started_at")) - began)  # type: ignore[misc]
            for job_id in long:
                await client.cancel(job_id)
            await record_all(client, long)
    p50, p99 = percentile(waits, 0.5) * 1000, percentile(waits, 0.99) * 1000
    label = f"pickup of a plain producer, one job after another, with {running} running, {samples} samples"
    return [Figure(f"{label}: p99 (p50 {p50:.0f} ms, at most {max(waits) * 1000:.0f})", "≤ 10 ms", f"{p99:.0f} ms",
                   p99 <= 10)]  # fmt: skip


def _as_json(envelope: dict[str, object]) -> bytes:
    return json.dumps(envelope).encode()


async def shared_bursts(url: str, *, workers: int, bursts: int) -> list[Figure]:
    """Submit bursts of 4, 8 and 16 jobs to idle workers, at once and one after another in turn, and count by how many
    jobs the workers differ."""
    differences = list[int]()
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db, AsyncExitStack() as stack:
        started = [await stack.enter_async_context(running(paced_worker(url, lease_s=10))) for _ in range(workers)]
        for burst in range(bursts):
            ids = [f"{workers}-workers-{burst}-{k}" for k in range((4, 8, 16)[burst % 3])]
            submits = [client.submit(chat_request(20), id=job_id) for job_id in ids]
            if burst % 2:
                await asyncio.gather(*submits)
            else:
                for submit in submits:
                    await submit
            await record_all(client, ids)
            owners = [await db.hget(f"sluice:job:{job_id}", "worker") for job_id in ids]
            jobs = [owners.count(worker.name.encode()) for worker in started]
            differences.append(max(jobs) - min(jobs))
    even = sum(difference <= 1 for difference in differences)
    label = f"bursts of 4, 8 and 16 jobs on {workers} idle workers: shared to one job (most: {max(differences)})"
    return [Figure(label, f"{bursts}", f"{even}", even == bursts)]


async def behind_a_backlog(url: str, *, backlog: int, samples: int) -> list[Figure]:
    """Measure pickups of interactive jobs behind a backlog of batch jobs."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        await submit_all(client, backlog, chat_request(100), lane="batch", prefix="batch")
        with paced_worker(url, max_rows=32, reserved_rows=8):
            waits = await pickups(client, db, samples, every_s=0.015, tokens=3)
            left = await client.queued("default", "batch")
    p99 = percentile(waits, 0.99) * 1000
    label = f"pickup behind {backlog} batch jobs ({left} still there at the end), {samples} samples"
    return [Figure(f"{label}: p99", "≤ 10 ms", f"{p99:.0f} ms", p99 <= 10)]


async def idle_commands(url: str, *, seconds: float) -> list[Figure]:
    """Count the commands that an idle worker sends."""
    async with redis.asyncio.Redis.from_url(url) as db:
        with paced_worker(url, lease_s=10):
            await asyncio.sleep(1)
            before = await db.info("stats")
            await asyncio.sleep(seconds)
            after = await db.info("stats")
    rate = (after["total_commands_processed"] - before["total_commands_processed"]) / seconds
    return [Figure("commands a second of an idle worker", "≤ 50", f"{rate:.0f}", rate <= 50)]


async def cancelled(url: str, *, samples: int, step_ms: float = 20) -> list[Figure]:
    """Measure the seconds from a cancel request to the final event, which follows the removal of the row."""
    took = []
    async with Client(url) as client:
        with paced_worker(url, step_ms=step_ms, reserved_rows=0):
            ids = await submit_all(client, samples, chat_request(100_000))
            await until_decoding(client, ids, 3)
            for job_id in ids:
                began = time.monotonic()
                await client.cancel(job_id)
                await record_all(client, [job_id])
                took.append(time.monotonic() - began)
    slowest, limit = max(took) * 1000, 50 + step_ms
    return [Figure(f"cancel to the end of the row, slowest of {samples}", f"≤ {limit:.0f} ms", f"{slowest:.0f} ms",
                   slowest <= limit)]  # fmt: skip
