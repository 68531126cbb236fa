"""Jobs are claimed when the worker is woken, and at each poll."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost

from schemas import keys
from tests.line import Line
from tests.queue.held import HeldJobs
from tests.queue.helpers import envelope, field, lapse, put, settings, until
from worker.errors import Cancelled, OwnershipLost
from worker.queue.cancel_backlog import CancelBacklog
from worker.queue.cancel_keys import CancelKeys
from worker.queue.job.claims import Claim, Claims, lease_key
from worker.queue.pickup import Pickup
from worker.queue.server.connection import connect
from worker.queue.server.redis_server import RedisServer

BODY = envelope({})
SELDOM = {"poll_s": 60, "lease_s": 1200}


@dataclass(frozen=True)
class Parts:
    pickup: Pickup
    held: HeldJobs
    claims: Claims
    stopping: asyncio.Event

    def running(self) -> list[str]:
        return self.held.jobs.ids()


@asynccontextmanager
async def picking_up(url: str, steps_s: Sequence[float] = (), **given: Any) -> AsyncIterator[Parts]:
    known = settings(url, **{"max_rows": 3, "reserved_rows": 1, **given})
    async with connect(known) as redis:
        held, claims = HeldJobs(redis), Claims(redis, known)
        stopping, cancel_keys = asyncio.Event(), CancelKeys(redis, held.jobs)
        cancels = CancelBacklog(held.jobs.cancel, claims)
        server = RedisServer(redis, known)
        pickup = Pickup(server, known, claims, held.jobs, cancel_keys, cancels, stopping, lambda: steps_s)
        yield Parts(pickup, held, claims, stopping)
        await held.release()


async def test_a_poll_takes_a_job_for_each_free_row_of_both_lanes(redis_url: str, db: Redis) -> None:
    for k in range(5):
        await put(db, f"file-{k}", BODY, lane="batch", at_ms=k)
    await put(db, "chat", BODY)
    async with picking_up(redis_url) as parts:
        await parts.pickup.poll()
        assert parts.running() == ["chat", "file-0"], "one row is reserved"
        await parts.pickup.poll()
        assert len(parts.running()) == 2


async def test_polls_between_two_sweeps_are_no_sweeps(redis_url: str, db: Redis) -> None:
    async with picking_up(redis_url, **SELDOM) as parts:
        assert [await parts.pickup.poll() for _ in range(3)] == [True, False, False]
    async with picking_up(redis_url, poll_s=0.01) as parts:
        assert await parts.pickup.poll()
        await asyncio.sleep(0.02)
        assert await parts.pickup.poll()


async def test_a_sweep_finds_the_cancel_keys_of_running_jobs(redis_url: str, db: Redis) -> None:
    await put(db, "a", BODY)
    async with picking_up(redis_url, poll_s=0.01) as parts:
        await parts.pickup.poll()
        await asyncio.sleep(0.02)
        await db.set(keys.cancel("a"), "1")
        await parts.pickup.poll()
        await until(lambda: not parts.running())
        assert isinstance(parts.held.ended["a"], Cancelled)


async def test_a_job_of_ours_that_is_claimed_again_is_interrupted_and_requeued(redis_url: str, db: Redis) -> None:
    await put(db, "a", BODY)
    async with picking_up(redis_url, **SELDOM) as parts:
        await parts.pickup.poll()
        await asyncio.sleep(0)
        await lapse(db, "a")
        await parts.pickup.poll()
        await until(lambda: not parts.running())
        assert isinstance(parts.held.ended["a"], OwnershipLost)
        assert [await field(db, "a", name) for name in ("state", "attempt")] == ["queued", "2"]
        assert not await db.exists(lease_key("a"))


async def test_a_worker_that_is_woken_does_not_wait_for_the_next_poll(redis_url: str, db: Redis) -> None:
    async with picking_up(redis_url, **SELDOM) as parts:
        polls = 0

        async def poll() -> None:
            nonlocal polls
            await parts.pickup.poll()
            polls += 1

        task = asyncio.create_task(parts.pickup.run(poll))
        await until(lambda: polls == 1)
        await put(db, "a", BODY)
        parts.pickup.wake()
        await until(lambda: parts.running() == ["a"])
        parts.stopping.set()
        parts.pickup.wake()
        await asyncio.wait_for(task, 5)
        assert polls == 2


@pytest.mark.parametrize("lane", keys.LANES)
async def test_a_job_that_is_due_before_the_next_poll_is_claimed_when_it_is_due(
    redis_url: str, db: Redis, lane: keys.Lane
) -> None:
    async with picking_up(redis_url, **SELDOM) as parts:
        await put(db, "later", BODY, lane=lane, at_ms=await server_ms(db) + 3_600_000)
        await put(db, "soon", BODY, lane=lane, at_ms=(due_ms := await server_ms(db) + 300))
        task = asyncio.create_task(parts.pickup.run(poll_of(parts)))
        await until(lambda: parts.running() == ["soon"])
        assert await server_ms(db) >= due_ms
        parts.stopping.set()
        parts.pickup.wake()
        await asyncio.wait_for(task, 5)


async def test_a_job_that_becomes_due_while_no_row_is_free_causes_no_poll(redis_url: str, db: Redis) -> None:
    async with picking_up(redis_url, max_rows=1, reserved_rows=0, **SELDOM) as parts:
        await put(db, "now", BODY)
        await put(db, "soon", BODY, at_ms=await server_ms(db) + 20)
        polls = 0

        async def poll() -> None:
            nonlocal polls
            await parts.pickup.poll()
            polls += 1

        task = asyncio.create_task(parts.pickup.run(poll))
        await until(lambda: parts.running() == ["now"])
        await asyncio.sleep(0.1)
        assert polls == 1
        parts.stopping.set()
        parts.pickup.wake()
        await asyncio.wait_for(task, 5)


async def server_ms(db: Redis) -> int:
    seconds, microseconds = await db.time()
    return int(seconds * 1000 + microseconds // 1000)


def poll_of(parts: Parts) -> Callable[[], Awaitable[None]]:
    async def poll() -> None:
        await parts.pickup.poll()

    return poll


async def test_a_poll_tells_the_other_workers_its_rows_and_speed(redis_url: str, db: Redis) -> None:
    await put(db, "chat", BODY)
    await put(db, "file", BODY, lane="batch")
    async with picking_up(redis_url, [0.02, 0.0], max_rows=5) as parts:
        await parts.pickup.poll()
        stored = (await db.hget(keys.rows("default"), "ada")).split()
        assert stored[2:] == [b"2", b"5", b"3", b"2", b"20000", b"0"], "in use, all, free of each lane, microseconds"


async def test_jobs_that_only_a_sweep_finds_wake_the_workers_that_they_are_left_to(redis_url: str, db: Redis) -> None:
    async with picking_up(redis_url, poll_s=0.01) as parts, picking_up(redis_url, worker_name="bob") as other:
        await parts.pickup.poll()
        await other.pickup.poll()
        async with db.pubsub() as wakes:
            await wakes.subscribe(keys.wake("default"))
            assert (await wakes.get_message(timeout=5))["type"] == "subscribe"
            for k in range(4):
                await put(db, f"chat-{k}", BODY)
            await asyncio.sleep(0.02)
            assert await parts.pickup.poll()
            assert (await wakes.get_message(timeout=5))["type"] == "message"
            assert len(parts.running()) == 2


async def test_a_job_left_to_a_worker_that_hangs_is_claimed_without_a_further_wake_up(
    redis_url: str, db: Redis
) -> None:
    async with picking_up(redis_url, **SELDOM) as parts, picking_up(redis_url, worker_name="bob", **SELDOM) as hung:
        await parts.pickup.poll()
        await hung.pickup.poll()
        for k in range(3):
            await put(db, f"chat-{k}", BODY)
        task = asyncio.create_task(parts.pickup.run(poll_of(parts)))
        await until(lambda: len(parts.running()) == 3)
        parts.stopping.set()
        parts.pickup.wake()
        await asyncio.wait_for(task, 5)


def stop_during_claims(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the worker when the server has answered a claim and the answer has not arrived."""
    take = parts.claims.take

    async def stopped(*args: Any, **kwargs: Any) -> list[Claim]:
        claims = await take(*args, **kwargs)
        parts.stopping.set()
        return claims

    monkeypatch.setattr(parts.claims, "take", stopped)


