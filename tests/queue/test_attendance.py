"""Jobs that no worker attends to: their deadlines, and what their readers are told."""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from pydantic import TypeAdapter
from redis.asyncio import Redis

from schemas import JobEvent as AnyEvent
from sluice import Client, JobFailed, SyncClient, openai, sse
from sluice.contract import keys
from sluice.contract.events import Event, Failed, Progress
from tests.client.streaming import HELLO
from tests.fakes import FakeChat
from tests.keyspace import check_all_ended, check_job_keys
from tests.queue.helpers import ended, settings, working
from worker.queue.job.claims import lease_key

LATE = {"messages": HELLO, "deadline_s": 0.2}


async def serve(db: Redis, *, workers: int = 1, model: str = "default") -> None:
    """Report that workers of the model live, as they do themselves."""
    await db.delete(keys.model(model))
    seen = f"100 0 {time.time() + 60:.0f} 0 0"
    await db.hset(keys.model(model), mapping={f"w{k}": seen for k in range(workers)})


async def start(db: Redis, job_id: str, *, lease: bool) -> None:
    """Bring a queued job to where a worker has written two events."""
    began: dict[str, Any] = {"model": "default", "fingerprint": "f", "worker": "ada", "seed": 1}
    await db.hset(keys.job(job_id), mapping={"state": "running", "attempt": 1})
    if lease:
        await db.set(lease_key(job_id), "ada:1", px=60_000)
    for seq, more in enumerate([{"type": "started", **began}, {"type": "delta", "token_ids": [1], "content": "Hi"}]):
        raw = json.dumps({"id": job_id, "seq": seq, "attempt": 1, "ts": 0, **more})
        await db.rpush(keys.log(job_id), raw)


async def first(events: AsyncGenerator[Event], number: int) -> list[Event]:
    found = list[Event]()
    async with asyncio.timeout(10), aclosing(events):
        async for event in events:
            found.append(event)
            if len(found) == number:
                break
    return found


def waiting(job_id: str, found: Event) -> tuple[int, int | None]:
    """Check that the event is made by the reader, and return its `seq` and the number of workers."""
    assert isinstance(found, Progress)
    assert (found.id, found.phase, found.final, found.stored) == (job_id, "waiting", False, False)
    return found.seq, found.workers


@pytest.mark.parametrize("lane", ["interactive", "batch"])
async def test_a_deadline_is_kept_for_a_reader_without_any_worker(db: Redis, client: Client, lane: keys.Lane) -> None:
    job = await client.submit(LATE, model="misspelt", lane=lane)
    events = [event async for event in client.stream(job.id)]
    assert isinstance(events[-1], Failed)
    assert (events[-1].error.type, events[-1].error.retryable) == ("deadline", True)
    assert [event.seq for event in events if event.stored] == [0]
    with pytest.raises(JobFailed):
        await client.result(job.id)
    await check_job_keys(db, job.id)
    await check_all_ended(db)


async def test_a_wait_for_a_result_keeps_the_deadline(client: Client) -> None:
    job = await client.submit(LATE)
    with pytest.raises(JobFailed) as raised:
        await client.result(job.id, timeout=10)
    assert raised.value.error.type == "deadline"


async def test_asking_for_the_state_keeps_the_deadline(db: Redis, client: Client) -> None:
    job = await client.submit(LATE)
    assert await client.state(job.id) == "queued"
    await asyncio.sleep(0.3)
    assert await client.state(job.id) == "failed"
    await check_all_ended(db)


async def test_listing_the_queues_keeps_the_deadlines_of_all_jobs_without_a_worker(db: Redis, client: Client) -> None:
    late = [(await client.submit(LATE)).id for _ in range(5)]
    for k in range(1_100):  # more than a page before it
        await db.zadd(keys.queue("default", "interactive"), {f"p{k}": k})
    patient = await client.submit({"messages": HELLO, "deadline_s": 60}, lane="batch")
    await asyncio.sleep(0.3)
    assert [(queue.lane, queue.jobs) for queue in await client.queues()] == [("batch", 1), ("interactive", 1_100)]
    for job_id in late:
        assert await db.hget(keys.job(job_id), "state") == b"failed"
    assert await client.state(patient.id) == "queued"


async def test_listing_a_long_queue_looks_at_its_oldest_jobs(db: Redis, client: Client) -> None:
    await db.zadd(keys.queue("default", "interactive"), {f"p{k}": k for k in range(25_000)})
    await db.hget("none", "x")  # so that the server counts the command
    before = (await db.info("commandstats"))["cmdstat_hget"]["calls"]
    assert [(queue.lane, queue.jobs) for queue in await client.queues()] == [("interactive", 25_000)]
    assert (await db.info("commandstats"))["cmdstat_hget"]["calls"] - before <= 10_000


