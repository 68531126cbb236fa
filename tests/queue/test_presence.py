"""Workers of a model publish their presence, also among foreign values."""

import asyncio
import logging
import time
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from sluice import Client, NoWorker
from sluice.contract import keys
from sluice.contract.keys import Lane
from sluice.presence import serves
from tests.fakes import FakeChat
from tests.line import Line
from tests.queue.helpers import QUEUE, ask, log, queue_worker, settings, types, until, working
from worker.errors import CannotStart
from worker.monitoring.sink import MetricsSink
from worker.queue.fleet import FleetRecord, _Unknown
from worker.queue.presence import Presence, until_name_is_free
from worker.queue.redis_server import ServerClock, redis_from_settings

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

    def per_s(self) -> float:
        return 0.0


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


async def test_rows_are_not_more_than_there_are_while_offline_jobs_wait_preempted(redis_url: str, db: Redis) -> None:
    presence = Presence(db, settings(redis_url, max_rows=4), ServerClock())
    await presence.publish(Jobs(6))
    assert await db.hmget(keys.worker("ada"), ["rows", "max_rows"]) == [b"4", b"4"]


async def test_what_the_metrics_say_is_published_and_replaced(redis_url: str, db: Redis) -> None:
    said: dict[str, float | str] = {"tokens_per_s": 12.5, "gap_p50_ms": 20}
    presence = Presence(db, settings(redis_url), ServerClock(), measured=lambda: said)
    await presence.publish(NONE_RUNNING)
    said["gap_p50_ms"] = ""
    await presence.publish(NONE_RUNNING)
    assert await db.hmget(keys.worker("ada"), ["tokens_per_s", "gap_p50_ms", "rows"]) == [b"12.5", b"", b"0"]


async def test_presence_is_published_three_times_per_lease_and_after_an_outage_again(redis_url: str, db: Redis) -> None:
    await db.zadd(QUEUE, {"a": 1, "b": 1, "c": 1})
    waiting: list[tuple[Lane, int]] = []

    def on_waiting(lane: Lane, jobs: int) -> None:
        waiting.append((lane, jobs))

    async with Line(redis_url) as line, redis_from_settings(settings(line.url, lease_s=1)) as redis:
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


async def test_marks_are_forgotten_when_a_full_server_refuses_the_presence(redis_url: str, db: Redis) -> None:
    class Lost(_Unknown):
        def take_lost(self) -> tuple[list[str], bool]:
            return ["lost"], False

    fleet = FleetRecord(db, settings(redis_url), ServerClock(), MetricsSink(), Lost())
    await db.set(mark := keys.prefix_mark("default", "lost"), f" {fleet.wid} ")
    presence = Presence(db, settings(redis_url), ServerClock(), fleet=fleet)
    await db.config_set("maxmemory", 1)
    running = asyncio.create_task(presence.run(NONE_RUNNING, lambda lane, jobs: None))
    try:
        await until(lambda: _is_gone(db, mark))
        assert not await db.exists(keys.worker("ada"))
    finally:
        running.cancel()
        await db.config_set("maxmemory", 0)


async def _is_gone(db: Redis, key: str) -> bool:
    return not await db.exists(key)


async def _exists(db: Redis, key: str) -> bool:
    return bool(await db.exists(key))


async def test_a_removed_presence_leaves_those_of_other_workers(redis_url: str, db: Redis) -> None:
    presence = Presence(db, settings(redis_url), ServerClock())
    await presence.publish(NONE_RUNNING)
    await db.hset(keys.model("default"), "bob", "5 1.5 9999999999 1 0")
    await db.hset(keys.rows("default"), mapping={"ada": "1 2 0 8 8 8", "bob": "1 2 0 8 8 8"})
    await presence.remove()
    assert (await db.exists(keys.worker("ada")), await db.hkeys(keys.model("default"))) == (0, [b"bob"])
    assert await db.hkeys(keys.rows("default")) == [b"bob"], "no jobs are left to it"


