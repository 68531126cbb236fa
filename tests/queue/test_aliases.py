"""Aliases: names that an operator moves from model to model."""

import json

import pytest
from redis.asyncio import Redis

from sluice import Client, NoWorker, QueueFull
from sluice.contract import keys
from tests.fakes import FakeChat
from tests.queue.helpers import ended, enqueue, envelope, listening, settings, working

HELLO = [{"role": "user", "content": "Hello"}]
WAITING = "sluice:queue:{}:interactive"


async def serve(db: Redis, model: str, *, limit: int | str = 100) -> None:
    await db.hset(keys.model(model), "ada", f"{limit} 1.0 99999999999 0 0")


async def queued(db: Redis, model: str, lane: keys.Lane = "interactive") -> list[str]:
    return [id.decode() for id in await db.zrange(keys.queue(model, lane), 0, -1)]


async def test_a_job_runs_on_the_model_that_its_alias_names_at_that_moment(db: Redis, client: Client) -> None:
    for model in ("old", "new"):
        await serve(db, model)
    assert await client.set_alias("fast", "old") is None
    first = await client.submit(HELLO, model="fast", id="a")
    assert await client.set_alias("fast", "new") == "old"
    second = await client.submit(HELLO, model="fast", id="b")
    assert [(job.model, job.served) for job in (first, second)] == [("old", True), ("new", True)]
    assert (await queued(db, "old"), await queued(db, "new"), await queued(db, "fast")) == (["a"], ["b"], [])
    assert await db.hmget(keys.job("a"), ["model", "alias"]) == [b"old", b"fast"]
    assert await client.waits_for("b") == "new"
    again = await client.submit(HELLO, model="fast", id="a")
    assert (again.new, again.state, await queued(db, "new")) == (False, "queued", ["b"])


async def test_the_workers_of_the_model_are_woken_and_their_limit_holds(db: Redis, client: Client) -> None:
    await serve(db, "tiny", limit=1)
    await client.set_alias("fast", "tiny")
    async with db.pubsub() as heard:
        await heard.subscribe(keys.wake("tiny"))
        messages = [await heard.get_message(timeout=5)]
        await client.submit(HELLO, model="fast")
        messages.append(await heard.get_message(timeout=5))
    assert [each and each["type"] for each in messages] == ["subscribe", "message"]
    with pytest.raises(QueueFull):
        await client.submit(HELLO, model="fast")


async def test_an_alias_hides_no_model_that_is_served(db: Redis, client: Client) -> None:
    await serve(db, "tiny")
    await client.set_alias("fast", "tiny")
    await serve(db, "fast")
    job = await client.submit(HELLO, model="fast", id="a")
    assert (job.model, await queued(db, "fast")) == (None, ["a"])
    with pytest.raises(ValueError, match="name of its own"):
        await client.set_alias("fast", "tiny")


async def test_the_model_of_an_alias_without_a_worker_is_named(db: Redis, client: Client) -> None:
    await db.hset(keys.worker("ada"), mapping={"model": "other", "state": "running"})
    await client.set_alias("fast", "tiny", served_only=False)
    await client.set_alias("slow", "other", served_only=False)
    with pytest.raises(NoWorker) as missing:
        await client.submit(HELLO, model="fast", wait_worker_s=0)
    assert (missing.value.model, set(missing.value.served)) == ("tiny", {"other", "slow"})
    job = await client.submit(HELLO, model="fast")
    assert (job.model, job.served, await queued(db, "tiny")) == ("tiny", False, [job.id])


@pytest.mark.parametrize(
    ("alias", "model", "says"),
    [
        ("fast", "fast", "itself"),
        ("tiny", "old", "name of its own"),
        ("mine", "fast", "give the model that it stands for: 'tiny'"),
        ("big", "other", "the alias 'behind' stands for 'big'"),
        ("fast", "gone", "no live worker serves 'gone'"),
        ("a b", "tiny", "must match"),
        ("fast", "a:b", "must match"),
    ],
)
async def test_chains_loops_and_names_without_a_worker_are_refused(
    db: Redis, client: Client, alias: str, model: str, says: str
) -> None:
    for served in ("tiny", "other"):
        await serve(db, served)
    await client.set_alias("fast", "tiny")
    await client.set_alias("behind", "big", served_only=False)
    with pytest.raises(ValueError, match=says):
        await client.set_alias(alias, model)
    assert await client.aliases() == {"behind": "big", "fast": "tiny"}


