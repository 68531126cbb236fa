"""Values of strangers at every key that our scripts touch: the lane goes on, and nobody else is harmed."""

import random
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.contract import keys
from tests.fakes import FakeChat
from tests.queue.helpers import BATCH, QUEUE, ask, ended, envelope, put, settings, types, until, working
from worker.queue.job.claims import lease_key

INDEX = keys.index("default", "interactive")
OF_THE_JOB = [
    keys.job("bad-1"), keys.log("bad-1"), keys.result("bad-1"), keys.cancel("bad-1"), lease_key("bad-1"),
    "arq:job:bad-1", "arq:retry:bad-1",
]  # fmt: skip
OF_THE_LANE = [
    QUEUE, BATCH, keys.model("default"), keys.worker("ada"), keys.DEAD,
    INDEX, *(f"{INDEX}:{part}" for part in keys.INDEX),
]  # fmt: skip
VALUES: dict[str, tuple[Any, ...]] = {
    "string": ("SET", "x"),
    "number": ("SET", "9" * 30),
    "bytes": ("SET", b"\xff\x00\n"),
    "list": ("RPUSH", "x", b"\xff"),
    "set": ("SADD", "x"),
    "sorted set": ("ZADD", 1, "x", "inf", b"\xff\n"),
    "hash": ("HSET", "a", "b", "state", "odd", "attempt", "-0"),
    "stream": ("XADD", "*", "a", "b"),
}


STRINGS = {keys.result("bad-1"), keys.cancel("bad-1"), lease_key("bad-1"), "arq:job:bad-1", "arq:retry:bad-1"}


def spoiled(names: list[str]) -> list[Any]:
    """Each value at each name. One string stands for all, unless the key is to hold one."""

    def repeats(kind: str, name: str) -> bool:
        return kind in ("number", "bytes") and name not in STRINGS

    return [
        pytest.param((command, name, *values), id=f"{kind} at {name}", marks=[pytest.mark.slow] * repeats(kind, name))
        for name in names
        for kind, (command, *values) in VALUES.items()
    ]


async def served(db: Redis, job_id: str) -> None:
    await ask(db, job_id, {"say": ["Hello"]})
    assert types(await ended(db, job_id)) == ["started", "delta", "finished"]


@pytest.mark.parametrize("spoil", spoiled(OF_THE_JOB))
async def test_a_job_with_a_foreign_value_harms_no_other(redis_url: str, db: Redis, spoil: tuple[Any, ...]) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, lease_s=1), chat.chat):
        await db.execute_command(*spoil)
        if spoil[1] != "arq:job:bad-1":
            await db.set("arq:job:bad-1", envelope({"say": ["Hello"]}))
        await db.zadd(QUEUE, {"bad-1": 1})
        await served(db, "good-1")
        await until(lambda: _gone(db, "bad-1"))


async def _gone(db: Redis, job_id: str) -> bool:
    return await db.zscore(QUEUE, job_id) is None


@pytest.mark.parametrize("spoil", spoiled(OF_THE_LANE))
async def test_a_lane_with_a_foreign_value_goes_on(
    redis_url: str, db: Redis, client: Client, spoil: tuple[Any, ...]
) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, lease_s=1), chat.chat):
        await served(db, "before")
        await db.delete(spoil[1])
        await db.execute_command(*spoil)
        if spoil[1] in (QUEUE, BATCH):  # which the next claim deletes
            await until(lambda: _is_no_foreign(db, spoil[1]))
        await served(db, "plain")
        job = await client.submit({"say": ["Hello"]})
        assert types(await ended(db, job.id)) == ["started", "delta", "finished"]
        await client.workers()
        await client.queues()


async def _is_no_foreign(db: Redis, key: str) -> bool:
    return await db.type(key) in (b"zset", b"none")


ODD = [
    "9" * 30, "-1", "1.5", "", "nan", "inf", "0x10", "007", "+5", "1e99", " 1", "x" * 10_000, b"\xff\n", "running",
    "finished", "queued", "\n",
]  # fmt: skip
FIELDS = [
    "state", "attempt", "crashes", "lapses", "probation", "tenant", "deadline", "lane", "model", "worker", "queued_at",
    "submission", "specprefill", "images",
]  # fmt: skip


@pytest.mark.parametrize("seed", [pytest.param(k, marks=[pytest.mark.slow] * (k >= 5)) for k in range(20)])
async def test_odd_fields_in_the_states_of_many_jobs_stop_nobody(redis_url: str, db: Redis, seed: int) -> None:
    dice, chat = random.Random(seed), FakeChat()
    for k in range(20):
        fields = {name: dice.choice(ODD) for name in dice.sample(FIELDS, dice.randint(1, 5))}
        await db.hset(keys.job(f"odd-{k}"), mapping=fields)
        await put(db, f"odd-{k}", envelope({"say": ["Hello"]}), at_ms=dice.choice([1, 2, 3]))
    async with working(settings(redis_url, lease_s=1), chat.chat):
        await served(db, "good-1")
        await until(lambda: _empty(db))


async def _empty(db: Redis) -> bool:
    return not await db.exists(QUEUE)


@pytest.mark.parametrize("spoil", spoiled([keys.job("a"), keys.model("default"), INDEX, f"{INDEX}:lines"]))
async def test_a_submit_gets_past_foreign_values(db: Redis, client: Client, spoil: tuple[Any, ...]) -> None:
    await db.execute_command(*spoil)
    job = await client.submit([{"role": "user", "content": "Hello!"}], id="a")
    assert (job.id, job.served) == ("a", False)
    if spoil[:2] != ("HSET", keys.job("a")):  # which looks like a job that is known
        assert (job.new, await db.zscore(QUEUE, "a") is None) == (True, False)