async def test_a_presence_that_cannot_be_removed_is_left_to_expire(
    redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.queue")
    async with Line(redis_url) as line, redis_from_settings(settings(line.url)) as redis:
        line.down()
        await Presence(redis, settings(line.url), ServerClock()).remove()
    assert "expires with its lease" in caplog.text


async def test_a_second_worker_of_a_name_is_refused_while_the_first_renews_its_lease(
    redis_url: str, db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    given = settings(redis_url, lease_s=1)
    async with working(given, FakeChat().chat):
        await until(lambda: _exists(db, keys.worker("ada")))
        async with redis_from_settings(given) as redis:
            with pytest.raises(
                CannotStart, match=r"^SLUICE_WORKER_NAME=ada: a worker of this name is alive \(process "
            ):
                await queue_worker(redis, given, FakeChat().chat).main()
    assert "the name ada is in use (process " in caplog.text


async def test_a_worker_that_starts_again_after_a_crash_waits_for_the_lease_of_the_first(
    redis_url: str, db: Redis
) -> None:
    await Presence(db, settings(redis_url, lease_s=1), ServerClock()).publish(NONE_RUNNING)
    began = time.monotonic()
    async with working(settings(redis_url, lease_s=1), FakeChat().chat):
        await ask(db, "a", {"say": ["Hello"]})
        await until(lambda: _has_ended(db, "a"))
        assert time.monotonic() - began > 0.8


async def test_a_worker_waits_until_one_of_its_name_has_drained(redis_url: str, db: Redis) -> None:
    first_chat, second_chat = FakeChat(), FakeChat()
    async with working(settings(redis_url, lease_s=1, grace_s=30), first_chat.chat) as first:
        await ask(db, "a", {"then": "hang"})
        await until(lambda: len(first_chat.began) == 1)
        first.stop()
        await until(lambda: _is(db, b"draining"))
        async with working(settings(redis_url, lease_s=1), second_chat.chat):
            await asyncio.sleep(1.5)
            await ask(db, "b", {"say": ["Hello"]})
            await asyncio.sleep(0.3)
            assert second_chat.began == []
            first.stop()
            await until(lambda: _has_ended(db, "b"))
            assert await _is(db, b"running")
            assert types(await log(db, "a"))[:1] == ["started"]


async def test_a_draining_worker_counts_as_none_for_clients(redis_url: str, db: Redis, client: Client) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, grace_s=30), chat.chat) as worker:
        await until(lambda: _is(db, b"running"))
        assert [serves(each) for each in await client.workers()] == [True]
        await ask(db, "a", {"then": "hang"})
        await until(lambda: len(chat.began) == 1)
        worker.stop()
        await until(lambda: _is(db, b"draining"))
        assert [serves(each) for each in await client.workers()] == [False]
        with pytest.raises(NoWorker):
            await client.submit({"say": ["Hello"]}, wait_worker_s=0)
        assert not (await client.submit({"say": ["Hello"]})).served
        assert [(each.jobs, each.workers) for each in await client.queues()] == [(2, 0)]
        assert await Presence(db, settings(redis_url, worker_name="bob"), ServerClock()).publish(NONE_RUNNING) == {
            "interactive": 1,
            "batch": 0,
        }


async def test_another_process_that_takes_the_name_is_logged(
    redis_url: str, db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    presence = Presence(db, settings(redis_url), ServerClock())
    for _ in range(2):
        await presence.publish(NONE_RUNNING)
    assert "another worker of this name" not in caplog.text
    for _ in range(2):
        await db.hset(keys.worker("ada"), mapping={"host": "elsewhere", "pid": 7})
        await presence.publish(NONE_RUNNING)
    assert (
        caplog.text.count("SLUICE_WORKER_NAME=ada: another worker of this name is alive (process 7 on elsewhere)") == 1
    )


@pytest.mark.parametrize("foreign", ["string", "no lease"])
async def test_a_foreign_value_under_the_name_delays_no_worker(redis_url: str, db: Redis, foreign: str) -> None:
    if foreign == "string":
        await db.set(keys.worker("ada"), "x", ex=60)
    else:
        await db.hset(keys.worker("ada"), "a", "b")
    async with asyncio.timeout(5):
        await until_name_is_free(db, settings(redis_url))


async def _is(db: Redis, state: bytes) -> bool:
    return await db.hget(keys.worker("ada"), "state") == state


async def _has_ended(db: Redis, job_id: str) -> bool:
    return types(await log(db, job_id))[-1:] == ["finished"]
