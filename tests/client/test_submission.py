"""Submission of a chat to its queue."""

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Client, ExtraKey, NoWorker, QueueFull, Submitted
from sluice.contract import keys
from sluice.submission import marks_of
from tests.waiting import until

HELLO = [{"role": "user", "content": "Hello"}]
QUEUE = keys.queue("default", "interactive")


async def test_a_submitted_job_is_on_the_queue_as_arq_would_have_put_it(db: Redis, client: Client) -> None:
    job = await client.submit({"messages": HELLO, "tenant": "acme", "deadline_s": 60}, lane="batch", model="tiny")
    assert job == Submitted(job.id, new=True, state="queued")
    body = json.loads(await db.get(f"arq:job:{job.id}"))
    request = {"messages": HELLO, "tenant": "acme", "deadline_s": 60}
    assert body == {"t": None, "f": "chat", "a": [request], "k": {}, "et": body["et"]}
    ((name, queued_ms),) = await db.zrange(keys.queue("tiny", "batch"), 0, -1, withscores=True)
    assert name.decode() == job.id
    hash = {name.decode(): value.decode() for name, value in (await db.hgetall(keys.job(job.id))).items()}
    assert float(hash.pop("queued_at")) == pytest.approx(queued_ms / 1000, abs=0.001)
    assert float(hash.pop("deadline")) == pytest.approx(queued_ms / 1000 + 60, abs=0.001)
    assert len(hash.pop("submission")) == 32
    marks, nbytes = marks_of(await db.get(f"arq:job:{job.id}"))
    assert (hash.pop("marks"), hash.pop("bytes")) == (marks, str(nbytes))
    assert hash == {"state": "queued", "model": "tiny", "lane": "batch", "tenant": "acme"}
    for key in (f"arq:job:{job.id}", keys.job(job.id)):
        assert 86_000 < await db.ttl(key) <= 86_400


async def test_messages_alone_are_a_request(db: Redis, client: Client) -> None:
    job = await client.submit(HELLO)
    assert json.loads(await db.get(f"arq:job:{job.id}"))["a"] == [{"messages": HELLO}]


async def test_the_user_is_the_tenant_where_none_is_given(db: Redis, client: Client) -> None:
    job = await client.submit({"messages": HELLO, "user": "ada"})
    assert await db.hget(keys.job(job.id), "tenant") == b"ada"


async def test_the_safety_identifier_comes_before_the_user_as_tenant(db: Redis, client: Client) -> None:
    job = await client.submit({"messages": HELLO, "safety_identifier": "u-1", "user": "ada"})
    assert await db.hget(keys.job(job.id), "tenant") == b"u-1"


async def test_the_cache_key_is_kept_with_the_job(db: Redis, client: Client) -> None:
    job = await client.submit({"messages": HELLO, "prompt_cache_key": "session-9"})
    assert await db.hget(keys.job(job.id), "prompt_cache_key") == b"session-9"


async def test_the_marks_of_a_prompt_are_kept_with_the_job(db: Redis, client: Client) -> None:
    job = await client.submit({"messages": [{"role": "user", "content": "word " * 2000}]})
    marks, bytes = marks_of(await db.get(f"arq:job:{job.id}"))
    assert await db.hmget(keys.job(job.id), "marks", "bytes") == [marks.encode(), str(bytes).encode()]


@pytest.mark.parametrize(
    ("fields", "given", "lane"),
    [
        ({"service_tier": "flex"}, None, "batch"),
        ({"service_tier": "flex"}, "interactive", "interactive"),
        ({"service_tier": "priority"}, None, "interactive"),
        ({"service_tier": "priority"}, "batch", "batch"),
        ({}, None, "interactive"),
    ],
)
async def test_the_service_tier_chooses_the_lane_unless_one_is_given(
    db: Redis, client: Client, fields: dict[str, Any], given: keys.Lane | None, lane: keys.Lane
) -> None:
    job = await client.submit({"messages": HELLO, **fields}, lane=given)
    assert await db.zscore(keys.queue("default", lane), job.id) is not None
    assert await db.hget(keys.job(job.id), "lane") == lane.encode()


async def test_an_id_that_is_known_is_queued_once(db: Redis, client: Client) -> None:
    assert await client.submit({"messages": HELLO, "seed": 1}, id="a") == Submitted("a", new=True, state="queued")
    before = await db.get("arq:job:a")
    assert await client.submit({"messages": HELLO, "seed": 2}, id="a", lane="batch") == Submitted("a", False, "queued")
    assert await db.get("arq:job:a") == before
    assert await db.exists(keys.queue("default", "batch")) == 0


async def test_an_id_that_another_producer_queued_is_known(db: Redis, client: Client) -> None:
    await db.set(keys.body("a"), "{}", ex=60)
    await db.zadd(QUEUE, {"a": 1})
    assert await client.submit(HELLO, id="a") == Submitted("a", new=False, state="queued")


