"""Workers of a model share the jobs that wait: a claim leaves jobs to workers that should take them."""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.keys import Lane
from tests.fakes import FakeChat
from tests.queue.helpers import envelope, field, listening, put, settings, until, working
from worker.queue.job import claims as claims_module
from worker.queue.job.claims import Claims, WorkerRows
from worker.queue.job.publisher import Publisher
from worker.queue.redis_server import ServerClock, redis_from_settings

BODY = envelope({})
HANGS = envelope({"then": "hang"})
IDLE = WorkerRows(0, 8, {"interactive": 8, "batch": 8})
Claimer = Callable[..., Claims]


@pytest.fixture
async def claimer(redis_url: str) -> AsyncIterator[Claimer]:
    async with redis_from_settings(settings(redis_url)) as redis:

        def make(name: str, *, lease_s: float = 10.0) -> Claims:
            return Claims(redis, settings(redis_url, worker_name=name, lease_s=lease_s))

        yield make


@pytest.fixture(autouse=True)
def _for_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs are left for a minute unless a test moves the clock: none is taken because this machine is busy."""
    monkeypatch.setattr(claims_module, "_LEFT_S", 60.0)


def rows(
    in_use: int = 0, max_rows: int = 8, *, steps_s: tuple[float, ...] = (), batch: int | None = None
) -> WorkerRows:
    free = max_rows - in_use
    return WorkerRows(in_use, max_rows, {"interactive": free, "batch": free if batch is None else batch}, steps_s)


async def put_all(db: Redis, jobs: int, *, lane: Lane = "interactive", name: str = "job") -> None:
    for k in range(jobs):
        await put(db, f"{name}-{k}", BODY, lane=lane, at_ms=k + 1)


async def introduce(claimer: Claimer, fleet: Sequence[WorkerRows]) -> list[Claims]:
    """Return the claims of workers that know each other, since each has claimed before."""
    workers = [claimer(f"worker-{k}") for k in range(len(fleet))]
    for worker, its in zip(workers, fleet, strict=True):
        assert await worker.take("interactive", its.free["interactive"], rows=its) == []
    return workers


async def shares(workers: Sequence[Claims], fleet: Sequence[WorkerRows], lane: Lane = "interactive") -> list[int]:
    """Return how many jobs each worker claims when all are woken, one after another."""
    pairs = zip(workers, fleet, strict=True)
    return [len(await worker.take(lane, its.free[lane], rows=its)) for worker, its in pairs]


def later(monkeypatch: pytest.MonkeyPatch, seconds: float = 61.0) -> None:
    """Move the monotonic clock."""
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + seconds)


@pytest.mark.parametrize("lane", keys.LANES)
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("jobs", [1, 4, 7, 8, 16])
async def test_a_burst_is_shared_to_one_job(db: Redis, claimer: Claimer, number: int, jobs: int, lane: Lane) -> None:
    workers = await introduce(claimer, fleet := [rows(max_rows=32)] * number)
    await put_all(db, jobs, lane=lane)
    claimed = await shares(workers, fleet, lane)
    assert (sum(claimed), max(claimed) - min(claimed)) == (jobs, int(jobs % number > 0))


async def test_jobs_that_come_one_by_one_are_shared_to_one_job(db: Redis, claimer: Claimer) -> None:
    workers, counts = await introduce(claimer, [IDLE] * 2), [0, 0]
    for k in range(9):
        await put(db, f"job-{k}", BODY, at_ms=k + 1)
        for each in (0, 1):  # the first is always faster
            counts[each] += len(await workers[each].take("interactive", 8 - counts[each], rows=rows(counts[each])))
    assert counts == [5, 4]


async def test_a_lone_worker_takes_all_and_asks_for_no_further_claim(db: Redis, claimer: Claimer) -> None:
    await put_all(db, 8)
    (alone,) = await introduce(claimer, [rows(8)])
    assert len(await alone.take("interactive", 8, rows=IDLE)) == 8
    assert alone.next_at("interactive") == math.inf


async def test_a_worker_with_more_rows_in_use_leaves_jobs_to_the_others(db: Redis, claimer: Claimer) -> None:
    workers = await introduce(claimer, fleet := [rows(5), rows(0)])
    await put_all(db, 4)
    assert await shares(workers, fleet) == [0, 4]


async def test_workers_share_in_proportion_to_their_rows(db: Redis, claimer: Claimer) -> None:
    workers = await introduce(claimer, fleet := [rows(max_rows=4), rows(max_rows=12)])
    await put_all(db, 8)
    assert await shares(workers, fleet) == [2, 6]


@pytest.mark.parametrize(
    ("steps_s", "expected"),
    [
        (((0.03,), (0.01,)), [2, 6]),
        (((0.014,), (0.01,)), [4, 4]),
        (((0.03,), (0.0,)), [4, 4]),
        (((0.03,), ()), [4, 4]),
        (((9.0,), (0.000001,)), [1, 7]),
        (((0.03, 0.0, 0.06), (0.0, 0.04, 0.02)), [2, 6]),
        (((0.03, 0.0, 0.06), (0.01, 0.04, 0.0)), [2, 6]),
        (((0.03, 0.0), (0.0, 0.01)), [4, 4]),
    ],
)
async def test_workers_share_in_proportion_to_their_speed(
    db: Redis, claimer: Claimer, steps_s: tuple[tuple[float, ...], ...], expected: list[int]
) -> None:
    fleet = [rows(max_rows=16, steps_s=each) for each in steps_s]
    workers = await introduce(claimer, fleet)
    await put_all(db, 8)
    assert await shares(workers, fleet) == expected


async def test_every_worker_fills_its_rows_from_a_backlog(db: Redis, claimer: Claimer) -> None:
    workers = await introduce(claimer, fleet := [rows(3), rows(0), rows(7)])
    await put_all(db, 40)
    assert await shares(workers, fleet) == [5, 8, 1]


async def test_offline_jobs_are_left_only_to_workers_that_may_take_them(db: Redis, claimer: Claimer) -> None:
    workers = await introduce(claimer, fleet := [rows(2), rows(0, batch=1)])
    await put_all(db, 4, lane="batch")
    assert await shares(workers, fleet, "batch") == [3, 1]


@pytest.mark.parametrize("seed", range(12))
async def test_no_job_waits_beside_a_free_row_once_all_workers_were_woken(
    db: Redis, claimer: Claimer, seed: int
) -> None:
    dice = random.Random(seed)
    sizes = [dice.randint(1, 12) for _ in range(dice.randint(2, 6))]
    fleet = [
        rows(dice.randint(0, size), size, steps_s=dice.choice([(), (0.01, 0.012), (0.035, 0.0)])) for size in sizes
    ]
    workers = await introduce(claimer, fleet)
    free = sum(each.free["interactive"] for each in fleet)
    await put_all(db, jobs := dice.randint(1, free + 3))
    order = dice.sample(range(len(workers)), len(workers))
    claimed = await shares([workers[k] for k in order], [fleet[k] for k in order])
    assert sum(claimed) == min(jobs, free)


async def test_a_job_left_to_a_dead_worker_is_taken_after_the_time_for_that(
    db: Redis, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, _ = await introduce(claimer, [IDLE] * 2)
    await asyncio.sleep(0.002)  # the dead one's last claim was in an earlier millisecond
    await put_all(db, 4)
    assert len(await live.take("interactive", 8, rows=IDLE)) == 2
    assert len(await live.take("interactive", 6, rows=rows(2))) == 0, "it is asked again before the time is over"
    assert 0 < live.next_at("interactive") - time.monotonic() <= 60
    later(monkeypatch)
    assert len(await live.take("interactive", 6, rows=rows(2))) == 2
    assert live.next_at("interactive") == math.inf


async def test_a_dead_worker_costs_one_wait(db: Redis, claimer: Claimer, monkeypatch: pytest.MonkeyPatch) -> None:
    live, _ = await introduce(claimer, [IDLE] * 2)
    await asyncio.sleep(0.002)
    await put_all(db, 2)
    await live.take("interactive", 8, rows=IDLE)
    later(monkeypatch)
    await live.take("interactive", 7, rows=rows(1))
    await put_all(db, 4, name="more")
    assert len(await live.take("interactive", 6, rows=rows(2))) == 4


async def test_jobs_of_a_late_worker_are_shared_among_the_others(
    db: Redis, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = [rows(max_rows=32)] * 3
    workers = await introduce(claimer, fleet)
    await asyncio.sleep(0.002)
    await put_all(db, 12)
    assert await shares(workers[:1], fleet[:1]) == [4]
    await asyncio.sleep(0.002)
    assert await shares(workers[1:2], fleet[1:2]) == [4]
    later(monkeypatch)
    assert await shares(workers[:2], [rows(4, 32)] * 2) == [2, 2]


async def test_workers_that_leave_a_job_to_each_other_take_it_after_the_time_for_that(
    db: Redis, claimer: Claimer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await introduce(claimer, [rows(0)] * 2)
    await put_all(db, 1)
    assert await first.take("interactive", 4, rows=rows(4)) == []
    await asyncio.sleep(0.002)
    await db.hset(keys.rows("default"), "worker-0", await as_stored(db, "worker-0", in_use=0))
    assert await second.take("interactive", 4, rows=rows(4)) == []
    await db.hset(keys.rows("default"), "worker-1", await as_stored(db, "worker-1", in_use=0))
    later(monkeypatch)
    assert len(await first.take("interactive", 4, rows=rows(4))) == 1


async def as_stored(db: Redis, name: str, *, in_use: int) -> str:
    """Return a worker's rows as they are stored, but for the rows in use."""
    at, until, _, *rest = (await db.hget(keys.rows("default"), name)).decode().split()
    return " ".join([at, until, str(in_use), *rest])


