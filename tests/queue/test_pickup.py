"""Jobs are claimed when the worker is woken, and at each poll."""

import asyncio

import pytest
from redis import Redis as BlockingRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost

from sluice.contract import keys
from tests.line import Line
from tests.queue.held import HoldingWorker, holding
from tests.queue.helpers import ended, envelope, field, lapse, put, types, until
from worker.errors import CancelJob, OwnershipLost
from worker.queue.job.claims import lease_key

BODY = envelope({})
SELDOM = {"poll_s": 60, "lease_s": 1200}


async def test_a_poll_takes_a_job_for_each_free_row_of_both_lanes(redis_url: str, db: Redis) -> None:
    for k in range(5):
        await put(db, f"file-{k}", BODY, lane="batch", at_ms=k)
    await put(db, "chat", BODY)
    async with holding(redis_url) as parts:
        await parts.worker.poll()
        assert parts.held.jobs.ids() == ["chat", "file-0"], "one row is reserved"
        await parts.worker.poll()
        assert len(parts.held.jobs.ids()) == 2


async def test_polls_between_two_sweeps_are_no_sweeps(redis_url: str, db: Redis) -> None:
    async with holding(redis_url, **SELDOM) as parts:
        for _ in range(3):
            await parts.worker.poll()
        assert parts.sweeps.count == 1
    async with holding(redis_url, poll_s=0.01) as parts:
        for _ in range(2):
            await parts.worker.poll()
            await asyncio.sleep(0.02)
        assert parts.sweeps.count == 2


async def test_a_sweep_finds_the_cancel_keys_of_running_jobs(redis_url: str, db: Redis) -> None:
    await put(db, "a", BODY)
    async with holding(redis_url, poll_s=0.01) as parts:
        await parts.worker.poll()
        await asyncio.sleep(0.02)
        await db.set(keys.cancel("a"), "1")
        await parts.worker.poll()
        await until(lambda: not parts.held.jobs.ids())
        assert isinstance(parts.held.ended["a"], CancelJob)


async def test_a_job_of_ours_that_is_claimed_again_is_interrupted_and_requeued(redis_url: str, db: Redis) -> None:
    await put(db, "a", BODY)
    async with holding(redis_url, **SELDOM) as parts:
        await parts.worker.poll()
        await asyncio.sleep(0)
        await lapse(db, "a")
        await parts.worker.poll()
        await until(lambda: not parts.held.jobs.ids())
        assert isinstance(parts.held.ended["a"], OwnershipLost)
        assert [await field(db, "a", name) for name in ("state", "attempt")] == ["queued", "2"]
        assert not await db.exists(lease_key("a"))


