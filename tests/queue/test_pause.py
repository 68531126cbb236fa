"""Unwritten events are bounded during an outage: the engine is paused meanwhile."""

import asyncio

import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from tests.queue.helpers import envelope, put, settings
from tests.waiting import until
from worker.queue.job.claims import Claims
from worker.queue.job.publisher import Publisher
from worker.queue.redis_server import ServerClock, redis_from_settings


async def test_the_engine_is_paused_while_too_many_events_wait_and_continues_after(
    redis_url: str, db: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.queue.job.publisher._MAX_UNWRITTEN", 10)
    given, paused = settings(redis_url), list[bool]()
    await put(db, "a", envelope({}))
    async with redis_from_settings(given) as redis:
        (claim,) = await Claims(redis, given).take("interactive", 1)
        publisher = Publisher(redis, ServerClock(), given, paused.append)
        log = publisher.open(claim, on_lost=lambda: None)
        running = asyncio.create_task(publisher.run())
        await db.config_set("maxmemory", 1)
        try:
            for k in range(10):
                log.emit("delta", token_ids=[k])
            await until(lambda: bool(caplog.records))  # of the outage
            assert paused == [], "ten may wait"
            log.emit("delta", token_ids=[10])
            await until(lambda: paused == [True])
            assert publisher.num_unwritten == 11
        finally:
            await db.config_set("maxmemory", 0)
        await asyncio.wait_for(publisher.until_written(log), 5)
        await until(lambda: paused == [True, False])
        assert await db.llen(keys.log("a")) == 11
        running.cancel()