async def test_a_worker_whose_lease_expired_is_left_nothing(db: Redis, claimer: Claimer) -> None:
    gone, live = claimer("gone", lease_s=0.01), claimer("live")
    await gone.take("interactive", 8, rows=IDLE)
    await live.take("interactive", 8, rows=IDLE)
    await asyncio.sleep(0.03)
    await put_all(db, 4)
    assert len(await live.take("interactive", 8, rows=IDLE)) == 4


@pytest.mark.parametrize(
    "value", [b"\xff", "", "1 2", "1 99999999999999 0 8 8", "9" * 5000, "1 99999999999999 0 0 8 8 1"]
)
async def test_a_field_that_no_worker_wrote_is_left_nothing(db: Redis, claimer: Claimer, value: str | bytes) -> None:
    (alone,) = await introduce(claimer, [IDLE])
    await db.hset(keys.rows("default"), "evil", value)
    await put_all(db, 4)
    assert len(await alone.take("interactive", 8, rows=IDLE)) == 4


async def test_a_foreign_value_at_the_key_is_deleted(db: Redis, claimer: Claimer) -> None:
    await db.set(keys.rows("default"), "foreign")
    await put_all(db, 4)
    assert len(await claimer("ada").take("interactive", 8, rows=IDLE)) == 4
    assert await db.type(keys.rows("default")) == b"hash"