async def test_of_many_that_submit_one_id_at_once_one_is_first(db: Redis, client: Client) -> None:
    answers = await asyncio.gather(*(client.submit(HELLO, id="a") for _ in range(20)))
    assert sorted(answer.new for answer in answers) == [False] * 19 + [True]
    assert await db.zcard(QUEUE) == 1


EXTRA = ExtraKey("mine", b"1", 60), ExtraKey("mine too", b"\xff", 120)


async def extra_keys(db: Redis) -> list[tuple[bytes | None, int]]:
    """The value of each extra key, and its time to live in minutes."""
    return [(await db.get(key.name), round(await db.ttl(key.name) / 60)) for key in EXTRA]


async def test_extra_keys_are_set_with_the_job(db: Redis, client: Client) -> None:
    await db.set("mine", "an earlier value")
    job = await client.submit(HELLO, extra_keys=EXTRA)
    assert (job.new, await extra_keys(db)) == (True, [(b"1", 1), (b"\xff", 2)])


async def test_extra_keys_are_set_for_each_of_many_submissions_at_once(db: Redis, client: Client) -> None:
    await asyncio.gather(*(client.submit(HELLO, extra_keys=[ExtraKey(f"k-{n}", b"1", 60)]) for n in range(20)))
    assert await db.exists(*(f"k-{n}" for n in range(20))) == 20


async def test_a_job_that_is_not_queued_sets_no_extra_keys(db: Redis, client: Client) -> None:
    with pytest.raises(NoWorker):
        await client.submit(HELLO, wait_worker_s=0, extra_keys=EXTRA)
    await client.submit(HELLO, id="a")
    assert not (await client.submit(HELLO, id="a", extra_keys=EXTRA)).new
    await db.hset(keys.model("default"), "w", "1 1 9999999999 0 0")
    with pytest.raises(QueueFull):
        await client.submit(HELLO, id="b", extra_keys=EXTRA)
    assert await db.exists("mine", "mine too") == 0


@pytest.mark.parametrize("ttl_s", [0, -1, 10**13])
def test_a_time_to_live_that_the_server_would_refuse_is_no_extra_key(ttl_s: int) -> None:
    with pytest.raises(ValueError, match="ttl_s"):
        ExtraKey("mine", b"1", ttl_s)


@pytest.mark.parametrize(
    "wrong", [{"id": "a b"}, {"id": ""}, {"id": "é"}, {"model": "-tiny"}, {"model": ""}, {"lane": "fast"}]
)
async def test_a_bad_name_is_refused_before_anything_is_queued(db: Redis, client: Client, wrong: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        await client.submit(HELLO, **wrong)
    assert await db.keys() == []


@pytest.mark.parametrize(
    "fields", [{"deadline_s": True}, {"deadline_s": False}, {"deadline_s": "soon"}, {"tenant": 5}, {"tenant": "\ud800"}]
)
async def test_a_field_that_the_worker_will_refuse_is_queued_for_it_to_refuse(
    db: Redis, client: Client, fields: dict[str, Any]
) -> None:
    job = await client.submit({"messages": HELLO, **fields})
    assert await db.ttl(keys.job(job.id)) > 0
    assert await db.zcard(QUEUE) == 1


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("tenant", "x" * 129), ("user", "x" * 10_000_000), ("prompt_cache_key", "x" * 257),
        ("deadline_s", -5), ("deadline_s", 0), ("deadline_s", 10**400),
    ],
)  # fmt: skip
async def test_what_the_worker_will_refuse_is_not_kept_with_the_job(
    db: Redis, client: Client, field_name: str, value: Any
) -> None:
    job = await client.submit({"messages": HELLO, field_name: value})
    kept = (await db.hgetall(keys.job(job.id))).keys() - {b"marks", b"bytes"}  # hashes, of a bounded number
    assert kept <= {b"state", b"model", b"lane", b"queued_at", b"submission"}


async def test_a_tenant_of_the_longest_name_is_kept(db: Redis, client: Client) -> None:
    job = await client.submit({"messages": HELLO, "tenant": "ä" * 128})
    assert await db.hget(keys.job(job.id), "tenant") == ("ä" * 128).encode()


async def test_a_submission_that_is_cancelled_can_be_cancelled_although_it_reaches_the_server_later(
    db: Redis, client: Client
) -> None:
    await client.submit(HELLO, id="before")  # from now on the client is connected, and the server knows the script
    await db.client_pause(60_000, all=False)  # writes wait
    submitting = asyncio.create_task(client.submit(HELLO, id="a"))
    await asyncio.sleep(0.05)
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    cancelling = asyncio.create_task(client.cancel("a"))
    await asyncio.sleep(0.05)
    await db.client_unpause()
    await cancelling

    async def is_known() -> bool:
        return await client.state("a") is not None

    await until(is_known)
    assert await client.state("a") == "cancelled" or await db.exists(keys.cancel("a"))
