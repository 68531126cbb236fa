"""Requests to cancel jobs of any worker, however many there are."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost

from schemas import keys
from tests.fakes import FakeChat
from tests.queue.helpers import BATCH, QUEUE, ask, ended, listening, put, settings, types, until, working
from worker.queue.cancel_backlog import _BATCH, _MAX_PENDING, CancelBacklog
from worker.queue.job.claims import Claims


class CountedClaims(Claims):
    """Counts the look-ups, and loses the connection in those that it is told to."""

    def __init__(self, redis: Redis, redis_url: str) -> None:
        super().__init__(redis, settings(redis_url))
        self.lookups: list[int] = []
        self.lost = 0

    async def find_waiting(self, job_ids: Collection[str]) -> list[str]:
        self.lookups.append(len(job_ids))
        if self.lost:
            self.lost -= 1
            raise ConnectionLost("closed by the test")
        return await super().find_waiting(job_ids)


@pytest.fixture
def claims(redis_url: str, db: Redis) -> CountedClaims:
    return CountedClaims(db, redis_url)


@asynccontextmanager
async def at_work(claims: Claims, *running: str) -> AsyncIterator[CancelBacklog]:
    backlog = CancelBacklog(running.__contains__, claims)
    task = asyncio.create_task(backlog.run())
    try:
        yield backlog
    finally:
        task.cancel()


async def is_empty(db: Redis) -> bool:
    return not await db.exists(QUEUE, BATCH)


async def test_thousands_of_ids_that_wait_nowhere_are_looked_up_in_a_few_calls(
    db: Redis, claims: CountedClaims
) -> None:
    await put(db, "waits", b"")
    async with at_work(claims) as backlog:
        for k in range(3 * _BATCH - 1):
            backlog.add(f"x{k}")
        backlog.add("waits")
        await until(lambda: is_empty(db))
    assert claims.lookups == [_BATCH] * 3
    assert await db.hget(keys.job("waits"), "state") == b"cancelled"


async def test_the_jobs_of_both_lanes_are_found(db: Redis, claims: CountedClaims) -> None:
    await put(db, "a", b"")
    await put(db, "b", b"", lane="batch")
    async with at_work(claims) as backlog:
        backlog.add("a")
        backlog.add("b")
        await until(lambda: is_empty(db))
    assert claims.lookups == [2]


async def test_an_id_that_comes_again_is_looked_up_once(db: Redis, claims: CountedClaims) -> None:
    await put(db, "a", b"")
    async with at_work(claims) as backlog:
        for _ in range(1000):
            backlog.add("a")
        await until(lambda: is_empty(db))
    assert claims.lookups == [1]


async def test_the_backlog_is_bounded(claims: CountedClaims) -> None:
    async with at_work(claims) as backlog:
        for k in range(_MAX_PENDING + 1000):
            backlog.add(f"x{k}")
        await until(lambda: sum(claims.lookups) >= _MAX_PENDING)
        await asyncio.sleep(0.05)
    assert sum(claims.lookups) == _MAX_PENDING


@pytest.mark.parametrize("job_id", ["", "x" * 129, "a b", "\udcff", "runs"])
async def test_what_is_no_id_or_runs_here_is_not_looked_up(claims: CountedClaims, job_id: str) -> None:
    async with at_work(claims, "runs") as backlog:
        backlog.add(job_id)
        await asyncio.sleep(0.05)
    assert claims.lookups == []


async def test_a_lost_connection_loses_no_request(db: Redis, claims: CountedClaims) -> None:
    await put(db, "a", b"")
    claims.lost = 1
    async with at_work(claims) as backlog:
        backlog.add("a")
        await until(lambda: is_empty(db))
    assert claims.lookups == [1, 1]


async def test_a_running_job_is_cancelled_although_its_message_is_lost(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url), chat.chat):
        await listening(db)
        await ask(db, "a", {"then": "hang"})
        await until(lambda: bool(chat.running))
        await db.set(keys.cancel("a"), "1", ex=60)
        assert types(await ended(db, "a")) == ["started", "cancelled"]