async def test_a_deadline_that_was_written_with_an_exponent_is_kept(db: Redis, client: Client) -> None:
    job = await client.submit({"messages": HELLO, "deadline_s": 60})
    assert re.fullmatch(rb"\d{10}\.\d{3}", await db.hget(keys.job(job.id), "deadline") or b"")
    await db.hset(keys.job(job.id), "deadline", "1.7626049808760002e+9")
    await client.queues()
    assert await db.hget(keys.job(job.id), "state") == b"failed"


async def test_a_reader_ends_a_job_as_a_worker_does(db: Redis, client: Client, redis_url: str) -> None:
    by_worker = await client.submit(LATE)
    await asyncio.sleep(0.3)
    async with working(settings(redis_url), FakeChat().chat):
        await ended(db, by_worker.id)
    by_reader = await client.submit(LATE)
    await asyncio.sleep(0.3)
    assert await client.state(by_reader.id) == "failed"
    ids = by_worker.id, by_reader.id
    said = [json.loads(await db.get(keys.result(job_id))) for job_id in ids]
    for event in said:
        del event["id"], event["ts"]
    assert said[0] == said[1]
    for name in (keys.log, keys.result, keys.job):
        assert abs(await db.ttl(name(ids[0])) - await db.ttl(name(ids[1]))) <= 2


async def test_a_running_job_whose_lease_expired_ends_behind_its_events(db: Redis, client: Client) -> None:
    job = await client.submit(LATE)
    await start(db, job.id, lease=False)
    await asyncio.sleep(0.3)
    assert await client.state(job.id) == "failed"
    events = [event async for event in client.stream(job.id)]
    assert [(event.seq, event.attempt, event.type) for event in events] == [
        (0, 1, "started"),
        (1, 1, "delta"),
        (2, 2, "failed"),  # the next attempt, so that the writes of the first are refused
    ]
    await check_all_ended(db)


async def test_the_lease_of_a_live_worker_wins(db: Redis, client: Client) -> None:
    job = await client.submit(LATE)
    await start(db, job.id, lease=True)
    await asyncio.sleep(0.3)
    assert await client.state(job.id) == "running"
    await client.queues()
    assert await db.llen(keys.log(job.id)) == 2


async def test_an_ended_job_keeps_its_ending_beyond_its_deadline(db: Redis, client: Client) -> None:
    job = await client.submit(LATE)
    await client.cancel(job.id)
    await asyncio.sleep(0.3)
    assert await client.state(job.id) == "cancelled"
    assert [event.type async for event in client.stream(job.id)] == ["cancelled"]


async def test_a_reader_is_told_that_no_worker_lives_and_that_one_is_back(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO)

    async def come() -> None:
        await asyncio.sleep(2)
        await serve(db, workers=2)

    (gone, back), _ = await asyncio.gather(first(client.stream(job.id), 2), come())
    assert waiting(job.id, gone) == (-1, 0)
    assert waiting(job.id, back) == (-1, 2)
    assert await db.llen(keys.log(job.id)) == 0


async def test_a_reader_of_a_job_that_waits_is_told_how_much_of_the_model_is_loaded(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO)
    until = f"{time.time() + 60:.0f}"
    foreign = ["1 0 0 0 0 9 9", f"1 0 {until} 0 0 7 5", f"1 0 {until} 0 0 x 5", f"1 0 {until} 0 0 3", f"1 0 {until}"]
    await db.hset(keys.model("default"), mapping={f"w{at}": report for at, report in enumerate(foreign)})

    async def load() -> None:
        for mac_1, mac_2 in [("0 10", "0 10"), ("4 10", "0 10"), ("4 10", "5 10")]:
            reports = {"mac-1": f"100 0 {until} 0 0 {mac_1}", "mac-2": f"100 0 {until} 0 0 {mac_2}"}
            await db.hset(keys.model("default"), mapping=reports)
            await asyncio.sleep(1.5)

    events, _ = await asyncio.gather(first(client.stream(job.id), 3), load())
    found = [event for event in events if isinstance(event, Progress)]
    assert [(each.phase, each.done, each.total, each.seq, each.stored) for each in found] == [
        ("loading", 0, 10, -1, False),
        ("loading", 4, 10, -1, False),
        ("loading", 5, 10, -1, False),
    ]
    assert await db.llen(keys.log(job.id)) == 0
    frames = sse.frames(client, job.id)
    async with aclosing(frames):
        assert b"id: " not in await anext(frames)
    await start(db, job.id, lease=True)
    with pytest.raises(TimeoutError):  # a worker that has the job is not loading
        async with asyncio.timeout(2.5):
            await anext(client.stream(job.id, after=1))