async def test_a_claim_wakes_the_workers_that_jobs_are_left_to_if_it_is_asked_to(db: Redis, claimer: Claimer) -> None:
    ada, bob = await introduce(claimer, [IDLE] * 2)
    async with db.pubsub() as wakes:
        await wakes.subscribe(keys.wake("default"))
        assert (await wakes.get_message(timeout=5))["type"] == "subscribe"
        await put_all(db, 4)
        await ada.take("interactive", 8, rows=IDLE)
        assert await wakes.get_message(timeout=0.05) is None
        await ada.take("interactive", 6, rows=rows(2), wake=True)
        assert (await wakes.get_message(timeout=5))["type"] == "message"
        await bob.take("interactive", 8, rows=IDLE, wake=True)
        assert await wakes.get_message(timeout=0.05) is None, "nothing was left"


async def test_an_idle_worker_tells_its_rows_only_if_they_change(db: Redis, claimer: Claimer) -> None:
    (alone,) = await introduce(claimer, [IDLE])
    told = await db.hgetall(keys.rows("default"))
    await asyncio.sleep(0.002)
    await alone.take("interactive", 8, rows=IDLE)
    assert await db.hgetall(keys.rows("default")) == told
    await alone.take("interactive", 7, rows=rows(1))
    assert await db.hgetall(keys.rows("default")) != told
    assert await db.pttl(keys.rows("default")) > 0