async def test_jobs_of_a_claim_that_was_under_way_when_the_worker_stopped_are_requeued(
    redis_url: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(db, "a", BODY)
    await put(db, "file", BODY, lane="batch")
    async with picking_up(redis_url) as parts:
        stop_during_claims(parts, monkeypatch)
        await parts.pickup.poll()
        assert parts.running() == []
        names = ("state", "attempt", "crashes", "worker")
        assert [await field(db, "a", name) for name in names] == ["queued", "1", "0", ""]
        assert not await db.exists(lease_key("a"))
        assert await field(db, "file", "attempt") is None, "no claim was begun after the stop"
    async with picking_up(redis_url) as parts:
        await parts.pickup.poll()
        assert parts.running() == ["a", "file"], "the next worker waits for no lease"


async def test_a_job_past_its_deadline_is_ended_by_a_worker_that_stops(
    redis_url: str, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(db, "late", BODY)
    await db.hset(keys.job("late"), "deadline", "1")
    async with picking_up(redis_url) as parts:
        stop_during_claims(parts, monkeypatch)
        await parts.pickup.poll()
        assert parts.running() == ["late"]


async def test_a_worker_that_is_stopped_begins_no_claim(redis_url: str, db: Redis) -> None:
    await put(db, "a", BODY)
    async with picking_up(redis_url) as parts:
        parts.stopping.set()
        await parts.pickup.poll()
        assert (parts.running(), await field(db, "a", "attempt")) == ([], None)


@pytest.mark.parametrize("lane", keys.LANES)
async def test_claims_whose_reply_was_lost_are_requeued(redis_url: str, db: Redis, lane: keys.Lane) -> None:
    await put(db, "a", BODY, lane=lane)
    async with Line(redis_url) as line, picking_up(line.url) as parts:
        await parts.claims.take("batch", 0)  # the server has the scripts by now
        line.loses = lambda: True
        with pytest.raises(ConnectionLost):
            await parts.claims.take(lane, 1)
        line.loses = lambda: False
        assert await db.exists(lease_key("a"))
        await parts.pickup.requeue_lost_claims()
        assert parts.running() == []
    assert ([await field(db, "a", name) for name in ("state", "crashes")], await db.exists(lease_key("a"))) == (
        ["queued", "0"], 0,
    )  # fmt: skip


async def test_lost_claims_are_left_to_their_leases_during_an_outage(redis_url: str) -> None:
    async with Line(redis_url) as line, picking_up(line.url) as parts:
        line.down()
        await parts.pickup.requeue_lost_claims()
        assert parts.running() == []


async def test_connecting_waits_for_redis_and_makes_the_worker_ready(redis_url: str) -> None:
    async with Line(redis_url) as line, picking_up(line.url) as parts:
        line.down()
        connecting = asyncio.create_task(parts.pickup.connect())
        await asyncio.sleep(0.05)
        assert parts.pickup.readiness.parts()["redis"]() is not None
        line.up()
        assert await asyncio.wait_for(connecting, 5)
        assert parts.pickup.readiness.parts()["redis"]() is None


async def test_a_worker_that_is_stopped_before_redis_answers_is_not_connected(redis_url: str) -> None:
    async with Line(redis_url) as line, picking_up(line.url) as parts:
        line.down()
        connecting = asyncio.create_task(parts.pickup.connect())
        await asyncio.sleep(0.05)
        parts.stopping.set()
        assert not await asyncio.wait_for(connecting, 5)