@pytest.mark.timing
async def test_a_reader_is_told_within_two_seconds_in_the_middle_of_a_stream(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO)
    await serve(db)
    await start(db, job.id, lease=True)
    events = client.stream(job.id)
    async with aclosing(events):
        assert [(await anext(events)).seq for _ in range(2)] == [0, 1]
        await asyncio.sleep(0.5)
        await db.delete(keys.model("default"))
        with pytest.raises(TimeoutError):  # a worker that drains still has the lease
            async with asyncio.timeout(1.5):
                await anext(client.stream(job.id, after=1))
        await db.delete(lease_key(job.id))
        gone_at = time.monotonic()
        assert waiting(job.id, await anext(events)) == (1, 0)
        assert time.monotonic() - gone_at < 2
        raw = json.dumps({"id": job.id, "seq": 2, "attempt": 1, "type": "delta", "ts": 0, "token_ids": [2]})
        await db.rpush(keys.log(job.id), raw)
        await db.publish(keys.channel(job.id), raw)
        assert (await anext(events)).seq == 2
    resumed = await first(client.stream(job.id, after=1), 1)  # the `seq` of `waiting` misses nothing
    assert [event.seq for event in resumed] == [2]


async def test_a_reader_of_a_served_model_is_told_nothing(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO)
    await serve(db)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2.5):
            await anext(client.stream(job.id))


async def test_what_a_reader_makes_is_an_event_of_the_schema(client: Client) -> None:
    job = await client.submit(HELLO)
    async with asyncio.timeout(10), aclosing(client.stream_json(job.id)) as events:
        raw = await anext(events)
    TypeAdapter(AnyEvent).validate_json(raw)


async def test_a_browser_is_told_without_a_new_event_id(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO)
    await start(db, job.id, lease=False)
    async with asyncio.timeout(10), aclosing(sse.frames(client, job.id)) as frames:
        sent = [await anext(frames) for _ in range(4)]
    assert [frame.partition(b"\n")[0] for frame in sent] == [b"retry: 500", b"id: 0", b"id: 1", b"event: progress"]
    assert json.loads(sent[3].partition(b"data: ")[2])["workers"] == 0


async def test_an_openai_client_is_sent_a_comment(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO)
    await start(db, job.id, lease=False)
    async with asyncio.timeout(10), aclosing(await openai.sse(openai.chunks(client.stream(job.id)))) as lines:
        sent = [await anext(lines) for _ in range(3)]
    assert [line.partition(" ")[0] for line in sent] == ["data:", "data:", ":"]
    assert sent[2] == ": waiting, workers=0\n"
    made = [chunk async for chunk in _some(openai.chunks(client.stream(job.id)), 3)]
    assert made[2]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": None}]


async def _some(chunks: AsyncGenerator[openai.Chunk], number: int) -> AsyncGenerator[openai.Chunk]:
    async with aclosing(chunks):
        for _ in range(number):
            yield await anext(chunks)


async def test_a_reader_with_threads_is_told(redis_url: str, client: Client) -> None:
    job = await client.submit(LATE)

    def read() -> list[str]:
        with SyncClient(redis_url) as sync:
            return [event.type for event in sync.stream(job.id)]

    assert (await asyncio.to_thread(read))[-1] == "failed"


async def test_a_user_who_may_only_read_follows_a_job_all_the_same(db: Redis, client: Client, redis_url: str) -> None:
    job = await client.submit(HELLO)
    rules = ["~*", "&*", "+@read", "+@pubsub", "+@connection", "-@scripting"]
    await db.execute_command("ACL", "SETUSER", "reader", "reset", "on", ">PASSWORD", *rules)
    try:
        async with Client(redis_url.replace("redis://", "redis://reader:PASSWORD@")) as reader:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2.5):
                    await anext(reader.stream(job.id))
            assert await reader.state(job.id) == "queued"
    finally:
        await db.execute_command("ACL", "DELUSER", "reader")


async def test_the_stream_continues_when_a_worker_comes(db: Redis, client: Client, redis_url: str) -> None:
    job = await client.submit({"say": ["Hello"]})
    events = client.stream(job.id)
    async with asyncio.timeout(20), aclosing(events):
        assert waiting(job.id, await anext(events)) == (-1, 0)
        async with working(settings(redis_url), FakeChat().chat):
            rest = [event async for event in events]
    assert [event.seq for event in rest if event.stored] == list(range(sum(event.stored for event in rest)))
    assert rest[-1].type == "finished"