async def test_an_alias_is_removed_and_no_job_follows_it_any_more(db: Redis, client: Client) -> None:
    await serve(db, "tiny")
    await client.set_alias("fast", "tiny")
    assert (await client.set_alias("fast", None), await client.set_alias("fast", None)) == ("tiny", None)
    assert (await client.submit(HELLO, model="fast", id="a")).model is None
    assert await queued(db, "fast") == ["a"]


async def test_there_are_at_most_a_thousand_and_those_can_be_moved(db: Redis, client: Client) -> None:
    await db.hset(keys.ALIASES, mapping={f"a{i}": "tiny" for i in range(1_000)})
    with pytest.raises(ValueError, match="1,000"):
        await client.set_alias("fast", "tiny", served_only=False)
    assert await client.set_alias("a1", "big", served_only=False) == "tiny"


@pytest.mark.parametrize("stored", [{"fast": "a:b"}, {"fast": "fast"}, {"fast": ""}, {"fast": "x" * 65}])
async def test_what_another_program_wrote_is_no_alias(db: Redis, client: Client, stored: dict[str, str]) -> None:
    await db.hset(keys.ALIASES, mapping=stored)
    assert (await client.submit(HELLO, model="fast")).model is None
    await db.delete(keys.ALIASES)
    await db.set(keys.ALIASES, "foreign")
    assert ((await client.submit(HELLO, model="fast")).model, await client.aliases()) == (None, {})
    await serve(db, "tiny")
    assert await client.set_alias("fast", "tiny") is None


async def test_a_worker_takes_what_plain_producers_queue_under_an_alias(
    db: Redis, client: Client, redis_url: str
) -> None:
    async with working(settings(redis_url, model_name="tiny"), FakeChat().chat):
        await client.set_alias("fast", "tiny", served_only=False)
        await enqueue(redis_url, WAITING.format("fast"), "a", {"messages": HELLO, "model": "fast"})
        await enqueue(redis_url, "sluice:queue:fast:batch", "b", {"messages": HELLO})
        assert [(await ended(db, id))[-1]["type"] for id in ("a", "b")] == ["finished", "finished"]
        assert await db.hmget(keys.job("a"), ["alias", "model"]) == [b"fast", None]
        assert await db.exists("sluice:queue:fast:batch", WAITING.format("fast")) == 0


async def test_jobs_that_wait_for_a_model_whose_name_becomes_an_alias_take_the_new_one(
    db: Redis, client: Client, redis_url: str
) -> None:
    await client.submit({"messages": HELLO, "model": "gone"}, model="gone", id="a")
    await db.set("arq:in-progress:b", "other:1", ex=60)
    await client.submit(HELLO, model="gone", id="b")
    await client.submit(HELLO, model="gone", id="later")
    await db.zadd(keys.queue("gone", "interactive"), {"later": 9e12})
    async with working(settings(redis_url, model_name="tiny"), FakeChat().chat):
        await client.set_alias("gone", "tiny", served_only=False)
        assert (await ended(db, "a"))[-1]["type"] == "finished"
        assert await db.hmget(keys.job("a"), ["alias", "model"]) == [b"gone", b"tiny"]
    assert await queued(db, "gone") == ["b", "later"], "one runs, and the other is not due"


async def test_queues_under_an_alias_count_the_workers_of_its_model(db: Redis, client: Client, redis_url: str) -> None:
    async with working(settings(redis_url, model_name="tiny"), FakeChat().chat):
        await listening(db)
        await client.set_alias("fast", "tiny")
        await db.zadd(WAITING.format("fast"), {"later": 9e12})
        assert [(queue.model, queue.workers) for queue in await client.queues()] == [("fast", 1)]


async def test_a_dead_letter_of_an_alias_is_retried_on_its_model(db: Redis, client: Client) -> None:
    letter = {
        "id": "a", "model": "tiny", "lane": "interactive", "crashes": 3, "parked_at": 1.0, "error": {},
        "body": envelope({"messages": HELLO, "model": "fast"}).decode(),
    }  # fmt: skip
    await db.hset(keys.DEAD, "a", json.dumps(letter))
    job = await client.retry("a")
    assert json.loads(await db.get(keys.body(job.id)))["a"] == [{"messages": HELLO, "model": "tiny"}]
