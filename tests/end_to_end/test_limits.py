"""Limits, lanes, fairness, deadlines: said at once, by name, and nobody else is harmed."""

import asyncio
import time

import pytest
import redis.asyncio

from sluice import Client, JobCancelled, JobFailed, Progress, QueueFull
from tests.support.chaos.harness import (
    chat_request,
    leaks,
    paced_worker,
    record,
    record_all,
    running,
    submit_all,
    until_decoding,
)
from tests.support.stack import WorkerProcess
from tests.waiting import until


async def started_order(db: redis.asyncio.Redis, ids: list[str]) -> list[str]:
    """The ids in the order in which they were claimed."""
    at = {job_id: float(await db.hget(f"sluice:job:{job_id}", "started_at")) for job_id in ids}
    return sorted(ids, key=at.__getitem__)


async def test_a_tenant_with_many_jobs_does_not_shut_out_one_with_few(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    many = await submit_all(client, 60, chat_request(3, tenant="many"), prefix="many")
    few = await submit_all(client, 3, chat_request(3, tenant="few"), prefix="few")
    async with running(paced_worker(redis_url, max_rows=4, reserved_rows=0, step_ms=5)):
        await record_all(client, [*many, *few])
    order = await started_order(db, [*many, *few])
    assert max(order.index(job_id) for job_id in few) < 12
    assert [job_id for job_id in order if job_id in many] == many


async def test_jobs_of_one_tenant_are_taken_oldest_first(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    ids = await submit_all(client, 30, chat_request(2))
    async with running(paced_worker(redis_url, max_rows=1, reserved_rows=0, step_ms=2)):
        await record_all(client, ids)
    assert await started_order(db, ids) == ids


async def test_offline_jobs_leave_the_reserved_rows_free(redis_url: str, client: Client) -> None:
    batch = await submit_all(client, 10, chat_request(100_000), lane="batch", prefix="batch")
    async with running(paced_worker(redis_url, max_rows=6, reserved_rows=2)):
        await until_decoding(client, batch[:4], 1)
        seen = await record_all(client, await submit_all(client, 2, chat_request(10)))
        assert all(stream.is_right(10) for stream in seen)
        states = [await client.state(job_id) for job_id in batch]
        assert states == ["running"] * 4 + ["queued"] * 6
        for job_id in batch:
            await client.cancel(job_id)
        await record_all(client, batch)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(redis_url: str, client: Client) -> None:
    async def has_told_its_rate() -> bool:
        return [worker["jobs_per_s"] for worker in await client.workers()] == [str(round(4 / 60, 3))]

    async with running(paced_worker(redis_url, max_rows=2, reserved_rows=0, queue_limit=5, lease_s=1)):
        await record_all(client, await submit_all(client, 4, chat_request(1), prefix="done"))
        await until(has_told_its_rate)
        ids = await submit_all(client, 5, chat_request(100_000))
        await until_decoding(client, ids[:1], 1)
        with pytest.raises(QueueFull) as full:
            await client.submit(chat_request(1))
        assert (full.value.length, full.value.limit) == (5, 5)
        assert full.value.retry_after_s == pytest.approx(60 / 4, rel=0.01)  # four jobs in the last minute
        assert (await client.submit(chat_request(1), id=ids[0])).state == "running", "a known id is not refused"
        for job_id in ids:
            await client.cancel(job_id)
        await record_all(client, ids)
        assert (await client.submit(chat_request(1))).new


async def test_a_deadline_that_passes_in_the_queue_ends_the_job_though_no_row_is_free(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    async with running(paced_worker(redis_url, max_rows=1, reserved_rows=0)):
        (busy,) = await submit_all(client, 1, chat_request(100_000), prefix="busy")
        await until_decoding(client, [busy], 1)
        began = time.monotonic()
        late = await client.submit(chat_request(5, deadline_s=0.5))
        with pytest.raises(JobFailed, match="deadline"):
            await client.result(late.id, timeout=60)
        assert time.monotonic() - began > 0.4
        assert await client.state(busy) == "running"
        await client.cancel(busy)
        await record(client, busy)
    assert await leaks(db) == []


async def test_a_deadline_that_passes_while_running_frees_the_row(redis_url: str, client: Client) -> None:
    async with running(paced_worker(redis_url, max_rows=1, reserved_rows=0)):
        late = await client.submit(chat_request(100_000, deadline_s=1))
        after = await client.submit(chat_request(3))
        with pytest.raises(JobFailed, match="deadline"):
            await client.result(late.id, timeout=60)
        assert (await asyncio.wait_for(record(client, after.id), 60)).is_right(3)


async def test_a_job_that_nobody_listens_to_is_cancelled_where_it_asks_for_that(redis_url: str, client: Client) -> None:
    async with running(paced_worker(redis_url, disconnect_grace_s=1.5)):
        wanted = await client.submit(chat_request(100))
        left = await client.submit(chat_request(100_000, on_disconnect="cancel"))
        heard = await client.submit(chat_request(100, on_disconnect="cancel"))
        listening = asyncio.create_task(record(client, heard.id))
        await until(lambda: is_cancelled(client, left.id))  # a client that waits for its result would listen
        with pytest.raises(JobCancelled, match="disconnected"):
            await client.result(left.id, timeout=60)
        assert (await listening).is_right(100), "a subscriber kept it alive"
        assert (await client.result(wanted.id, timeout=60))["usage"]["completion_tokens"] == 100


async def is_cancelled(client: Client, job_id: str) -> bool:
    return await client.state(job_id) == "cancelled"


async def test_a_subscriber_that_returns_in_time_keeps_the_job(redis_url: str, client: Client) -> None:
    async with running(paced_worker(redis_url, disconnect_grace_s=5)):
        job = await client.submit(chat_request(100, on_disconnect="cancel"))
        for _ in range(4):
            async for event in client.stream(job.id):
                if event.seq > 3:
                    break
            await asyncio.sleep(0.3)
        assert (await asyncio.wait_for(record(client, job.id), 60)).is_right(100)


async def test_a_cancelled_job_that_waits_never_runs(redis_url: str, client: Client, db: redis.asyncio.Redis) -> None:
    async with running(paced_worker(redis_url, max_rows=1, reserved_rows=0)):
        (busy,) = await submit_all(client, 1, chat_request(100_000), prefix="busy")
        await until_decoding(client, [busy], 1)
        waiting = await client.submit(chat_request(5))
        await client.cancel(waiting.id)
        seen = await asyncio.wait_for(record(client, waiting.id), 60)
        assert [event.type for event in seen.events] == ["cancelled"]
        await client.cancel(busy)
        await record(client, busy)
    assert await leaks(db) == []


async def test_a_cancel_in_the_middle_of_a_long_prompt_frees_the_row(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    book = {
        "messages": [{"role": "user", "content": "The red key was left in the river. " * 2000}],
        "max_tokens": 10_000,
        "logit_bias": {"2": -100},  # the end of the sequence
    }
    worker = WorkerProcess(redis_url, module="tests.end_to_end.reporting_all", max_rows=1, reserved_rows=0, step_ms=50)
    async with running(worker):
        job, after = await client.submit(book), await client.submit(chat_request(2))
        async for event in client.stream(job.id):
            if isinstance(event, Progress) and event.phase == "prefill":
                break
        await client.cancel(job.id)
        seen = await asyncio.wait_for(record(client, job.id), 60)
        assert seen.events[-1].type == "cancelled"
        assert seen.text == "", "the prompt was computed to its end"
        await client.result(after.id, timeout=60)
    assert await leaks(db) == []


async def test_an_id_submitted_twice_is_one_job_and_tells_its_state(redis_url: str, client: Client) -> None:
    first = await client.submit(chat_request(3), id="twice")
    again = await client.submit(chat_request(99), id="twice")
    assert (first.new, first.state, again.new, again.state) == (True, "queued", False, "queued")
    async with running(paced_worker(redis_url)):
        assert (await record(client, "twice")).is_right(3)
    assert (await client.submit(chat_request(1), id="twice")).state == "finished"
