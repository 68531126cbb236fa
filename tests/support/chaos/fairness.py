"""Measures how long the job of one tenant waits behind the queue of another, and what a claim costs the server."""

import asyncio
from collections.abc import Iterator

import redis.asyncio

from sluice import Client
from sluice.cancellation import Cancellation
from sluice.submission import NewJob, Submission
from sluice.transport import Retries
from tests.support.chaos.harness import Figure, chat_request, paced_worker, percentile, record
from tests.support.chaos.pickup import queue_wait_s
from worker.queue.job.claims import Claim, Claims
from worker.queue.redis_server import redis_from_settings
from worker.settings import Settings

_AT_ONCE = 500  # jobs submitted in one round trip


async def small_tenant(url: str, *, backlog: int, samples: int, rows: int = 64) -> list[Figure]:
    """Submit jobs of one tenant one by one, first to an empty queue and then behind another tenant's backlog.

    Then all rows are taken. Some end in nearly every step of 20 ms, so a longer wait is due to the queue.
    """
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        with paced_worker(url, max_rows=rows, reserved_rows=0, queue_limit=backlog * 2):
            alone = await _pickups(client, db, samples, "alone")
            await submit_many(db, backlog, "big")
            await asyncio.sleep(1)
            behind = await _pickups(client, db, samples, "behind")
            left = await client.queued("default", "interactive")
    p99, p99_alone = percentile(behind, 0.99) * 1000, percentile(alone, 0.99) * 1000
    limit = p99_alone + 50
    label = f"pickup of a small tenant behind {backlog:,} jobs ({left:,} left at the end), {samples} samples"
    return [
        Figure(f"{label}: p50 (empty queue {percentile(alone, 0.5) * 1000:.0f} ms)", "-",
               f"{percentile(behind, 0.5) * 1000:.0f} ms", True),
        Figure(f"{label}: p99 (empty queue {p99_alone:.0f} ms)", f"≤ {limit:.0f} ms", f"{p99:.0f} ms", p99 <= limit),
    ]  # fmt: skip


async def _pickups(client: Client, db: redis.asyncio.Redis, samples: int, prefix: str) -> list[float]:
    waits = []
    for i in range(samples):
        job = await client.submit(chat_request(1, tenant="small"), id=f"{prefix}-{i:05}")
        await record(client, job.id)
        waits.append(await queue_wait_s(db, job.id))
    return waits


async def submit_many(db: redis.asyncio.Redis, count: int, tenant: str, *, first: int = 0) -> None:
    """Submit jobs number `first` to `count` - 1, of 4 to 28 tokens each, so that they end at different times."""
    submission = Submission(db, Retries(db, 60))
    for chunk in _pages(first, count):
        jobs = [
            NewJob(f"{tenant}-{k:06}", chat_request(4 + k * 7 % 25, tenant=tenant), "default", "interactive")
            for k in chunk
        ]
        await submission.submit_all(jobs)


def _pages(first: int, end: int) -> Iterator[range]:
    for start in range(first, end, _AT_ONCE):
        yield range(start, min(end, start + _AT_ONCE))


async def claim_cost(url: str, *, lengths: tuple[int, ...], samples: int = 300) -> list[Figure]:
    """Measure the server's microseconds for a claim of one small tenant's job, by the length of the queue."""
    figures = []
    first_us = 0.0
    queued = 0
    settings = Settings(redis_url=url, model="none", worker_name="cost", lease_s=60)
    async with redis_from_settings(settings) as db:
        claims = Claims(db, settings)
        running = [Claim("row", "interactive", 1, 0, False, 0.0, 0, b"", 0, tenant="big")]
        for length in lengths:
            await submit_many(db, length, "big", first=queued)
            queued = length
            mends = await _mend(claims)
            cost_us = await _cost_us(db, claims, running, samples, f"small-{length}")
            first_us = first_us or cost_us
            limit = f"≤ {2 * first_us:.0f} µs" if length else "-"
            label = f"claim with {length:,} queued, {samples} samples ({mends} more claims to index them)"
            figures.append(Figure(label, limit, f"{cost_us:.0f} µs", cost_us <= 2 * first_us))
    return figures


async def _mend(claims: Claims) -> int:
    calls = 0
    await claims.take("interactive", 0)
    while claims.needs_reconcile("interactive"):
        await claims.take("interactive", 0)
        calls += 1
    return calls


async def _cost_us(db: redis.asyncio.Redis, claims: Claims, running: list[Claim], samples: int, prefix: str) -> float:
    """Return the median of the time that the server reports for such a claim."""
    costs = []
    client, cancellation = Submission(db, Retries(db, 60)), Cancellation(db, Retries(db, 60))
    for i in range(samples):
        job = NewJob(f"{prefix}-{i:04}", chat_request(1, tenant="small"), "default", "interactive")
        await client.submit(job)
        await db.config_resetstat()
        (taken,) = await claims.take("interactive", 1, running=running)
        assert taken.job_id == job.id, "the small tenant's job is claimed first"
        costs.append((await db.info("commandstats"))["cmdstat_evalsha"]["usec"])
        await claims.release(taken)
        assert await cancellation.cancel(job.id) == "cancelled"
    return percentile(costs, 0.5)