async def test_a_worker_that_is_woken_does_not_wait_for_the_next_poll(
    redis_url: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with holding(redis_url, **SELDOM) as parts:
        polls = count_polls(parts, monkeypatch)
        task = asyncio.create_task(parts.worker.claim_jobs())
        await until(lambda: len(polls) == 1)
        await put(db, "a", BODY)
        parts.worker.wake()
        await until(lambda: parts.held.jobs.ids() == ["a"])
        parts.worker.stopping.set()
        parts.worker.wake()
        await asyncio.wait_for(task, 5)
        assert len(polls) == 2


@pytest.mark.parametrize("lane", keys.LANES)
async def test_a_job_that_is_due_before_the_next_poll_is_claimed_when_it_is_due(
    redis_url: str, db: Redis, lane: keys.Lane
) -> None:
    async with holding(redis_url, **SELDOM) as parts:
        await put(db, "later", BODY, lane=lane, at_ms=await server_ms(db) + 3_600_000)
        await put(db, "soon", BODY, lane=lane, at_ms=(due_ms := await server_ms(db) + 300))
        task = asyncio.create_task(parts.worker.claim_jobs())
        await until(lambda: parts.held.jobs.ids() == ["soon"])
        assert await server_ms(db) >= due_ms
        parts.worker.stopping.set()
        parts.worker.wake()
        await asyncio.wait_for(task, 5)


async def test_a_job_that_becomes_due_while_no_row_is_free_causes_no_poll(
    redis_url: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with holding(redis_url, max_rows=1, reserved_rows=0, **SELDOM) as parts:
        await put(db, "now", BODY)
        await put(db, "soon", BODY, at_ms=await server_ms(db) + 20)
        polls = count_polls(parts, monkeypatch)
        task = asyncio.create_task(parts.worker.claim_jobs())
        await until(lambda: parts.held.jobs.ids() == ["now"])
        await asyncio.sleep(0.1)
        assert len(polls) == 1
        parts.worker.stopping.set()
        parts.worker.wake()
        await asyncio.wait_for(task, 5)


async def server_ms(db: Redis) -> int:
    seconds, microseconds = await db.time()
    return int(seconds * 1000 + microseconds // 1000)


def count_polls(parts: HoldingWorker, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that each poll from now on makes longer when it has ended."""
    polls: list[None] = []
    poll = parts.worker.poll

    async def counted() -> None:
        await poll()
        polls.append(None)

    monkeypatch.setattr(parts.worker, "poll", counted)
    return polls


async def test_a_poll_tells_the_other_workers_its_rows_and_speed(redis_url: str, db: Redis) -> None:
    await put(db, "chat", BODY)
    await put(db, "file", BODY, lane="batch")
    async with holding(redis_url, [0.02, 0.0], max_rows=5) as parts:
        await parts.worker.poll()
        stored = (await db.hget(keys.rows("default"), "ada")).split()
        assert stored[2:] == [b"2", b"5", b"3", b"2", b"20000", b"0"], "in use, all, free of each lane, microseconds"


async def test_jobs_that_only_a_sweep_finds_wake_the_workers_that_they_are_left_to(redis_url: str, db: Redis) -> None:
    async with holding(redis_url, poll_s=0.01) as parts, holding(redis_url, worker_name="bob") as other:
        await parts.worker.poll()
        await other.worker.poll()
        async with db.pubsub() as wakes:
            await wakes.subscribe(keys.wake("default"))
            assert (await wakes.get_message(timeout=5))["type"] == "subscribe"
            for k in range(4):
                await put(db, f"chat-{k}", BODY)
            await asyncio.sleep(0.02)
            await parts.worker.poll()
            assert (await wakes.get_message(timeout=5))["type"] == "message"
            assert len(parts.held.jobs.ids()) == 2


async def test_a_job_left_to_a_worker_that_hangs_is_claimed_without_a_further_wake_up(
    redis_url: str, db: Redis
) -> None:
    async with holding(redis_url, **SELDOM) as parts, holding(redis_url, worker_name="bob", **SELDOM) as hung:
        await parts.worker.poll()
        await hung.worker.poll()
        for k in range(3):
            await put(db, f"chat-{k}", BODY)
        task = asyncio.create_task(parts.worker.claim_jobs())
        await until(lambda: len(parts.held.jobs.ids()) == 3)
        parts.worker.stopping.set()
        parts.worker.wake()
        await asyncio.wait_for(task, 5)


def stops_during_claims(line: Line, parts: HoldingWorker) -> None:
    """Stop the worker when the server has answered its first claim and the answer has not arrived."""
    line.loses = lambda: bool(parts.worker.stopping.set())


async def test_jobs_of_a_claim_that_was_under_way_when_the_worker_stopped_are_requeued(
    redis_url: str, db: Redis
) -> None:
    await put(db, "a", BODY)
    await put(db, "file", BODY, lane="batch")
    async with Line(redis_url) as line, holding(line.url) as parts:
        stops_during_claims(line, parts)
        await parts.worker.poll()
        assert parts.held.jobs.ids() == []
        names = ("state", "attempt", "crashes", "worker")
        assert [await field(db, "a", name) for name in names] == ["queued", "1", "0", ""]
        assert not await db.exists(lease_key("a"))
        assert await field(db, "file", "attempt") is None, "no claim was begun after the stop"
    async with holding(redis_url) as parts:
        await parts.worker.poll()
        assert parts.held.jobs.ids() == ["a", "file"], "the next worker waits for no lease"


async def test_a_job_past_its_deadline_is_ended_by_a_worker_that_stops(redis_url: str, db: Redis) -> None:
    await put(db, "late", BODY)
    await db.hset(keys.job("late"), "deadline", "1")
    async with Line(redis_url) as line, holding(line.url) as parts:
        stops_during_claims(line, parts)
        await parts.worker.poll()
        assert types(await ended(db, "late")) == ["failed"]


async def test_a_worker_that_is_stopped_begins_no_claim(redis_url: str, db: Redis) -> None:
    await put(db, "a", BODY)
    async with holding(redis_url) as parts:
        parts.worker.stopping.set()
        await parts.worker.poll()
        assert (parts.held.jobs.ids(), await field(db, "a", "attempt")) == ([], None)


@pytest.mark.parametrize("lane", keys.LANES)
async def test_claims_whose_reply_was_lost_are_requeued(redis_url: str, db: Redis, lane: keys.Lane) -> None:
    async with Line(redis_url) as line, holding(line.url) as parts:
        await parts.worker.poll()  # the server has the scripts by now
        await put(db, "a", BODY, lane=lane)
        with BlockingRedis.from_url(redis_url) as server:
            line.loses = lambda: bool(server.exists(lease_key("a")))
            with pytest.raises(ConnectionLost):
                await parts.worker.poll()
        line.loses = lambda: False
        assert await db.exists(lease_key("a"))
        await parts.worker.requeue_lost_claims()
        assert parts.held.jobs.ids() == []
    assert ([await field(db, "a", name) for name in ("state", "crashes")], await db.exists(lease_key("a"))) == (
        ["queued", "0"], 0,
    )  # fmt: skip


async def test_lost_claims_are_left_to_their_leases_during_an_outage(redis_url: str) -> None:
    async with Line(redis_url) as line, holding(line.url) as parts:
        line.down()
        await parts.worker.requeue_lost_claims()
        assert parts.held.jobs.ids() == []


async def test_connecting_waits_for_redis_and_makes_the_worker_ready(redis_url: str) -> None:
    async with Line(redis_url) as line, holding(line.url) as parts:
        line.down()
        connecting = asyncio.create_task(parts.worker.connect())
        await asyncio.sleep(0.05)
        assert parts.worker.readiness.parts()["redis"]() is not None
        line.up()
        assert await asyncio.wait_for(connecting, 5)
        assert parts.worker.readiness.parts()["redis"]() is None


async def test_a_worker_that_is_stopped_before_redis_answers_is_not_connected(redis_url: str) -> None:
    async with Line(redis_url) as line, holding(line.url) as parts:
        line.down()
        connecting = asyncio.create_task(parts.worker.connect())
        await asyncio.sleep(0.05)
        parts.worker.stopping.set()
        assert not await asyncio.wait_for(connecting, 5)
