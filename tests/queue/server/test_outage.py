import asyncio
import logging
import re

import pytest
from redis.asyncio import Redis

from tests.support.stack import Server, free_port
from tests.waiting import until
from worker.queue.redis_server import until_redis_answers


async def test_a_long_outage_is_told_again_with_its_length_and_its_end(caplog: pytest.LogCaptureFixture) -> None:
    port, stopping = free_port(), asyncio.Event()
    caplog.set_level(logging.WARNING, "sluice.queue")
    async with Redis(port=port) as redis:

        async def call() -> None:
            await redis.ping()

        waiting = asyncio.create_task(until_redis_answers(call, stopping, remind_s=1.2))
        await until(lambda: len(caplog.messages) >= 3)
        with Server(port=port):
            assert await waiting
    shown = [re.sub(r":.*", "", message) for message in caplog.messages]
    assert shown[0] == "waiting for redis"
    lengths = [int(re.fullmatch(r"waiting for redis for (\d+) s", line)[1]) for line in shown[1:-1]]  # type: ignore[index]
    assert lengths == sorted(lengths)
    assert lengths[0] >= 1
    assert re.fullmatch(r"redis is back after \d+ s", shown[-1])


async def test_an_outage_is_told_once_until_it_is_long(caplog: pytest.LogCaptureFixture) -> None:
    stopping, failures = asyncio.Event(), 0

    async def call() -> None:
        nonlocal failures
        failures += 1
        if failures == 4:
            stopping.set()
        async with Redis(port=port) as redis:
            await redis.ping()

    port = free_port()
    assert not await until_redis_answers(call, stopping)
    assert failures == 4
    assert len(caplog.messages) == 1
