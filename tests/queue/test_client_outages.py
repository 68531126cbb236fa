"""What the client does when its connections die, with and without a word, and when the server refuses it."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

import sluice
from scripts.stack import Server
from sluice import CancelNotStored, Client, ServerUnreachable, Submitted, wire
from sluice.batch.board import Board
from sluice.batch.status import Batch
from sluice.letters import DeadLetter
from sluice.retries import Retries, is_transient
from tests.line import Line
from tests.waiting import until

HELLO = [{"role": "user", "content": "Hello"}]
GAP_S = 5.0  # the most that a dead connection may cost


def event(seq: int, type: str = "delta", **more: Any) -> bytes:
    fields = {"token_ids": []} if type == "delta" else {"reason": "requested", "usage": {}}
    return json.dumps({"id": "a", "seq": seq, "attempt": 1, "type": type, "ts": 0, **fields, **more}).encode()


async def say(db: Redis, *events: bytes) -> None:
    for raw in events:
        await db.rpush(wire.log_key("a"), raw)
        await db.publish(wire.channel("a"), raw)


@asynccontextmanager
async def behind(url: str, *, own: bool = False, **options: Any) -> AsyncIterator[tuple[Line, Client]]:
    """A client behind a proxy; with `own`, one that was given a redis-py client as a backend makes it."""
    async with Line(url) as line:
        if not own:
            async with Client(line.url, **options) as client:
                yield line, client
            return
        async with Redis.from_url(line.url) as redis, Client(redis=redis, **options) as client:
            yield line, client


async def seqs(client: Client, job_id: str, **how: Any) -> list[int]:
    return [event.seq async for event in client.stream(job_id, **how)]


async def subscribed(db: Redis, channel: str, *, times: int = 1) -> None:
    async def is_subscribed() -> bool:
        return bool((await db.pubsub_numsub(channel))[0][1] == times)

    await until(is_subscribed)


# Connections that die without a word


@pytest.mark.parametrize("own", [False, True])
async def test_a_stream_goes_on_within_seconds_of_a_black_hole(db: Redis, redis_url: str, own: bool) -> None:
    async with behind(redis_url, own=own) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        await subscribed(db, wire.channel("a"))
        await say(db, event(0))
        await asyncio.sleep(0.2)
        line.swallow()
        await say(db, event(1), event(2, "cancelled"))
        assert await asyncio.wait_for(stream, GAP_S) == [0, 1, 2]


async def test_a_stream_after_a_black_hole_hears_the_channel_again(db: Redis, redis_url: str) -> None:
    async with behind(redis_url) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        await subscribed(db, wire.channel("a"))
        line.swallow()
        await subscribed(db, wire.channel("a"), times=2)  # the server knows nothing of the dead connection either
        await asyncio.sleep(1.5)  # the list has been read on a new connection too
        began = time.monotonic()
        await say(db, event(0), event(1, "cancelled"))
        assert await asyncio.wait_for(stream, GAP_S) == [0, 1]
        assert time.monotonic() - began < 0.9, "it was told by the list"


async def test_a_stream_goes_on_within_seconds_of_the_end_of_a_black_hole_that_took_new_connections_too(
    db: Redis, redis_url: str
) -> None:
    async with behind(redis_url) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        await subscribed(db, wire.channel("a"))
        line.mute = True
        await say(db, event(0), event(1, "cancelled"))
        await asyncio.sleep(6)
        assert not stream.done()
        line.mute = False
        assert await asyncio.wait_for(stream, GAP_S) == [0, 1]


async def events_as_json(client: Client) -> list[bytes]:
    return [raw async for raw in client.stream_json("a", after=0)]


async def batch_states(client: Client) -> list[str]:
    return [batch.status async for batch in client.batch_events("b")]


BATCH = Batch(id="b", input_file_id="in", completion_window="24h", status="completed", created_at=1)
CALLS: dict[str, tuple[Callable[[Client], Awaitable[Any]], Any]] = {
    "stream_json": (events_as_json, [event(1, "cancelled")]),
    "result": (lambda client: client.result("done"), {"object": "chat.completion"}),
    "submit": (lambda client: client.submit(HELLO, id="new"), Submitted("new", new=True, state="queued")),
    "stream": (lambda client: seqs(client, "a"), [0, 1]),
    "cancel": (lambda client: client.cancel("a"), None),
    "state": (lambda client: client.state("a"), "running"),
    "workers": (lambda client: client.workers(), [{"name": "ada"}]),
    "queued": (lambda client: client.queued("default", "batch"), 0),
    "ping": (lambda client: client.ping(), None),
    "dead_letters": (lambda client: client.dead_letters(), []),
    "batch_events": (batch_states, ["completed"]),
    "batch_status": (lambda client: client.batch_status("b"), BATCH),
    "batches": (lambda client: client.batches(), [BATCH]),
    "cancel_batch": (lambda client: client.cancel_batch("b"), BATCH),
}


@pytest.mark.parametrize("own", [False, True])
async def test_every_call_is_answered_within_seconds_of_a_black_hole(db: Redis, redis_url: str, own: bool) -> None:
    await db.set(wire.result_key("done"), '{"object": "chat.completion"}')
    await db.hset(wire.job_key("a"), "state", "running")
    await db.hset("sluice:worker:ada", "name", "ada")
    await say(db, event(0), event(1, "cancelled"))
    await Board(db).announce(BATCH)

    async def timed(name: str) -> float:
        call, expected = CALLS[name]
        async with behind(redis_url, own=own) as (line, client):
            await asyncio.gather(*(client.ping() for _ in range(4)))  # so many connections are open, and idle
            line.swallow()
            began = time.monotonic()
            answer = await call(client)
            assert expected is None or answer == expected, name
            return time.monotonic() - began

    took = dict(zip(CALLS, await asyncio.gather(*map(timed, CALLS)), strict=True))
    assert {name: round(seconds, 1) for name, seconds in took.items() if seconds > GAP_S} == {}


async def test_many_calls_on_dead_connections_are_all_answered_within_seconds(redis_url: str) -> None:
    async with behind(redis_url) as (line, client):
        await asyncio.gather(*(client.ping() for _ in range(20)))
        line.swallow()
        calls = (client.submit(HELLO, id=f"job-{k}") for k in range(60))
        async with asyncio.timeout(GAP_S):
            assert all(job.new for job in await asyncio.gather(*calls))


async def test_a_client_on_a_dead_connection_closes_at_once(db: Redis, redis_url: str) -> None:
    async with Line(redis_url) as line:
        client = Client(line.url)
        stream = asyncio.create_task(seqs(client, "a"))
        await subscribed(db, wire.channel("a"))
        line.swallow()
        stream.cancel()
        await asyncio.wait([stream])
        await asyncio.wait_for(client.aclose(), 2)


# Connections that are lost while an answer is on its way


async def test_a_submission_whose_answer_was_lost_is_still_new_and_queued_once(db: Redis, redis_url: str) -> None:
    async with behind(redis_url) as (line, client):
        await client.ping()
        await client.submit(HELLO, id="before")  # the script is known to the server
        losses = iter([True])
        line.loses = lambda: next(losses, False)
        assert await client.submit(HELLO, id="a") == Submitted("a", new=True, state="queued")
        assert line.lost == 1
        assert await client.submit(HELLO, id="a") == Submitted("a", new=False, state="queued")
    assert await db.zcard(wire.queue_key("default", "interactive")) == 2


async def test_a_dead_letter_whose_removal_was_not_heard_of_is_submitted_again(db: Redis, redis_url: str) -> None:
    letter = DeadLetter("a", "default", "interactive", 3, 0.0, {}, json.dumps({"a": [{"messages": HELLO}]}))
    fields = {name: getattr(letter, name) for name in letter.__slots__}
    await db.hset(wire.DEAD, "a", json.dumps(fields))
    async with behind(redis_url) as (line, client):
        answers = iter([False, True])  # the letter, and then that it is dropped
        await client.ping()
        line.loses = lambda: next(answers, False)
        assert (await client.retry("a")).new
        assert line.lost == 1
    assert await db.hlen(wire.DEAD) == 0


async def test_the_first_call_after_a_restart_of_the_server_is_answered() -> None:
    with Server() as server:
        async with Client(server.url) as client:
            await asyncio.gather(*(client.submit(HELLO) for _ in range(5)))
            server.leave()
            server.start()
            assert (await client.submit(HELLO, id="a")).new


async def test_a_submission_waits_while_the_server_restarts() -> None:
    with Server() as server:
        async with Client(server.url) as client:
            await client.ping()
            server.leave()
            early = asyncio.create_task(client.submit(HELLO, id="a"))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.start)
            assert (await asyncio.wait_for(early, GAP_S)).new


# Outages that last


@pytest.mark.parametrize("call", ["stream", "result", "batch_events"])
async def test_an_outage_ends_what_waits_after_the_time_that_the_caller_gave(redis_url: str, call: str) -> None:
    async with behind(redis_url, outage_s=0.5) as (line, client):
        line.down()
        began = time.monotonic()
        with pytest.raises(ServerUnreachable) as raised:
            await {"stream": lambda: seqs(client, "a"), "result": lambda: client.result("a")}.get(
                call, lambda: batch_states(client)
            )()
        assert 0.5 <= time.monotonic() - began < GAP_S
        assert isinstance(raised.value, ConnectionError)
        assert isinstance(raised.value.__cause__, RedisError)


async def test_without_a_limit_an_outage_is_waited_out(db: Redis, redis_url: str) -> None:
    async with behind(redis_url, outage_s=None) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        line.down()
        await asyncio.sleep(7)
        assert not stream.done()
        line.up()
        await say(db, event(0, "cancelled"))
        assert await asyncio.wait_for(stream, GAP_S) == [0]


async def test_a_call_gives_an_outage_back_after_a_few_seconds(redis_url: str) -> None:
    async with behind(redis_url, outage_s=None) as (line, client):
        line.down()
        with pytest.raises(ServerUnreachable):
            await asyncio.wait_for(client.submit(HELLO), 7)
        with pytest.raises(ServerUnreachable):
            await asyncio.wait_for(client.ping(), 1)


async def test_a_time_limit_of_a_result_is_not_taken_for_an_outage(client: Client) -> None:
    job = await client.submit(HELLO)
    with pytest.raises(TimeoutError):
        await client.result(job.id, timeout=0.1)


# Refusals, which do not pass


async def test_a_wrong_password_is_raised_at_once(redis_url: str) -> None:
    async with Client(redis_url.replace("://", "://nobody:wrong@")) as client:
        for call in (seqs(client, "a"), client.result("a"), client.submit(HELLO), client.cancel("a"), client.ping()):
            with pytest.raises(AuthenticationError):
                await asyncio.wait_for(call, 3)


@pytest.fixture
async def limited(db: Redis, redis_url: str) -> AsyncIterator[Callable[..., Client]]:
    """Makes clients of a user who may do all but what is given, as in `-lrange`."""
    clients = []

    def make(*rules: str) -> Client:
        clients.append(Client(redis_url.replace("://", "://limited:secret@")))
        return clients[-1]

    async def allow(*rules: str) -> Client:
        await db.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", "&*", "+@all", *rules)
        return make()

    yield allow
    for client in clients:
        await client.aclose()
    await db.execute_command("ACL", "DELUSER", "limited")


@pytest.mark.parametrize("rules", [("-lrange",), ("-subscribe",), ("resetchannels",)])
async def test_a_missing_permission_ends_a_stream(limited: Callable[..., Awaitable[Client]], rules: Any) -> None:
    client = await limited(*rules)
    with pytest.raises(NoPermissionError):
        await asyncio.wait_for(seqs(client, "a"), 3)
    with pytest.raises(NoPermissionError):
        await asyncio.wait_for(client.result("a"), 3)


async def test_a_user_who_may_not_ping_streams_through_lost_connections(
    db: Redis, limited: Callable[..., Awaitable[Client]]
) -> None:
    client = await limited("-ping")
    stream = asyncio.create_task(seqs(client, "a"))
    await subscribed(db, wire.channel("a"))
    await say(db, event(0))
    await asyncio.sleep(2.5)  # the connection was quiet for long enough to be checked
    await db.client_kill_filter(user="limited")
    await say(db, event(1, "cancelled"))
    assert await asyncio.wait_for(stream, GAP_S) == [0, 1]


async def test_a_log_of_another_type_ends_a_stream(db: Redis, client: Client) -> None:
    await db.set(wire.log_key("a"), "no list")
    with pytest.raises(ResponseError):
        await asyncio.wait_for(seqs(client, "a"), 3)


@pytest.mark.parametrize("after", [-2, 2**53 + 1, 2**63, 2**64, 1.5, True, None, "1"])
async def test_a_number_that_no_event_can_have_is_refused(client: Client, after: Any) -> None:
    with pytest.raises(ValueError, match="after"):
        await asyncio.wait_for(seqs(client, "a", after=after), 3)


async def test_the_largest_number_is_taken(db: Redis, client: Client) -> None:
    await say(db, event(0), event(1, "cancelled"))
    assert await asyncio.wait_for(seqs(client, "a", after=2**53), 3) == []


async def test_a_stream_rides_out_a_script_that_keeps_the_server_busy(db: Redis, redis_url: str) -> None:
    busy = """
    local began = redis.call('TIME')
    repeat local now = redis.call('TIME') until now[1] * 1000 + now[2] / 1000 - began[1] * 1000 - began[2] / 1000 > 2500
    """
    await db.config_set("lua-time-limit", 100)
    try:
        async with Client(redis_url) as client:
            stream = asyncio.create_task(seqs(client, "a"))
            await subscribed(db, wire.channel("a"))
            await db.eval(busy, 0)
            await say(db, event(0, "cancelled"))
            assert await asyncio.wait_for(stream, GAP_S) == [0]
    finally:
        await db.config_set("lua-time-limit", 5000)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionError("refused"), True),
        (RedisTimeoutError("late"), True),
        (OSError(113, "no route"), True),
        (BusyLoadingError("loading"), True),
        (ReadOnlyError("a replica"), True),
        (ClusterDownError("CLUSTERDOWN the cluster is down"), True),
        (ResponseError("BUSY a script runs"), True),
        (AuthenticationError("wrong"), False),
        (NoPermissionError("no permission"), False),
        (OutOfMemoryError("full"), False),
        (ResponseError("WRONGTYPE another type"), False),
        (ResponseError("value is BUSY"), False),
    ],
)
def test_an_outage_passes_and_a_refusal_does_not(error: Exception, passes: bool) -> None:
    assert is_transient(error) is passes


async def test_an_answer_that_takes_long_is_waited_for_at_the_second_try(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.retries.ANSWER_S", 0.1)
    tries = []

    async def slow() -> str:
        tries.append(None)
        await asyncio.sleep(0.5)
        return "here"

    async with Redis.from_url(redis_url) as redis:
        assert await Retries(redis, 60.0).run(slow) == "here"
    assert len(tries) == 2


async def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.retries.ANSWER_S", 0.05)
    hangs = iter([3600, 0])
    async with Redis.from_url(redis_url) as redis:
        retries = Retries(redis, None, log=logging.getLogger("test"))
        await retries.ride_out(lambda: asyncio.sleep(next(hangs)))
    began, ended = (record.getMessage() for record in caplog.records)
    assert "does not answer (no answer within 0.05 s)" in began
    assert "answers again" in ended


# A full server


async def test_a_cancel_that_a_full_server_does_not_keep_is_told_to_the_workers_and_to_the_caller(
    db: Redis, client: Client
) -> None:
    async with db.pubsub() as control:
        await control.subscribe(wire.CONTROL)
        await control.get_message(timeout=1)
        await db.config_set("maxmemory", 1)
        try:
            with pytest.raises(CancelNotStored) as raised:
                await client.cancel("a")
        finally:
            await db.config_set("maxmemory", 0)
        assert isinstance(raised.value.__cause__, OutOfMemoryError)
        told = await control.get_message(timeout=1)
        assert told is not None
        assert told["data"] == b"a"


async def test_a_cancel_without_the_right_to_publish_is_an_error(limited: Callable[..., Awaitable[Client]]) -> None:
    client = await limited("-publish")
    with pytest.raises(NoPermissionError):
        await client.cancel("a")


def test_what_ends_an_outage_is_both_ours_and_redis_pys() -> None:
    assert issubclass(ServerUnreachable, sluice.SluiceError)
    assert issubclass(ServerUnreachable, ConnectionError)
