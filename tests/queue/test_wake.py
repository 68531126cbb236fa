import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import redis as sync_redis
from redis.asyncio import Redis

from sluice import Client
from sluice.contract import keys
from tests.fakes import FakeChat
from tests.keyspace import check_all_ended
from tests.line import Line
from tests.queue.helpers import QUEUE, ask, ended, enqueue, envelope, listening, put, settings, until, working
from tests.support.stack import Server
from worker.queue.job.claims import Claims
from worker.queue.running import ControlListener, allow_keyspace_events


class Heard:
    """Counts the calls of a listener."""

    def __init__(self) -> None:
        self.wakes, self.missed_calls = 0, 0
        self.cancels: list[str] = []

    def wake(self) -> None:
        self.wakes += 1

    def cancel(self, job_id: str) -> None:
        self.cancels.append(job_id)

    async def missed(self) -> None:
        self.missed_calls += 1


@asynccontextmanager
async def heard_by_a_listener(redis: Redis, *, keyspace_events: bool = True) -> AsyncIterator[Heard]:
    heard = Heard()
    listener = ControlListener(
        redis,
        "default",
        keyspace_events=keyspace_events,
        wake=heard.wake,
        cancel=heard.cancel,
        on_reconnect=heard.missed,
    )
    task = asyncio.create_task(listener.run())
    try:
        await until(lambda: heard.wakes == (4 if keyspace_events else 2))
        heard.wakes = heard.missed_calls = 0
        yield heard
    finally:
        task.cancel()


@pytest.fixture(autouse=True)
def _as_the_server_was(redis_url: str) -> Iterator[None]:
    with sync_redis.Redis.from_url(redis_url) as db:
        flags = db.config_get("notify-keyspace-events")["notify-keyspace-events"]
        yield
        db.config_set("notify-keyspace-events", flags)


async def flags(db: Redis) -> set[str]:
    return set((await db.config_get("notify-keyspace-events"))["notify-keyspace-events"])


async def test_our_submit_wakes(db: Redis, client: Client) -> None:
    async with heard_by_a_listener(db, keyspace_events=False) as heard:
        await client.submit([{"role": "user", "content": "Hello"}])
        await until(lambda: heard.wakes == 1)


async def test_a_plain_arq_producer_wakes_through_keyspace_events(redis_url: str, db: Redis) -> None:
    async with heard_by_a_listener(db) as heard:
        for lane in keys.LANES:
            await enqueue(redis_url, keys.queue("default", lane))
        await until(lambda: heard.wakes == 2)


async def test_work_for_another_model_wakes_nobody_here(redis_url: str, db: Redis) -> None:
    async with heard_by_a_listener(db) as heard:
        await enqueue(redis_url, keys.queue("other", "interactive"))
        await db.publish(keys.wake("other"), "")
        await all_is_heard(db, heard)
        assert heard.wakes == 0


async def test_what_leaves_a_queue_wakes_nobody(db: Redis) -> None:
    await put(db, "a", b"")
    async with heard_by_a_listener(db) as heard:
        await db.zrem(QUEUE, "a")
        await all_is_heard(db, heard)
        assert heard.wakes == 0


async def all_is_heard(db: Redis, heard: Heard) -> None:
    await db.publish(keys.CONTROL, "the last word")
    await until(lambda: heard.cancels == ["the last word"])


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "Kz"), ("Ex", "ExKz"), ("K$", "K$z"), ("Ez", "EKz"), ("Kz", "Kz"), ("KEA", "KEA"), ("EA", "KEA")],
)
async def test_our_flags_are_added_to_those_that_the_server_had(db: Redis, before: str, after: str) -> None:
    await db.config_set("notify-keyspace-events", before)
    await allow_keyspace_events(db)
    assert await flags(db) == set(after)


async def test_a_worker_that_is_told_not_to_leaves_the_server_s_flags_alone(db: Redis) -> None:
    await db.config_set("notify-keyspace-events", "Ex")
    before = await flags(db)
    async with heard_by_a_listener(db, keyspace_events=False):
        assert await flags(db) == before


async def test_a_server_that_keeps_its_settings_to_itself_is_polled() -> None:
    chat = FakeChat()
    with Server(args=("--rename-command", "CONFIG", "")) as server:
        async with Redis.from_url(server.url) as db, working(settings(server.url, poll_s=0.05), chat.chat):
            await put(db, "a", envelope({"say": ["Hello"]}))
            await ended(db, "a")


async def test_a_cancellation_is_heard_with_its_id(db: Redis) -> None:
    async with heard_by_a_listener(db) as heard:
        await db.publish(keys.CONTROL, "job-1")
        await until(lambda: bool(heard.cancels))
        assert heard.cancels == ["job-1"]


async def test_a_flood_of_messages_leaves_the_event_loop_to_others(db: Redis) -> None:
    """Messages that have arrived are read without a pause of redis-py's own."""
    turns = list[int]()  # messages that were read before each turn of the loop

    async def watch() -> None:
        while True:
            turns.append(len(heard.cancels))
            await asyncio.sleep(0)

    async with heard_by_a_listener(db) as heard, db.pipeline(transaction=False) as pipe:
        for number in range(3000):
            pipe.publish(keys.CONTROL, f"x{number}")
        watching = asyncio.create_task(watch())
        await pipe.execute()
        await until(lambda: len(heard.cancels) == 3000)
        watching.cancel()
    assert max(after - before for before, after in pairwise(turns)) <= 32