@pytest.mark.parametrize(("is_count", "left"), [(False, ["1", "7", "7"]), (True, ["2", "6", "6"])])
async def test_the_end_of_a_job_frees_its_row_at_once(
    redis_url: str, db: Redis, claimer: Claimer, is_count: bool, left: list[str]
) -> None:
    await put_all(db, 2)
    first, _ = await claimer("ada").take("interactive", 8, rows=IDLE)
    if is_count:
        await db.hset(keys.job(first.job_id), "function", "count")
    async with redis_from_settings(given := settings(redis_url)) as redis:
        publisher = Publisher(redis, ServerClock(), given)
        writing = asyncio.create_task(publisher.run())
        log = publisher.open(first, on_lost=lambda: None)
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        await publisher.finish(log, "finished", b"{}", usage=usage)
        writing.cancel()
    stored = (await db.hget(keys.rows("default"), "ada")).decode().split()
    assert [stored[2], *stored[4:]] == left


async def test_running_workers_share_a_burst_and_the_next_one(redis_url: str, db: Redis) -> None:
    chat = FakeChat().chat
    ada, bob = (settings(redis_url, worker_name=name) for name in ("ada", "bob"))
    async with working(ada, chat), working(bob, chat):
        await listening(db, workers=2)
        await until(lambda: _rows_in_use(db, ["0", "0"]))
        for burst in ("a", "b"):
            for k in range(6):
                await put(db, f"{burst}-{k}", HANGS)
            await db.publish(keys.wake("default"), "")
            await until(lambda burst=burst: _are_claimed(db, burst, 6))
            assert sorted(await owners(db, burst, 6)) == ["ada"] * 3 + ["bob"] * 3
            for k in range(6):
                await db.publish(keys.CONTROL, f"{burst}-{k}")
            await until(lambda: _rows_in_use(db, ["0", "0"]))


async def test_a_worker_that_drains_is_left_nothing(redis_url: str, db: Redis) -> None:
    chat = FakeChat().chat
    ada, bob = (settings(redis_url, worker_name=name) for name in ("ada", "bob"))
    async with working(ada, chat), working(bob, chat) as draining:
        await listening(db, workers=2)
        await until(lambda: _rows_in_use(db, ["0", "0"]))
        for k in range(4):
            await put(db, f"a-{k}", HANGS)
        await db.publish(keys.wake("default"), "")
        await until(lambda: _rows_in_use(db, ["2", "2"]))
        draining.stop()
        await until(lambda: _is_full(db, "bob"))
        for k in range(6):
            await put(db, f"b-{k}", HANGS)
        await db.publish(keys.wake("default"), "")
        await until(lambda: _are_claimed(db, "b", 6))
        assert await owners(db, "b", 6) == ["ada"] * 6


async def owners(db: Redis, burst: str, jobs: int) -> list[str]:
    """Return the worker of each job; "" while none has claimed it."""
    return [await field(db, f"{burst}-{k}", "worker") or "" for k in range(jobs)]


async def _are_claimed(db: Redis, burst: str, jobs: int) -> bool:
    return "" not in await owners(db, burst, jobs)


async def _rows_in_use(db: Redis, expected: list[str]) -> bool:
    return [numbers.split()[2].decode() for numbers in await db.hvals(keys.rows("default"))] == expected


async def _is_full(db: Redis, worker: str) -> bool:
    return bool((await db.hget(keys.rows("default"), worker)).split()[4:6] == [b"0", b"0"])
