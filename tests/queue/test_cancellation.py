"""A client's cancellation, with and without a worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Collection
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as ConnectionLost

from sluice import CancelNotStored, Client, JobCancelled
from sluice.contract import keys
from tests.fakes import FakeChat
from tests.keyspace import check_all_ended, check_job_keys
from tests.queue.held import HeldJobs, claim_of
from tests.queue.helpers import BATCH, QUEUE, ask, ended, listening, put, settings, types, until, working
from tests.support.stack import free_port
from worker.errors import CancelJob
from worker.queue.job.claims import lease_key
from worker.queue.running import _BATCH, _MAX_PENDING, CancelRequests, RunningJobs

HELLO = [{"role": "user", "content": "Hello!"}]


async def test_a_job_that_nobody_serves_ends_at_once(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO, model="misspelt", lane="batch")
    assert await client.cancel(job.id) == "cancelled"
    assert [event.type async for event in client.stream(job.id)] == ["cancelled"]
    with pytest.raises(JobCancelled, match="requested"):
        await client.result(job.id)
    await check_job_keys(db, job.id)
    await check_all_ended(db)


async def test_a_plain_producer_s_job_is_found_in_whichever_queue_it_waits(db: Redis, client: Client) -> None:
    for k in range(150):
        await db.zadd(keys.queue(f"other-{k}", "batch"), {"another": 1})
    await put(db, "plain-7", b"{}", lane="batch")
    assert await client.cancel("plain-7") == "cancelled"
    assert await client.state("plain-7") == "cancelled"
    await check_job_keys(db, "plain-7")


async def test_a_client_ends_a_waiting_job_as_a_worker_does(db: Redis, client: Client, redis_url: str) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, max_rows=1, reserved_rows=0), chat.chat):
        await listening(db)
        await ask(db, "busy", {"then": "hang"})
        await until(lambda: bool(chat.running))
        for job_id in ("by-client", "by-worker"):
            await put(db, job_id, b"{}")
        await db.hset(keys.job("by-client"), mapping={"model": "default", "lane": "interactive"})
        assert await client.cancel("by-client") == "cancelled"
        await db.publish(keys.CONTROL, "by-worker")
        await ended(db, "by-worker")
        said = [json.loads(await db.get(keys.result(f"by-{who}"))) for who in ("client", "worker")]
        hashes = [await db.hgetall(keys.job(f"by-{who}")) for who in ("client", "worker")]
        for event, hash in zip(said, hashes, strict=True):
            del event["id"], event["ts"], hash[b"finished_at"]
        del hashes[0][b"model"], hashes[0][b"lane"], hashes[0][b"cancellation"]
        assert said[0] == said[1]
        assert hashes[0] == hashes[1]
        for name in (keys.log, keys.result, keys.job):
            assert abs(await db.ttl(name("by-client")) - await db.ttl(name("by-worker"))) <= 2
        await client.cancel("busy")
        await ended(db, "busy")
    await check_all_ended(db)


async def test_a_running_job_is_its_worker_s_to_end(db: Redis, client: Client, redis_url: str) -> None:
    chat = FakeChat()
    async with working(settings(redis_url), chat.chat):
        await listening(db)
        await ask(db, "a", {"then": "hang"})
        await until(lambda: bool(chat.running))
        assert await client.cancel("a") == "requested"
        assert types(await ended(db, "a")) == ["started", "cancelled"]
    await check_all_ended(db)


async def test_the_job_of_a_dead_worker_ends_at_once_when_its_lease_is_out(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO)
    await db.hset(keys.job(job.id), mapping={"state": "running", "attempt": 1})
    await db.set(lease_key(job.id), "dead:1", px=60_000)
    assert await client.cancel(job.id) == "requested"
    await db.delete(lease_key(job.id))
    assert await client.cancel(job.id) == "cancelled"
    assert await db.hget(keys.job(job.id), "attempt") == b"2", "which fences the one that ran it"
    await check_all_ended(db)


@pytest.mark.parametrize("state", ["finished", "failed", "cancelled"])
async def test_nothing_is_left_of_a_wish_that_came_after_the_end(db: Redis, client: Client, state: str) -> None:
    await db.hset(keys.job("a"), "state", state)
    assert await client.cancel("a") == "ended"
    assert await db.keys("*") == [keys.job("a").encode()]


async def test_a_wish_that_was_too_late_for_a_worker_goes_with_the_next_one(db: Redis, client: Client) -> None:
    await db.hset(keys.job("a"), "state", "finished")
    await db.set(keys.cancel("a"), "1", ex=3600)
    assert await client.cancel("a") == "ended"
    assert await db.exists(keys.cancel("a")) == 0


async def test_a_wish_for_a_job_that_is_still_to_come_is_kept_for_an_hour(db: Redis, client: Client) -> None:
    assert await client.cancel("a") == "requested"
    assert 3590 < await db.ttl(keys.cancel("a")) <= 3600


async def test_a_waiting_job_ends_on_a_full_server_too(db: Redis, client: Client) -> None:
    job, running = await client.submit(HELLO), await client.submit(HELLO)
    await db.set(lease_key(running.id), "ada:1", px=60_000)
    await db.config_set("maxmemory", 1)
    try:
        assert await client.cancel(job.id) == "cancelled"
        with pytest.raises(CancelNotStored):
            await client.cancel(running.id)
    finally:
        await db.config_set("maxmemory", 0)
    await check_job_keys(db, job.id)


@pytest.mark.parametrize(
    "spoil",
    [
        ("SET", "sluice:job:job-7", "x"),
        ("HSET", "sluice:job:job-7", "attempt", "9" * 30),
        ("HSET", "sluice:job:job-7", "state", "odd", "model", "\n:", "lane", "x"),
        ("SET", "sluice:log:job-7", "x"),
        ("RPUSH", "sluice:result:job-7", "x"),
        ("RPUSH", "arq:in-progress:job-7", "x"),
        ("HSET", "sluice:index:2:default:interactive", "a", "b"),
        ("SET", "sluice:index:2:default:interactive:lines", "x"),
    ],
)
async def test_foreign_values_do_not_keep_a_job_from_its_end(db: Redis, client: Client, spoil: tuple[Any, ...]) -> None:
    await put(db, "job-7", b"{}")
    await db.execute_command(*spoil)
    assert await client.cancel("job-7") == "cancelled"
    await check_job_keys(db, "job-7")


async def test_a_queue_is_purged_of_what_waits_and_nothing_else(db: Redis, client: Client) -> None:
    for k in range(1100):
        await put(db, f"job-{k:04}", b"{}", at_ms=k)
    await db.set(lease_key("job-0007"), "ada:1", px=60_000)
    seconds, _ = await db.time()
    await put(db, "young", b"{}", at_ms=seconds * 1000)
    progress: list[tuple[int, int]] = []

    def on_progress(done: int, ended: int) -> None:
        progress.append((done, ended))

    assert await client.purge("default", "interactive", older_than_s=60, on_progress=on_progress) == 1099
    assert progress == [(1000, 999), (1100, 1099)]
    assert await db.zrange(keys.queue("default", "interactive"), 0, -1) == [b"job-0007", b"young"]
    assert await client.purge("default", "interactive") == 1
    for job_id in ("job-0000", "job-1099", "young"):
        assert await client.state(job_id) == "cancelled"


# Of any worker's jobs, however many


class CountedLookups(CancelRequests):
    """Counts the look-ups, and loses the connection in those that it is told to."""

    def __init__(self, redis: Redis, jobs: RunningJobs) -> None:
        super().__init__(redis, settings("redis://unused"), jobs)
        self.lookups: list[int] = []
        self.lost = 0

    async def find_waiting(self, job_ids: Collection[str]) -> list[str]:
        self.lookups.append(len(job_ids))
        if self.lost:
            self.lost -= 1
            raise ConnectionLost("closed by the test")
        return await super().find_waiting(job_ids)


@pytest.fixture
async def counted(db: Redis) -> AsyncIterator[CountedLookups]:
    """At work until the end of the test, while the job `runs` runs."""
    held = HeldJobs.of_no_worker(db)
    await held.start(claim_of("runs"))
    counted = CountedLookups(db, held.jobs)
    task = asyncio.create_task(counted.run())
    yield counted
    task.cancel()
    await held.release()


async def is_empty(db: Redis) -> bool:
    return not await db.exists(QUEUE, BATCH)


async def test_thousands_of_ids_that_wait_nowhere_are_looked_up_in_a_few_calls(
    db: Redis, counted: CountedLookups
) -> None:
    await put(db, "waits", b"")
    for k in range(3 * _BATCH - 1):
        counted.add(f"x{k}")
    counted.add("waits")
    await until(lambda: is_empty(db))
    assert counted.lookups == [_BATCH] * 3
    assert await db.hget(keys.job("waits"), "state") == b"cancelled"


async def test_the_jobs_of_both_lanes_are_found(db: Redis, counted: CountedLookups) -> None:
    await put(db, "a", b"")
    await put(db, "b", b"", lane="batch")
    counted.add("a")
    counted.add("b")
    await until(lambda: is_empty(db))
    assert counted.lookups == [2]


async def test_an_id_that_comes_again_is_looked_up_once(db: Redis, counted: CountedLookups) -> None:
    await put(db, "a", b"")
    for _ in range(1000):
        counted.add("a")
    await until(lambda: is_empty(db))
    assert counted.lookups == [1]


async def test_the_stored_ids_are_bounded(counted: CountedLookups) -> None:
    for k in range(_MAX_PENDING + 1000):
        counted.add(f"x{k}")
    await until(lambda: sum(counted.lookups) >= _MAX_PENDING)
    await asyncio.sleep(0.05)
    assert sum(counted.lookups) == _MAX_PENDING


@pytest.mark.parametrize("job_id", ["", "x" * 129, "a b", "\udcff", "runs"])
async def test_what_is_no_id_or_runs_here_is_not_looked_up(counted: CountedLookups, job_id: str) -> None:
    counted.add(job_id)
    await asyncio.sleep(0.05)
    assert counted.lookups == []


async def test_a_lost_connection_loses_no_request(db: Redis, counted: CountedLookups) -> None:
    await put(db, "a", b"")
    counted.lost = 1
    counted.add("a")
    await until(lambda: is_empty(db))
    assert counted.lookups == [1, 1]


async def test_a_running_job_is_cancelled_although_its_message_is_lost(redis_url: str, db: Redis) -> None:
    chat = FakeChat()
    async with working(settings(redis_url), chat.chat):
        await listening(db)
        await ask(db, "a", {"then": "hang"})
        await until(lambda: bool(chat.running))
        await db.set(keys.cancel("a"), "1", ex=60)
        assert types(await ended(db, "a")) == ["started", "cancelled"]


# Cancel keys


async def test_the_jobs_that_have_a_key_are_interrupted_and_no_others(db: Redis) -> None:
    held = HeldJobs.of_no_worker(db)
    await held.start(*map(claim_of, ("a", "b", "c")))
    for job_id in ("a", "c", "elsewhere"):
        await db.set(keys.cancel(job_id), "1")
    requests = CancelRequests(db, settings("redis://unused"), held.jobs)
    await requests.check(["a", "b", "elsewhere"])
    reasons = {job_id: held.jobs[job_id].interruption for job_id in ("a", "b", "c")}
    assert isinstance(reasons.pop("a"), CancelJob)
    assert reasons == {"b": None, "c": None}
    await requests.check_running()
    assert (held.jobs["b"].interruption, isinstance(held.jobs["c"].interruption, CancelJob)) == (None, True)
    await held.release()


async def test_redis_is_not_called_while_no_job_runs() -> None:
    async with Redis(port=free_port()) as nothing_listens:
        jobs = HeldJobs.of_no_worker(nothing_listens).jobs
        await CancelRequests(nothing_listens, settings("redis://unused"), jobs).check_running()
