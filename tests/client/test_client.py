import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.asyncio import Redis

import sluice
from sluice import Client, JobCancelled, JobFailed, UnknownJob
from sluice.contract import keys
from sluice.contract.events import JobError, Usage
from tests.fakes import FakeChat
from tests.keyspace import check_all_ended
from tests.line import Line
from tests.queue.helpers import ask, ended, settings, until, until_it_has_said, working

HELLO = [{"role": "user", "content": "Hello"}]
TEN = {"say": [str(k) for k in range(10)], "pace_s": 0.01}


@pytest.fixture
async def chat(redis_url: str) -> AsyncIterator[FakeChat]:
    """At work, until the end of the test."""
    chat = FakeChat()
    async with working(settings(redis_url, max_rows=32), chat.chat):
        yield chat


async def heard(client: Client, job_id: str, **how: Any) -> list[sluice.Event]:
    return [event async for event in client.stream(job_id, **how)]


async def seqs(client: Client, job_id: str, **how: Any) -> list[int]:
    return [event.seq for event in await heard(client, job_id, **how)]


# Submit


async def test_a_second_submit_learns_what_became_of_the_first(db: Redis, client: Client, chat: FakeChat) -> None:
    await client.submit({"then": "hang"}, id="a")
    await until(lambda: bool(chat.running))
    running = await client.submit({}, id="a")
    assert (running.new, running.state) == (False, "running")
    await client.cancel("a")
    await ended(db, "a")
    cancelled = await client.submit({}, id="a")
    assert (cancelled.new, cancelled.state) == (False, "cancelled")
    assert chat.began == ["a"]


# Stream


async def test_a_stream_has_every_event_once_and_in_order(client: Client, chat: FakeChat) -> None:
    job = await client.submit(TEN)
    events = await heard(client, job.id)
    assert [event.seq for event in events] == list(range(12))
    assert [event.type for event in events] == ["started", *["delta"] * 10, "finished"]
    assert "".join(event.content or "" for event in events if isinstance(event, sluice.Delta)) == "0123456789"


async def test_a_late_subscriber_hears_the_same(db: Redis, client: Client, chat: FakeChat) -> None:
    await client.submit(TEN, id="a")
    early = asyncio.create_task(heard(client, "a"))
    await until_it_has_said(db, "a", 5)
    late = await heard(client, "a")
    assert late == await early == await heard(client, "a")


