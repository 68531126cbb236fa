"""The first contact with the server: it is checked, and its clock is measured."""

import time
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from tests.queue.helpers import settings
from tests.support.stack import free_port
from worker.errors import CannotStart
from worker.queue.redis_server import RedisServer, ServerClock, redis_from_settings


class CountingClock(ServerClock):
    """Counts the measurements."""

    def __init__(self) -> None:
        super().__init__()
        self.synced = 0

    async def sync(self, redis: Redis) -> None:
        self.synced += 1
        await super().sync(redis)


async def test_the_first_contact_measures_the_clock_and_returns_the_uptime(redis_url: str, db: Redis) -> None:
    given, clock = settings(redis_url), CountingClock()
    uptime_s: Any = (await db.info("server"))["uptime_in_seconds"]
    async with redis_from_settings(given) as redis:
        server = RedisServer(redis, given, clock)
        assert uptime_s <= await server.connect() <= uptime_s + 5
    assert (clock.synced, server.clock) == (1, clock)
    assert abs(clock.now() - time.time()) < 5


async def test_a_server_that_no_worker_can_use_ends_the_start_early_and_late(redis_url: str) -> None:
    given = settings(redis_url.rsplit("/", 1)[0] + "/999999")
    async with redis_from_settings(given) as redis:
        server = RedisServer(redis, given)
        with pytest.raises(CannotStart):
            await server.check_early()
        with pytest.raises(CannotStart):
            await server.connect()


async def test_a_server_that_is_away_is_an_error_only_when_it_is_needed() -> None:
    given = settings(f"redis://127.0.0.1:{free_port()}/0")
    async with redis_from_settings(given) as redis:
        server = RedisServer(redis, given)
        await server.check_early()
        with pytest.raises((RedisError, OSError)):
            await server.connect()
