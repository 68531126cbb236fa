"""Workers of a model publish their presence, also among foreign values."""

import asyncio
import logging
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from schemas import keys
from schemas.keys import Lane
from tests.line import Line
from tests.queue.helpers import QUEUE, settings, until
from worker.queue.presence import Presence
from worker.queue.server.clock import ServerClock
from worker.queue.server.connection import connect

NINES = "9" * 5000


@dataclass(frozen=True)
class Jobs:
    """Interactive jobs that a worker runs."""

    number: int = 0
    counts: int = 0

    def by_lane(self) -> dict[Lane, int]:
        return {"interactive": self.number, "batch": 0}

    def rows(self) -> int:
        return self.number - self.counts


NONE_RUNNING = Jobs()


@pytest.mark.parametrize(
    "field",
    [
        f"5 1 {NINES} 1 1", f"5 1 9999999999 {NINES} 1", f"5 1 9999999999 1 {NINES}", f"{NINES} 1 1 1", "5 1 -1 1 1",
        "5 1 nan 1 1", "", b"\xff",
    ],
)  # fmt: skip
async def test_a_field_that_no_worker_wrote_counts_no_running_jobs(
    redis_url: str, db: Redis, field: str | bytes
) -> None:
    await db.zadd(QUEUE, {"a": 1, "b": 1})
    await db.hset(keys.model("default"), "evil", field)
    presence = Presence(db, settings(redis_url), ServerClock())
    assert await presence.publish(NONE_RUNNING) == {"interactive": 2, "batch": 0}


async def test_the_jobs_that_another_live_worker_runs_do_not_wait(redis_url: str, db: Redis) -> None:
    await db.zadd(QUEUE, {"a": 1, "b": 1})
    await db.hset(keys.model("default"), "bob", "5 1.5 9999999999 1 0")
    presence = Presence(db, settings(redis_url), ServerClock())
    assert await presence.publish(NONE_RUNNING) == {"interactive": 1, "batch": 0}


async def test_a_running_token_count_does_not_wait_and_takes_no_row(redis_url: str, db: Redis) -> None:
    await db.zadd(QUEUE, {"a": 1, "b": 1, "c": 1})
    presence = Presence(db, settings(redis_url), ServerClock())
    assert await presence.publish(Jobs(2, counts=1)) == {"interactive": 1, "batch": 0}
    assert await db.hget(keys.worker("ada"), "rows") == b"1"


async def test_presence_is_published_three_times_per_lease_and_after_an_outage_again(redis_url: str, db: Redis) -> None:
    await db.zadd(QUEUE, {"a": 1, "b": 1, "c": 1})
    waiting: list[tuple[Lane, int]] = []

    def on_waiting(lane: Lane, jobs: int) -> None:
        waiting.append((lane, jobs))

    async with Line(redis_url) as line, connect(settings(line.url, lease_s=1)) as redis:
        presence = Presence(redis, settings(line.url, lease_s=1), ServerClock())
        publishing = asyncio.create_task(presence.run(Jobs(1), on_waiting))
        await until(lambda: len(waiting) >= 4)
        assert waiting[:4] == [("interactive", 2), ("batch", 0)] * 2
        assert 0 < await db.pttl(keys.worker("ada")) <= 1000
        line.down()
        await db.delete(keys.worker("ada"))
        await asyncio.sleep(0.5)
        assert (publishing.done(), await db.exists(keys.worker("ada"))) == (False, 0)
        line.up()
        await until(lambda: _exists(db, keys.worker("ada")))
        publishing.cancel()


async def _exists(db: Redis, key: str) -> bool:
    return bool(await db.exists(key))


async def test_a_removed_presence_leaves_those_of_other_workers(redis_url: str, db: Redis) -> None:
    presence = Presence(db, settings(redis_url), ServerClock())
    await presence.publish(NONE_RUNNING)
    await db.hset(keys.model("default"), "bob", "5 1.5 9999999999 1 0")
    await presence.remove()
    assert (await db.exists(keys.worker("ada")), await db.hkeys(keys.model("default"))) == (0, [b"bob"])


async def test_a_presence_that_cannot_be_removed_is_left_to_expire(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.queue")
    async with Line(redis_url) as line, connect(settings(line.url)) as redis:
        line.down()
        await Presence(redis, settings(line.url), ServerClock()).remove()
    assert "expires with its lease" in caplog.text
