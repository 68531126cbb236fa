"""A submit for a model that nobody serves."""

import asyncio

import pytest
from redis.asyncio import Redis

from sluice import Client, NoWorker
from sluice.contract import keys
from tests.fakes import FakeChat
from tests.queue.helpers import ended, settings, working

HELLO = [{"role": "user", "content": "Hello"}]


async def test_a_job_that_needs_a_worker_is_not_queued_without_one(db: Redis, client: Client) -> None:
    with pytest.raises(NoWorker) as raised:
        await client.submit(HELLO, wait_worker_s=0)
    assert (raised.value.model, raised.value.served, raised.value.close) == ("default", (), None)
    assert await db.keys("*") == []


async def test_a_job_that_needs_a_worker_waits_for_one_to_come(db: Redis, client: Client, redis_url: str) -> None:
    submitting = asyncio.create_task(client.submit({"say": ["Hello"]}, wait_worker_s=10))
    await asyncio.sleep(0.3)
    assert not submitting.done()
    async with working(settings(redis_url), FakeChat().chat):
        job = await submitting
        assert job.served
        await ended(db, job.id)


async def test_the_refusal_names_the_model_that_may_be_meant(db: Redis, client: Client, redis_url: str) -> None:
    async with working(settings(redis_url), FakeChat().chat):
        await client.submit({"say": ["Hello"]}, wait_worker_s=10)
        with pytest.raises(NoWorker, match="did you mean 'default'") as raised:
            await client.submit(HELLO, model="defalt", wait_worker_s=0)
        assert raised.value.served == ("default",)
        assert (await client.submit({"say": ["Hello"]})).served
        assert not (await client.submit(HELLO, model="defalt")).served


async def test_an_id_that_is_known_needs_no_worker(db: Redis, client: Client) -> None:
    await client.submit(HELLO, id="a")
    assert not (await client.submit(HELLO, id="a", wait_worker_s=0)).new


@pytest.mark.parametrize("said", ["", "x", "1 2", "a b c", "1.5.5 0 99999999999", "5 .. 99999999999"])
async def test_a_foreign_field_among_the_workers_is_no_worker(db: Redis, client: Client, said: str) -> None:
    await db.hset(keys.model("default"), "odd", said)
    assert not (await client.submit(HELLO)).served
