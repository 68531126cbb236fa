"""Every name, signature and behaviour of arq that we borrow. When an upgrade fails, it fails here first."""

import asyncio
import inspect
import json
import pickle
import time
from collections.abc import AsyncIterator, Callable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

import arq
import pytest
from arq import constants
from arq.connections import ArqRedis, RedisSettings, create_pool
from arq.jobs import Job, JobStatus, serialize_job
from arq.worker import Function, func
from redis.asyncio import Redis

from sluice import Client
from sluice.contract.events import FINAL
from tests.fakes import FakeChat
from tests.keyspace import check_all_ended
from tests.queue.helpers import QUEUE, ended, envelope, put, settings, until, working
from worker.json_bytes import dumps
from worker.queue.scripts import JOB_LIFE_MS

REQUEST = {"say": ["Hello"]}


def parameters(of: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(of).parameters)


@pytest.fixture
async def arq_redis(redis_url: str) -> AsyncIterator[ArqRedis]:
    """As a producer creates it."""
    pool = await create_pool(RedisSettings.from_dsn(redis_url), job_serializer=dumps, job_deserializer=json.loads)
    yield pool
    await pool.aclose()


async def status(redis: ArqRedis, job_id: str) -> JobStatus:
    return await Job(job_id, redis, _queue_name=QUEUE).status()


def test_the_release_is_one_that_these_tests_were_written_against() -> None:
    assert version("arq").rsplit(".", 1)[0] == "0.28"


async def chat(ctx: dict[Any, Any]) -> None: ...


def test_a_function_has_the_name_and_the_coroutine_that_we_read() -> None:
    function = func(chat, name="chat")
    assert isinstance(function, Function)
    assert (function.name, function.coroutine) == ("chat", chat)


def test_the_prefixes_are_those_that_other_languages_were_told() -> None:
    assert constants.abort_jobs_ss == "arq:abort"
    assert [constants.job_key_prefix, constants.in_progress_key_prefix, constants.retry_key_prefix] == [
        "arq:job:", "arq:in-progress:", "arq:retry:",
    ]  # fmt: skip
    assert constants.expires_extra_ms == JOB_LIFE_MS


def test_the_wire_format_is_an_object_of_five() -> None:
    wire = serialize_job("chat", ({"messages": []},), {}, None, 17, serializer=dumps)
    assert json.loads(wire) == {"t": None, "f": "chat", "a": [{"messages": []}], "k": {}, "et": 17}


def test_stock_arq_pickles() -> None:
    """arq pickles by default, so a plain pool needs a `job_serializer`."""
    assert pickle.loads(serialize_job("chat", (1,), {}, None, 17))["f"] == "chat"
    assert "job_serializer" in parameters(arq.create_pool)


async def test_enqueue_job_writes_the_two_keys_that_we_read(arq_redis: ArqRedis, db: Redis) -> None:
    await arq_redis.enqueue_job("chat", REQUEST, _job_id="a", _queue_name=QUEUE)
    assert set(await db.keys()) == {b"arq:job:a", QUEUE.encode()}
    body = json.loads(await db.get("arq:job:a"))
    assert body == {"t": None, "f": "chat", "a": [REQUEST], "k": {}, "et": body["et"]}
    assert await db.zrange(QUEUE, 0, -1, withscores=True) == [(b"a", body["et"])]
    assert 86_000_000 < await db.pttl("arq:job:a") <= JOB_LIFE_MS


async def test_enqueue_job_takes_an_id_once_while_its_body_is_there(arq_redis: ArqRedis, db: Redis) -> None:
    first = await arq_redis.enqueue_job("chat", {"n": 1}, _job_id="a", _queue_name=QUEUE)
    second = await arq_redis.enqueue_job("chat", {"n": 2}, _job_id="a", _queue_name=QUEUE)
    assert (first is None, second is None) == (False, True)
    assert json.loads(await db.get("arq:job:a"))["a"] == [{"n": 1}]


async def test_enqueue_job_gives_way_to_another_that_was_faster(arq_redis: ArqRedis, db: Redis) -> None:
    """Its WATCH sees a body that appears between its look and its write."""

    class Slow(ArqRedis):
        def pipeline(self, *args: Any, **kwargs: Any) -> Any:
            pipe = super().pipeline(*args, **kwargs)
            exists = pipe.exists

            async def exists_and_then(*names: str) -> Any:
                found = await exists(*names)
                await db.set("arq:job:a", b"the other's")
                return found

            pipe.exists = exists_and_then
            return pipe

    slow = Slow(pool_or_conn=arq_redis.connection_pool, job_serializer=dumps)
    assert await slow.enqueue_job("chat", REQUEST, _job_id="a", _queue_name=QUEUE) is None
    assert await db.get("arq:job:a") == b"the other's"
    assert await db.zcard(QUEUE) == 0


async def test_a_deferred_job_is_scored_by_its_time(arq_redis: ArqRedis, db: Redis) -> None:
    await arq_redis.enqueue_job("chat", REQUEST, _job_id="a", _queue_name=QUEUE, _defer_by=timedelta(hours=1))
    body = json.loads(await db.get("arq:job:a"))
    assert await db.zscore(QUEUE, "a") == body["et"] + 3_600_000


