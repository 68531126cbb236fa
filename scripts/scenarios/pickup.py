"""How soon a job is taken, and a row given back."""

import asyncio
import time

import redis.asyncio

from scripts.scenarios.harness import (
    Figure,
    ask,
    paced,
    percentile,
    submit_all,
    until_decoding,
    watch_all,
)
from scripts.stack import WorkerProcess
from sluice import Client
from sluice.wire import Lane


async def pickups(client: Client, db: redis.asyncio.Redis, samples: int, *, every_s: float, tokens: int) -> list[float]:
    """Seconds from the queue to the claim, by the server's clock, of interactive jobs that come one by one."""
    ids = []
    for i in range(samples):
        ids.append((await client.submit(ask(tokens), id=f"quick-{i:05}")).id)
        await asyncio.sleep(every_s)
    await watch_all(client, ids)
    return [await waited(db, job_id) for job_id in ids]


async def waited(db: redis.asyncio.Redis, job_id: str) -> float:
    times: list[bytes] = await db.hmget(f"sluice:job:{job_id}", ["queued_at", "started_at"])  # type: ignore[misc]
    return float(times[1]) - float(times[0])


async def _length(db: redis.asyncio.Redis, key: str) -> int:
    length: int = await db.llen(key)  # type: ignore[misc]
    return length


async def keep_running(client: Client, rows: int, tokens: int, lane: Lane = "interactive") -> list[str]:
    ids = await submit_all(client, rows, ask(tokens), lane=lane, prefix="long")
    await until_decoding(client, ids, 2)
    return ids


async def beside_running_rows(url: str, *, running: int, samples: int) -> list[Figure]:
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced(url, max_rows=running + 16, reserved_rows=0):
            long = await keep_running(client, running, 1_000_000)
            waits = await pickups(client, db, samples, every_s=0.012, tokens=2)
            for job_id in long:
                await client.cancel(job_id)
            await watch_all(client, long)
    p50, p99 = percentile(waits, 0.5) * 1000, percentile(waits, 0.99) * 1000
    what = f"pickup with {running} running, {samples} samples"
    return [Figure(f"{what}: p99 (p50 {p50:.0f} ms)", "≤ 10 ms", f"{p99:.0f} ms", p99 <= 10)]


async def behind_a_backlog(url: str, *, backlog: int, samples: int) -> list[Figure]:
    """Batch jobs fill the lane; interactive ones come and are not held up by them."""
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        await submit_all(client, backlog, ask(100), lane="batch", prefix="batch")
        with paced(url, max_rows=32, reserved_rows=8):
            waits = await pickups(client, db, samples, every_s=0.015, tokens=3)
            left = await client.queued("default", "batch")
    p99 = percentile(waits, 0.99) * 1000
    what = f"pickup behind {backlog} batch jobs ({left} still there at the end), {samples} samples"
    return [Figure(f"{what}: p99", "≤ 10 ms", f"{p99:.0f} ms", p99 <= 10)]


async def beside_the_tiny_model(url: str, *, samples: int) -> list[Figure]:
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with WorkerProcess(url, max_rows=64, reserved_rows=0, step_ms=50) as worker:
            endless = ask(30_000, logit_bias={"2": -100})
            long = [(await client.submit(endless, id=f"long-{i}")).id for i in range(32)]
            await until_decoding(client, long, 2)
            began, first = time.monotonic(), await _length(db, "sluice:log:long-0")
            waits = await pickups(client, db, samples, every_s=0.05, tokens=1)
            steps = await _length(db, "sluice:log:long-0") - first
            step_ms = (time.monotonic() - began) / steps * 1000
            for job_id in long:
                await client.cancel(job_id)
            await watch_all(client, long)
            assert worker.process is not None
    p99 = percentile(waits, 0.99) * 1000
    what = f"pickup beside 32 rows of the tiny model, {samples} samples"
    bar = step_ms + 10
    return [Figure(f"{what}: p99, step {step_ms:.0f} ms", f"≤ {bar:.0f} ms", f"{p99:.0f} ms", p99 <= bar)]


async def idle_commands(url: str, *, seconds: float) -> list[Figure]:
    async with redis.asyncio.Redis.from_url(url) as db:
        with paced(url, lease_s=10):
            await asyncio.sleep(1)
            before = await db.info("stats")
            await asyncio.sleep(seconds)
            after = await db.info("stats")
    rate = (after["total_commands_processed"] - before["total_commands_processed"]) / seconds
    return [Figure("commands a second of an idle worker", "≤ 50", f"{rate:.0f}", rate <= 50)]


async def cancelled(url: str, *, samples: int, step_ms: float = 20) -> list[Figure]:
    """From the wish to the event: the row is out of the engine before the event is said."""
    took = []
    async with Client(url) as client:
        with paced(url, step_ms=step_ms, reserved_rows=0):
            ids = await submit_all(client, samples, ask(100_000))
            await until_decoding(client, ids, 3)
            for job_id in ids:
                began = time.monotonic()
                await client.cancel(job_id)
                await watch_all(client, [job_id])
                took.append(time.monotonic() - began)
    slowest, bar = max(took) * 1000, 50 + step_ms
    return [Figure(f"cancel to the end of the row, slowest of {samples}", f"≤ {bar:.0f} ms", f"{slowest:.0f} ms",
                   slowest <= bar)]  # fmt: skip