async def test_a_late_subscriber_does_not_wait_for_what_was_said(
    db: Redis, client: Client, chat: FakeChat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.streaming.SILENCE_S", 60)
    await client.submit(TEN, id="a")
    await ended(db, "a")
    assert await asyncio.wait_for(seqs(client, "a"), 30) == list(range(12))


async def test_a_subscriber_that_dropped_out_goes_on_after_what_it_saw(client: Client, chat: FakeChat) -> None:
    await client.submit(TEN, id="a")
    first = []
    async for event in client.stream("a"):
        first.append(event.seq)
        if event.seq == 4:
            break
    assert first + await seqs(client, "a", after=4) == list(range(12))


async def test_a_stream_after_the_final_event_is_empty_and_ends(db: Redis, client: Client, chat: FakeChat) -> None:
    """A browser that reconnects names the last event it saw, and that may be the final one."""
    await client.submit(TEN, id="a")
    await ended(db, "a")
    assert await seqs(client, "a", after=10) == [11]
    assert await asyncio.wait_for(heard(client, "a", after=11), 30) == []
    assert await asyncio.wait_for(heard(client, "a", after=1000), 30) == [], "a number of another job's"


async def test_a_stream_can_begin_before_its_job(client: Client, chat: FakeChat) -> None:
    early = asyncio.create_task(seqs(client, "a"))
    await asyncio.sleep(0.05)
    await client.submit(TEN, id="a")
    assert await early == list(range(12))


async def test_a_stream_as_json_is_the_log_itself(db: Redis, client: Client, chat: FakeChat) -> None:
    await client.submit(TEN, id="a")
    raw = [event async for event in client.stream_json("a")]
    assert raw == await db.lrange(keys.log("a"), 0, -1)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.streaming.SILENCE_S", 0.1)


@pytest.mark.usefixtures("_impatient")
async def test_a_job_without_a_trace_is_unknown(client: Client) -> None:
    with pytest.raises(UnknownJob, match="'nobody'"):
        await heard(client, "nobody", unknown_s=0.2)


@pytest.mark.usefixtures("_impatient")
async def test_a_job_that_waits_for_long_is_not_unknown(client: Client) -> None:
    await client.submit(HELLO, id="a")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(heard(client, "a", unknown_s=0.2), 0.7)


async def test_an_event_that_the_channel_lost_is_read_from_the_list(db: Redis, client: Client) -> None:
    def event(seq: int, **more: Any) -> bytes:
        return json.dumps(
            {"id": "a", "seq": seq, "attempt": 1, "type": "delta", "ts": 0, "token_ids": [], **more}
        ).encode()

    final = event(3, type="cancelled", reason="requested", usage={})
    listening = asyncio.create_task(seqs(client, "a"))
    await until(lambda: _subscribers(db, "a", 1))
    for k in range(3):
        await db.rpush(keys.log("a"), event(k))
    await db.publish(keys.channel("a"), event(2))
    await db.publish(keys.channel("a"), event(0))
    await db.rpush(keys.log("a"), final)
    await db.publish(keys.channel("a"), final)
    assert await asyncio.wait_for(listening, 30) == [0, 1, 2, 3]


async def _subscribers(db: Redis, job_id: str, count: int) -> bool:
    return bool((await db.pubsub_numsub(keys.channel(job_id)))[0][1] == count)


async def _kill_subscribers(db: Redis, while_true: Callable[[], bool]) -> int:
    killed = 0
    while while_true():
        await asyncio.sleep(0.1)
        killed += await db.client_kill_filter(_type="pubsub")
    return killed


async def test_connections_killed_all_the_time_cost_no_stream_an_event(
    db: Redis, client: Client, chat: FakeChat
) -> None:
    say = {"say": [str(k) for k in range(60)], "pace_s": 0.02}
    for k in range(16):
        await client.submit(say, id=f"job-{k}")
    streams = [asyncio.create_task(seqs(client, f"job-{k}")) for k in range(16)]
    killed = await _kill_subscribers(db, lambda: not all(stream.done() for stream in streams))
    assert [stream.result() for stream in streams] == [list(range(62))] * 16
    assert killed >= 3
    await check_all_ended(db)


async def test_a_stream_rides_out_an_outage(db: Redis, redis_url: str, chat: FakeChat) -> None:
    async with Line(redis_url) as line, Client(line.url) as client:
        await client.submit(TEN, id="a")
        stream = asyncio.create_task(seqs(client, "a"))
        await until_it_has_said(db, "a", 3)
        line.down()
        await ended(db, "a")
        await asyncio.sleep(0.2)
        line.up()
        assert await asyncio.wait_for(stream, 60) == list(range(12))


async def test_many_streams_share_one_connection(redis_url: str, db: Redis, chat: FakeChat) -> None:
    async with Redis.from_url(redis_url, client_name="backend") as theirs:
        client = Client(redis=theirs)
        for k in range(30):
            await client.submit({"say": ["a"], "then": "hang"}, id=f"job-{k}")
        streams = [asyncio.create_task(heard(client, f"job-{k}")) for k in range(30)]
        await until(lambda: _subscribers(db, "job-29", 1))
        listeners = [one for one in await db.client_list(_type="pubsub") if one["name"] == "backend"]
        assert [int(one["sub"]) for one in listeners] == [31]
        for k in range(30):
            await client.cancel(f"job-{k}")
        assert [(await stream)[-1].type for stream in streams] == ["cancelled"] * 30
        await client.aclose()


async def test_streams_that_begin_together_are_all_subscribed(db: Redis, client: Client) -> None:
    """Also those that come while the first one's connection is being made."""
    streams = []
    for k in range(20):
        streams.append(asyncio.create_task(heard(client, f"job-{k}")))
        await asyncio.sleep(0)
    for k in range(20):
        await until(lambda k=k: _subscribers(db, f"job-{k}", 1))  # type: ignore[misc]
    for stream in streams:
        stream.cancel()


async def test_a_channel_is_left_when_its_last_reader_leaves(db: Redis, client: Client, chat: FakeChat) -> None:
    await client.submit({"then": "hang"}, id="a")
    one, two = (asyncio.create_task(heard(client, "a")) for _ in range(2))
    await until(lambda: _subscribers(db, "a", 1))
    one.cancel()
    await asyncio.wait([one])
    await client.cancel("a")
    assert (await two)[-1].type == "cancelled"
    await until(lambda: _subscribers(db, "a", 0))


# Result, cancel, state


async def test_a_result_is_what_the_worker_stored(client: Client, chat: FakeChat) -> None:
    job = await client.submit(TEN)
    waited = await client.result(job.id)
    assert waited == await client.result(job.id) == {"object": "chat.completion", "said": "0123456789"}


async def test_the_result_of_a_failed_job_raises_what_was_wrong(client: Client, chat: FakeChat) -> None:
    job = await client.submit({"then": "raise"})
    for _ in ("waiting for it", "stored"):
        with pytest.raises(JobFailed) as raised:
            await client.result(job.id)
        ours = JobError("internal", "The worker failed on this job; its log says why.", retryable=True)
        assert raised.value.error == ours


async def test_the_result_of_a_cancelled_job_raises(db: Redis, client: Client, chat: FakeChat) -> None:
    job = await client.submit({"say": ["a"], "then": "hang"})
    await until(lambda: bool(chat.running))
    await client.cancel(job.id)
    with pytest.raises(JobCancelled, match="requested"):
        await client.result(job.id)
    final = (await heard(client, job.id))[-1]
    assert isinstance(final, sluice.Cancelled)
    assert (final.reason, final.usage) == ("requested", Usage(0, 1, 0))
    await check_all_ended(db)


async def test_a_result_that_takes_too_long_is_a_timeout(client: Client) -> None:
    job = await client.submit(HELLO)
    with pytest.raises(TimeoutError):
        await client.result(job.id, timeout=0.1)


async def test_a_result_that_has_expired_is_unknown(db: Redis, client: Client, chat: FakeChat) -> None:
    job = await client.submit(TEN)
    await client.result(job.id)
    await db.delete(keys.result(job.id))
    with pytest.raises(UnknownJob, match="expired"):
        await client.result(job.id)


@pytest.mark.parametrize("call", ["result", "cancel", "state"])
async def test_a_bad_id_is_refused_everywhere(client: Client, call: str) -> None:
    with pytest.raises(ValueError, match="job id"):
        await getattr(client, call)("a b")


async def test_a_job_s_state_is_told_whoever_queued_it(db: Redis, client: Client, redis_url: str) -> None:
    assert await client.state("a") is None
    await ask(db, "a", {"then": "hang"})
    assert await client.state("a") == "queued"
    chat = FakeChat()
    async with working(settings(redis_url), chat.chat):
        await until(lambda: bool(chat.running))
        assert await client.state("a") == "running"
        await client.cancel("a")
        await ended(db, "a")
    assert await client.state("a") == "cancelled"


async def test_live_workers_are_listed_until_they_leave(client: Client, redis_url: str) -> None:
    async with working(settings(redis_url, worker_name="ada", max_rows=5), FakeChat().chat):

        async def is_there() -> bool:
            return bool(await client.workers())

        await until(is_there)
        (shown,) = await client.workers()
        assert (shown["name"], shown["model"], shown["max_rows"]) == ("ada", "default", "5")
    assert await client.workers() == []


async def test_jobs_in_a_lane_are_counted(client: Client) -> None:
    for _ in range(3):
        await client.submit(HELLO, lane="batch")
    assert [await client.queued("default", lane) for lane in keys.LANES] == [0, 3]