async def test_job_status_tells_the_truth_about_our_jobs(arq_redis: ArqRedis, redis_url: str, db: Redis) -> None:
    assert await status(arq_redis, "a") == JobStatus.not_found
    await arq_redis.enqueue_job("chat", {"then": "hang"}, _job_id="a", _queue_name=QUEUE)
    await arq_redis.enqueue_job("chat", REQUEST, _job_id="later", _queue_name=QUEUE, _defer_by=3600)
    assert [await status(arq_redis, id) for id in ("a", "later")] == [JobStatus.queued, JobStatus.deferred]
    chat = FakeChat()
    async with working(settings(redis_url), chat.chat) as worker:
        await until(lambda: bool(chat.running))
        assert await status(arq_redis, "a") == JobStatus.in_progress
        assert worker.jobs.cancel("a")
        await ended(db, "a")
        assert await status(arq_redis, "a") == JobStatus.not_found
    assert await status(arq_redis, "later") == JobStatus.deferred


async def test_a_job_of_ours_reads_as_a_job_of_arq_s(arq_redis: ArqRedis, db: Redis) -> None:
    await put(db, "a", envelope(REQUEST))
    info = await Job("a", arq_redis, _queue_name=QUEUE, _deserializer=json.loads).info()
    assert info is not None
    assert (info.function, info.args, info.kwargs, info.score) == ("chat", [REQUEST], {}, 1)


async def test_abort_cancels_a_job_that_runs_and_one_that_waits_and_one_for_later(
    arq_redis: ArqRedis, redis_url: str, db: Redis
) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, max_rows=1, reserved_rows=0, poll_s=0.1), chat.chat):
        jobs = dict[str, Job | None]()
        for job_id, given in (("runs", {}), ("waits", {}), ("later", {"_defer_by": 3600})):
            jobs[job_id] = await arq_redis.enqueue_job(
                "chat", {"then": "hang"}, _job_id=job_id, _queue_name=QUEUE, **given
            )
            await until(lambda: bool(chat.running))
        for job_id in ("waits", "later", "runs"):
            job = jobs[job_id]
            assert job is not None
            aborted = await job.abort(timeout=20, poll_delay=0.05)
            assert not aborted, "arq returns True for results of its own only"
            said = await ended(db, job_id)
            assert [event["type"] for event in said if event["type"] in FINAL] == ["cancelled"]
            assert said[-1]["reason"] == "requested"
    await db.delete("sluice:worker:ada", "sluice:model:default")
    await check_all_ended(db)


async def test_abort_of_a_job_that_ended_or_never_was_harms_no_later_job_with_its_id(
    arq_redis: ArqRedis, redis_url: str, db: Redis
) -> None:
    for job_id in ("ended", "never"):
        await db.zadd(constants.abort_jobs_ss, {job_id: time.time() * 1000})
    await asyncio.sleep(0.01)
    await arq_redis.enqueue_job("chat", REQUEST, _job_id="never", _queue_name=QUEUE)
    async with working(settings(redis_url, poll_s=0.1), FakeChat().chat):
        assert (await ended(db, "never"))[-1]["type"] == "finished"

        async def is_forgotten() -> bool:
            return bool(await db.zcard(constants.abort_jobs_ss) == 0)

        await until(is_forgotten)
        await arq_redis.enqueue_job("chat", REQUEST, _job_id="ended", _queue_name=QUEUE)
        assert (await ended(db, "ended"))[-1]["type"] == "finished"


async def test_abort_of_a_job_of_another_arq_worker_is_left_to_it(
    arq_redis: ArqRedis, redis_url: str, db: Redis
) -> None:
    await arq_redis.enqueue_job("mail", _job_id="theirs", _queue_name="arq:queue")
    await db.zadd(constants.abort_jobs_ss, {"theirs": time.time() * 1000})
    async with working(settings(redis_url, poll_s=0.1), FakeChat().chat):
        for job_id in ("a", "b"):
            await put(db, job_id, envelope({"say": ["Hello"]}))
            await ended(db, job_id)
            await asyncio.sleep(0.3)
        assert await db.zrange(constants.abort_jobs_ss, 0, -1) == [b"theirs"]


async def test_a_cancelled_or_finished_job_leaves_no_request_to_abort_it(
    arq_redis: ArqRedis, redis_url: str, db: Redis, client: Client
) -> None:
    await put(db, "waits", envelope(REQUEST))
    await db.zadd(constants.abort_jobs_ss, {"waits": 2})
    assert await client.cancel("waits") == "cancelled"
    assert await db.exists(constants.abort_jobs_ss) == 0


@pytest.mark.parametrize("spoil", [("SET", "x"), ("RPUSH", "x")])
async def test_a_foreign_value_in_place_of_the_requests_to_abort_stops_nobody(
    redis_url: str, db: Redis, spoil: tuple[str, str]
) -> None:
    await db.execute_command(spoil[0], constants.abort_jobs_ss, spoil[1])
    await put(db, "a", envelope(REQUEST))
    async with working(settings(redis_url, poll_s=0.1), FakeChat().chat):
        assert (await ended(db, "a"))[-1]["type"] == "finished"
