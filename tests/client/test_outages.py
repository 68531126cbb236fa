"""The client reconnects when its connections die, with or without an error."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import (
    ConnectionError,
    RedisError,
)

import sluice
from sluice import Client, ServerUnreachable, Submitted
from sluice.batch.registry import BatchRegistry
from sluice.contract import keys
from sluice.contract.batch import NO_LINES, Batch
from sluice.queues import DeadLetter
from sluice.transport import Retries
from tests.client.streaming import HELLO, behind, event, say, seqs, subscribed
from tests.line import Line
from tests.support.stack import Server

GAP_S = 5.0  # the most that a dead connection may cost
OWN = pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)])  # the caller's own redis-py


@pytest.fixture
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the client take a connection, or a server, for dead after a fifth of the time."""
    waits = {
        "sluice.transport": {"ANSWER_S": 0.4},
        "sluice.streaming": {"_QUIET_S": 0.2, "SILENCE_S": 0.2, "ANSWER_S": 0.4},
        "sluice.client": {"SILENCE_S": 0.2},
    }
    for module, values in waits.items():
        for name, value in values.items():
            monkeypatch.setattr(f"{module}.{name}", value)


# Connections that die without a word


@pytest.mark.usefixtures("_soon")
@OWN
async def test_a_stream_goes_on_within_seconds_of_a_black_hole(db: Redis, redis_url: str, own: bool) -> None:
    async with behind(redis_url, own=own) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        await subscribed(db, keys.channel("a"))
        await say(db, event(0))
        await asyncio.sleep(0.2)
        line.swallow()
        await say(db, event(1), event(2, "cancelled"))
        assert await asyncio.wait_for(stream, GAP_S) == [0, 1, 2]


