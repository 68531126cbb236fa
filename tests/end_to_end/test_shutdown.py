"""SIGTERM costs nothing: rows go on to their end within the grace, the rest returns to the queue."""

import asyncio
import signal

import pytest
import redis.asyncio

from sluice import Client, Delta, Event
from tests.end_to_end.endless_step import ENDLESS_STEP
from tests.end_to_end.endless_tokenizer import ENDLESS
from tests.keyspace import check_job_keys
from tests.support.stack import Server, WorkerProcess
from worker.process.daemon import EXIT_FAILED, EXIT_FORCED

# Only a worker that hangs takes so long, however busy the machine is.
HANGS_S = 300.0
LARGE = {"messages": [{"role": "user", "content": "1 2 " * 20_000}]}


def endless(max_tokens: int) -> dict[str, object]:
    """Runs to its limit: the end of the sequence cannot be drawn."""
    return {
        "messages": [{"role": "user", "content": "Count to 40."}],
        "max_tokens": max_tokens,
        "logit_bias": {"2": -100},
    }


async def until_decoding(client: Client, job_id: str) -> None:
    async for event in client.stream(job_id):
        if isinstance(event, Delta):
            return


async def rest(client: Client, job_id: str) -> list[Event]:
    async with asyncio.timeout(HANGS_S):
        return [event async for event in client.stream(job_id)]


async def until_said(worker: WorkerProcess, words: str) -> None:
    async with asyncio.timeout(HANGS_S):
        while words not in worker.log():
            await asyncio.sleep(0.01)


async def ended(worker: WorkerProcess) -> int:
    """Return its exit code."""
    return await asyncio.to_thread(worker.wait, HANGS_S)


async def stop(worker: WorkerProcess, *, signals: int = 1) -> None:
    """Send signals, each once the last is known to have come: two that wait to be handled are one."""
    for words in ("stopping;", "again:")[:signals]:
        worker.signal(signal.SIGTERM)
        await until_said(worker, words)


@pytest.mark.slow  # tests/queue/test_worker.py has it without a process
async def test_running_rows_end_within_the_grace(redis_url: str, client: Client) -> None:
    worker = WorkerProcess(redis_url, grace_s=HANGS_S).start()
    jobs = [await client.submit(endless(100)) for _ in range(4)]
    await asyncio.gather(*(until_decoding(client, job.id) for job in jobs))
    await stop(worker)
    later = await client.submit(endless(5))
    for job in jobs:
        events = await rest(client, job.id)
        assert events[-1].type == "finished"
        assert {event.attempt for event in events} == {1}
    assert await ended(worker) == 0
    assert (await client.submit(endless(5), id=later.id)).state == "queued"
    worker.stop()


async def test_what_is_left_returns_to_the_queue_and_no_try_is_burned(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    worker = WorkerProcess(redis_url, grace_s=0).start()
    job = await client.submit(endless(1000))
    await until_decoding(client, job.id)
    worker.signal(signal.SIGTERM)
    assert await ended(worker) == 0
    state = await db.hgetall(f"sluice:job:{job.id}")
    assert (state[b"state"], state[b"attempt"], state[b"crashes"]) == (b"queued", b"1", b"0")
    assert not await db.exists(f"arq:in-progress:{job.id}")

    with WorkerProcess(redis_url):
        events = await rest(client, job.id)
    assert [event.seq for event in events] == list(range(len(events)))
    assert [event.type for event in events if event.type in ("resumed", "restarted")] == ["resumed"]
    assert sum(len(event.token_ids) for event in events if isinstance(event, Delta)) == 1000
    assert (await db.hget(f"sluice:job:{job.id}", "crashes")) == b"0"
    await check_job_keys(db, job.id)
    worker.stop()


@pytest.mark.slow  # tests/queue/test_worker.py has it without a process
async def test_a_second_signal_ends_the_grace(redis_url: str, client: Client, db: redis.asyncio.Redis) -> None:
    worker = WorkerProcess(redis_url, grace_s=600).start()
    job = await client.submit(endless(20_000))
    await until_decoding(client, job.id)
    await stop(worker, signals=2)
    assert await ended(worker) == 0
    assert await db.hget(f"sluice:job:{job.id}", "state") == b"queued"
    worker.stop()


@pytest.mark.slow
@pytest.mark.parametrize("k", range(20))
async def test_a_stop_of_a_busy_worker_is_clean(
    redis_url: str, client: Client, db: redis.asyncio.Redis, k: int
) -> None:
    """The engine's thread owns streams that abort the process when it leaves them behind."""
    job = await client.submit(endless(30_000))
    with WorkerProcess(redis_url, grace_s=0) as worker:
        while await db.hget(f"sluice:job:{job.id}", "state") != b"running":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02 * k)
        worker.signal(signal.SIGTERM)
        assert await ended(worker) == 0, worker.log()
        assert "Traceback" not in worker.log()
    assert await db.hget(f"sluice:job:{job.id}", "crashes") == b"0"


# Threads in native code, which nothing can interrupt


@pytest.mark.slow  # the next test has a grace besides
async def test_one_signal_ends_a_worker_whose_tokenizer_never_returns(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    with WorkerProcess(redis_url, module="tests.end_to_end.endless_tokenizer", grace_s=0) as worker:
        job = await client.submit(LARGE)
        await until_said(worker, ENDLESS)
        worker.signal(signal.SIGTERM)
        assert await ended(worker) == 0
    assert await db.hget(f"sluice:job:{job.id}", "state") == b"queued"
    assert await db.hget(f"sluice:job:{job.id}", "crashes") == b"0"


@pytest.mark.slow
async def test_a_second_signal_ends_a_worker_whose_tokenizer_never_returns(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    with WorkerProcess(redis_url, module="tests.end_to_end.endless_tokenizer", grace_s=600) as worker:
        job = await client.submit(LARGE)
        await until_said(worker, ENDLESS)
        await stop(worker)
        assert worker.process is not None
        assert worker.process.poll() is None
        worker.signal(signal.SIGTERM)
        assert await ended(worker) == 0
    assert await db.hget(f"sluice:job:{job.id}", "state") == b"queued"


@pytest.mark.slow
async def test_a_second_signal_ends_a_worker_that_cannot_hand_its_jobs_back() -> None:
    with Server() as server, WorkerProcess(server.url, grace_s=600) as worker:
        async with Client(server.url) as client:
            job = await client.submit(endless(20_000))
            await until_decoding(client, job.id)
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        await stop(worker, signals=2)
        assert await ended(worker) == EXIT_FORCED
        server.process.send_signal(signal.SIGCONT)


async def test_a_second_signal_ends_a_worker_whose_engine_never_ends_its_step(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    with WorkerProcess(redis_url, module="tests.end_to_end.endless_step", grace_s=0) as worker:
        job = await client.submit(endless(20))
        await until_said(worker, ENDLESS_STEP)
        worker.signal(signal.SIGTERM)
        while await db.hget(f"sluice:job:{job.id}", "state") != b"queued":
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert worker.process is not None
        assert worker.process.poll() is None
        worker.signal(signal.SIGTERM)
        assert await ended(worker) == 0


async def test_a_worker_whose_service_fails_ends_although_a_thread_never_returns(
    redis_url: str, client: Client
) -> None:
    with WorkerProcess(redis_url, module="tests.end_to_end.failing_service", grace_s=600) as worker:
        await client.submit(LARGE)
        assert await ended(worker) == EXIT_FAILED
        assert "no service today" in worker.log()
