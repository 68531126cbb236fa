"""Jobs that no worker claims are named in the log, once for each queue."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis

from tests.fakes import FakeChat
from tests.queue.helpers import ask, ended, settings, working
from tests.waiting import until
from worker.queue.worker import log_unclaimed_queues


@asynccontextmanager
async def looking(db: Redis) -> AsyncIterator[None]:
    task = asyncio.create_task(log_unclaimed_queues(db, "own", every_s=0.02))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_queues_without_a_lane_with_a_wrong_one_or_without_a_worker_are_logged_once(
    db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sluice.queue")
    await db.hset("sluice:model:served", "ada", "9 1 9999999999 0 0")
    for queue in ("served", "served:fast", "served:batch", "misspelt:batch"):
        await db.zadd(f"sluice:queue:{queue}", {"a": 1, "b": 2})
    await db.set("sluice:queue:foreign", "x")
    async with looking(db):
        await until(lambda: len(caplog.messages) >= 3)
        await asyncio.sleep(0.2)
    assert sorted(caplog.messages) == [
        "no worker takes the 2 jobs in sluice:queue:misspelt:batch: no worker serves 'misspelt'; start one, correct "
        "the name in the producer, or run sluice queue purge misspelt",
        "no worker takes the 2 jobs in sluice:queue:served: it has no lane; queue jobs in "
        "sluice:queue:served:interactive or sluice:queue:served:batch",
        "no worker takes the 2 jobs in sluice:queue:served:fast: 'fast' is not a lane; queue jobs in "
        "sluice:queue:served:interactive or sluice:queue:served:batch",
    ]


async def test_many_such_queues_fill_no_log(db: Redis, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sluice.queue")
    for k in range(300):
        await db.zadd(f"sluice:queue:m{k}", {"a": 1})
    async with looking(db):
        await until(lambda: len(caplog.messages) >= 100)
        await asyncio.sleep(0.3)
    assert len(caplog.messages) == 100


async def test_a_worker_looks_for_them_as_it_starts(
    db: Redis, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sluice.queue")
    await db.zadd("sluice:queue:default", {"a": 1})
    async with working(settings(redis_url), FakeChat().chat):
        await ask(db, "b", {"say": ["Hello"]})
        await ended(db, "b")
        await until(lambda: any("sluice:queue:default: it has no lane" in message for message in caplog.messages))