@pytest.mark.usefixtures("_soon")
async def test_a_stream_after_a_black_hole_hears_the_channel_again(
    db: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.streaming.SILENCE_S", 3600)  # the list is read only after a gap
    async with behind(redis_url) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        await subscribed(db, keys.channel("a"))
        line.swallow()
        await subscribed(db, keys.channel("a"), times=2)  # the server knows nothing of the dead connection either
        await asyncio.sleep(0.7)  # the list has been read, on a new connection
        await say(db, event(0), event(1, "cancelled"))
        assert await asyncio.wait_for(stream, GAP_S) == [0, 1]


@pytest.mark.usefixtures("_soon")
async def test_a_black_hole_is_noticed_again_if_redis_py_loses_the_first_cancellation(
    db: Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, lost = PubSub.get_message, list[str]()

    async def loses_the_first(pubsub: PubSub, *how: Any, **named: Any) -> Any:
        try:
            return await receive(pubsub, *how, **named)
        except asyncio.CancelledError:
            if lost:
                raise
            lost.append("cancellation")

    monkeypatch.setattr(PubSub, "get_message", loses_the_first)
    monkeypatch.setattr("sluice.streaming.SILENCE_S", 3600)
    async with behind(redis_url) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        await subscribed(db, keys.channel("a"))
        line.swallow()
        await subscribed(db, keys.channel("a"), times=2)  # on a new connection
        assert lost
        await say(db, event(0), event(1, "cancelled"))
        assert await asyncio.wait_for(stream, GAP_S) == [0, 1]


@pytest.mark.usefixtures("_soon")
async def test_a_stream_goes_on_within_seconds_of_the_end_of_a_black_hole_that_took_new_connections_too(
    db: Redis, redis_url: str
) -> None:
    async with behind(redis_url) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        await subscribed(db, keys.channel("a"))
        line.mute = True
        await say(db, event(0), event(1, "cancelled"))
        await asyncio.sleep(1.5)
        assert not stream.done()
        line.mute = False
        assert await asyncio.wait_for(stream, GAP_S) == [0, 1]


async def events_as_json(client: Client) -> list[bytes]:
    return [raw async for raw in client.stream_json("a", after=0)]


async def batch_states(client: Client) -> list[str]:
    return [batch.status async for batch in client.batch_events("b")]


BATCH = Batch(
    id="b", input_file_id="in", completion_window="24h", status="completed", created_at=1, request_counts=NO_LINES
)
CALLS: dict[str, tuple[Callable[[Client], Awaitable[Any]], Any]] = {
    "stream_json": (events_as_json, [event(1, "cancelled")]),
    "result": (lambda client: client.result("done"), {"object": "chat.completion"}),
    "submit": (lambda client: client.submit(HELLO, id="new"), Submitted("new", new=True, state="queued")),
    "stream": (lambda client: seqs(client, "a"), [0, 1]),
    "cancel": (lambda client: client.cancel("a"), None),
    "state": (lambda client: client.state("a"), "running"),
    "workers": (lambda client: client.workers(), [{"name": "ada"}]),
    "ask_worker": (lambda client: client.ask_worker({"name": "ada", "started_at": "1"}, "drain"), False),
    "queued": (lambda client: client.queued("default", "batch"), 0),
    "ping": (lambda client: client.ping(), None),
    "dead_letters": (lambda client: client.dead_letters(), []),
    "batch_events": (batch_states, ["completed"]),
    "batch_status": (lambda client: client.batch_status("b"), BATCH),
    "batches": (lambda client: client.batches(), [BATCH]),
    "cancel_batch": (lambda client: client.cancel_batch("b"), BATCH),
}


@pytest.mark.timing
@OWN
async def test_every_call_is_answered_within_seconds_of_a_black_hole(db: Redis, redis_url: str, own: bool) -> None:
    await db.set(keys.result("done"), '{"object": "chat.completion"}')
    await db.hset(keys.job("a"), "state", "running")
    await db.hset("sluice:worker:ada", "name", "ada")
    await say(db, event(0), event(1, "cancelled"))
    await BatchRegistry(db).announce(BATCH)

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


@pytest.mark.usefixtures("_soon")
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
        await subscribed(db, keys.channel("a"))
        line.swallow()
        stream.cancel()
        await asyncio.wait([stream])
        await asyncio.wait_for(client.aclose(), GAP_S)


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
    assert await db.zcard(keys.queue("default", "interactive")) == 2


async def test_a_cancel_whose_answer_was_lost_has_cancelled(db: Redis, redis_url: str) -> None:
    async with behind(redis_url) as (line, client):
        for job_id in ("before", "a", "b"):
            await client.submit(HELLO, id=job_id)
        await client.cancel("before")  # the script is known to the server
        losses = iter([True])
        line.loses = lambda: next(losses, False)
        assert await client.cancel("a") == "cancelled"
        assert line.lost == 1
        assert await client.cancel("a") == "ended", "by another call"
        assert await client.purge("default", "interactive") == 1


async def test_a_purge_whose_answer_was_lost_counts_each_job_once(db: Redis, redis_url: str) -> None:
    async with behind(redis_url) as (line, client):
        for job_id in ("before", "a", "b"):
            await client.submit(HELLO, id=job_id)
        await client.cancel("before")
        answers = iter([False, False, True])  # the ids, whether the script is known, and then the outcomes
        line.loses = lambda: next(answers, False)
        assert await client.purge("default", "interactive") == 2
        assert line.lost == 1


@pytest.mark.parametrize("answers", [(False, True), (False, False, True)], ids=["submission", "removal"])
async def test_a_dead_letter_is_retried_once_although_an_answer_was_lost(
    db: Redis, redis_url: str, answers: tuple[bool, ...]
) -> None:
    letter = DeadLetter("a", "default", "interactive", 3, 0.0, {}, json.dumps({"a": [{"messages": HELLO}]}))
    fields = {name: getattr(letter, name) for name in letter.__slots__}
    await db.hset(keys.DEAD, "a", json.dumps(fields))
    async with behind(redis_url) as (line, client):
        await client.submit(HELLO, id="before")  # from now on the server knows the script
        lost = iter(answers)
        line.loses = lambda: next(lost, False)
        job = await client.retry("a")
        assert (job.new, job.id, line.lost) == (True, letter.retry_id, 1)
    assert await db.hlen(keys.DEAD) == 0
    assert await db.zcard(keys.queue("default", "interactive")) == 2


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


@pytest.mark.usefixtures("_soon")
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


@pytest.mark.usefixtures("_soon")
async def test_without_a_limit_an_outage_is_waited_out(db: Redis, redis_url: str) -> None:
    async with behind(redis_url, outage_s=None) as (line, client):
        stream = asyncio.create_task(seqs(client, "a"))
        line.down()
        await asyncio.sleep(1.5)
        assert not stream.done()
        line.up()
        await say(db, event(0, "cancelled"))
        assert await asyncio.wait_for(stream, GAP_S) == [0]


@pytest.mark.usefixtures("_soon")
async def test_a_call_gives_an_outage_back_after_a_few_seconds(redis_url: str) -> None:
    async with behind(redis_url, outage_s=None) as (line, client):
        line.down()
        with pytest.raises(ServerUnreachable):
            await asyncio.wait_for(client.submit(HELLO), GAP_S)
        with pytest.raises(ServerUnreachable):
            await asyncio.wait_for(client.ping(), GAP_S)


async def test_a_time_limit_of_a_result_is_not_taken_for_an_outage(client: Client) -> None:
    job = await client.submit(HELLO)
    with pytest.raises(TimeoutError):
        await client.result(job.id, timeout=0.1)


async def test_a_stream_rides_out_a_script_that_keeps_the_server_busy(db: Redis, redis_url: str) -> None:
    busy = """
    local began = redis.call('TIME')
    repeat local now = redis.call('TIME') until now[1] * 1000 + now[2] / 1000 - began[1] * 1000 - began[2] / 1000 > 2500
    """
    await db.config_set("lua-time-limit", 100)
    try:
        async with Client(redis_url) as client:
            stream = asyncio.create_task(seqs(client, "a"))
            await subscribed(db, keys.channel("a"))
            await db.eval(busy, 0)
            await say(db, event(0, "cancelled"))
            assert await asyncio.wait_for(stream, GAP_S) == [0]
    finally:
        await db.config_set("lua-time-limit", 5000)


async def test_an_answer_that_takes_long_is_waited_for_at_the_second_try(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.transport.ANSWER_S", 0.1)
    tries = []

    async def slow() -> str:
        tries.append(None)
        await asyncio.sleep(0.3)
        return "here"

    async with Redis.from_url(redis_url) as redis:
        assert await Retries(redis, 60.0).run(slow) == "here"
    assert len(tries) == 2


async def test_an_outage_is_logged_when_it_begins_and_when_it_ends(
    redis_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.transport.ANSWER_S", 0.05)
    hangs = chain([3600], repeat(0))
    async with Redis.from_url(redis_url) as redis:
        retries = Retries(redis, None, log=logging.getLogger("test"))
        await retries.run_until_answered(lambda: asyncio.sleep(next(hangs)))
    began, ended = (record.getMessage() for record in caplog.records)
    assert "does not answer (no answer within 0.05 s)" in began
    assert "answers again" in ended


def test_what_ends_an_outage_is_both_ours_and_redis_pys() -> None:
    assert issubclass(ServerUnreachable, sluice.SluiceError)
    assert issubclass(ServerUnreachable, ConnectionError)