async def test_a_flood_is_read_at_a_pace_that_leaves_most_of_the_time_to_streams(db: Redis) -> None:
    async with heard_by_a_listener(db) as heard, db.pipeline(transaction=False) as pipe:
        for number in range(2000):
            pipe.publish(keys.CONTROL, f"x{number}")
        began = time.monotonic()
        await pipe.execute()
        await until(lambda: len(heard.cancels) == 2000)
    assert time.monotonic() - began >= 2000 / 32 * 0.01 * 0.9


async def test_what_may_have_been_missed_is_looked_for_after_every_new_connection(db: Redis) -> None:
    async with heard_by_a_listener(db) as heard:
        await db.client_kill_filter(_type="pubsub")
        await until(lambda: heard.missed_calls == 1)
        assert heard.wakes > 0, "a job may have come while nobody listened"


@pytest.fixture
def _soon_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.queue.running._QUIET_S", 0.1)


@pytest.mark.timing
@pytest.mark.usefixtures("_soon_asked")
async def test_a_quiet_connection_is_kept(redis_url: str) -> None:
    """A listener that connects anew has been deaf for a moment."""
    async with Redis.from_url(redis_url, socket_timeout=0.5) as redis, heard_by_a_listener(redis) as heard:
        await asyncio.sleep(1.3)
        assert heard.missed_calls == 0
        await all_is_heard(redis, heard)


@pytest.mark.timing
@pytest.mark.usefixtures("_soon_asked")
async def test_a_connection_that_no_longer_answers_is_given_up(redis_url: str) -> None:
    async with (
        Line(redis_url) as line,
        Redis.from_url(line.url, socket_timeout=0.2) as redis,
        heard_by_a_listener(redis) as heard,
    ):
        line.mute = True
        await asyncio.sleep(0.4)
        line.mute = False
        await until(lambda: heard.missed_calls == 1)


async def working_on(db: Redis, chat: FakeChat, *job_ids: str) -> None:
    await listening(db)
    for job_id in job_ids:
        await ask(db, job_id, {"then": "hang"})
    await until(lambda: {job.claim.job_id for job in chat.running} == set(job_ids))


async def test_a_queued_job_is_cancelled_by_a_worker_without_a_free_row(
    redis_url: str, db: Redis, client: Client
) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, max_rows=1, reserved_rows=0), chat.chat):
        await working_on(db, chat, "running")
        await ask(db, "queued", {"say": ["never"]})
        await client.cancel("queued")
        assert await ended(db, "queued") == [
            {
                "id": "queued", "seq": 0, "attempt": 1, "type": "cancelled", "reason": "requested",
                "usage": {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0},
            }
        ]  # fmt: skip
        assert chat.began == ["running"]
        await client.cancel("running")
        assert [event["type"] for event in await ended(db, "running")] == ["started", "cancelled"]
    await check_all_ended(db)


async def test_a_cancellation_that_nobody_heard_is_found_after_reconnecting(
    redis_url: str, db: Redis, client: Client
) -> None:
    chat = FakeChat()
    async with working(settings(redis_url), chat.chat):
        await working_on(db, chat, "a", "b")
        await db.client_kill_filter(_type="pubsub")
        await db.set(keys.cancel("a"), "1", ex=60)  # without a word on the channel
        assert [event["type"] for event in await ended(db, "a")] == ["started", "cancelled"]
        assert {job.claim.job_id for job in chat.running} == {"b"}


async def test_a_wish_that_was_there_before_the_claim_ends_the_job_unrun(
    redis_url: str, db: Redis, client: Client
) -> None:
    chat = FakeChat()
    await client.cancel("a")
    await put(db, "a", envelope({"say": ["never"]}))
    async with working(settings(redis_url), chat.chat):
        assert [event["type"] for event in await ended(db, "a")] == ["cancelled"]
        assert chat.began == []
    await check_all_ended(db)


async def test_a_wish_without_an_id_takes_no_job_off_the_queue(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, max_rows=1, reserved_rows=0), chat.chat):
        await working_on(db, chat, "running")
        await put(db, "queued", envelope({"say": ["Hello"]}))
        await db.publish(keys.CONTROL, "")
        await db.publish(keys.CONTROL, "running")
        await ended(db, "queued")
        assert chat.most == 1


async def test_a_queued_job_ends_by_the_word_on_the_channel_alone(redis_url: str, db: Redis) -> None:
    """A running job does so too; the key may be lost in a failover."""
    chat = FakeChat()
    async with working(settings(redis_url, max_rows=1, reserved_rows=0), chat.chat):
        await working_on(db, chat, "running")
        await put(db, "queued", envelope({"say": ["never"]}))
        await db.publish(keys.CONTROL, "queued")
        assert [event["type"] for event in await ended(db, "queued")] == ["cancelled"]
        assert chat.most == 1


async def test_a_job_cancelled_while_its_claim_is_on_the_way_ends(
    redis_url: str, db: Redis, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message may overtake the reply to the claim: they come over two connections."""
    chat = FakeChat()
    monkeypatch.setattr(Claims, "take", _slow(Claims.take, lambda: client.cancel("a")))
    async with working(settings(redis_url), chat.chat):
        await ask(db, "a", {"then": "hang"})
        assert (await ended(db, "a"))[-1]["type"] == "cancelled"


def _slow(take: Callable[..., Any], meanwhile: Callable[[], Any]) -> Callable[..., Any]:
    async def slow_take(*args: Any, **kwargs: Any) -> Any:
        claims = await take(*args, **kwargs)
        if claims:
            await meanwhile()
            await asyncio.sleep(0.05)
        return claims

    return slow_take
