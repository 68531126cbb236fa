"""Workers of a model publish their presence, also among foreign values."""

import pytest
from redis.asyncio import Redis

from schemas import keys
from tests.queue.helpers import QUEUE, settings
from worker.queue.presence import Presence
from worker.queue.server.clock import ServerClock

NINES = "9" * 5000
NONE_RUNNING = dict.fromkeys(keys.LANES, 0)


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
    presence = Presence(db, settings(redis_url), ServerClock(), images=False)
    assert await presence.publish(NONE_RUNNING) == {"interactive": 2, "batch": 0}


async def test_the_jobs_that_another_live_worker_runs_do_not_wait(redis_url: str, db: Redis) -> None:
    await db.zadd(QUEUE, {"a": 1, "b": 1})
    await db.hset(keys.model("default"), "bob", "5 1.5 9999999999 1 0")
    presence = Presence(db, settings(redis_url), ServerClock(), images=False)
    assert await presence.publish(NONE_RUNNING) == {"interactive": 1, "batch": 0}
