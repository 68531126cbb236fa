"""Jobs of the kind `count`: the prompt tokens of a chat, without a row of the engine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any, get_args

import pytest
from redis.asyncio import Redis

from schemas import CountResult
from sluice import Client, JobFailed, NoWorker
from sluice.contract import keys
from sluice.contract.keys import JobFunction
from tests.fakes import ByteTokenizer, FakeEngine, worker_context
from tests.keyspace import check_all_ended
from tests.queue.helpers import ended, envelope, put, settings, types, working
from tests.queue.test_images import SIGN, DimEyes, image
from tests.waiting import until
from worker.embed import embed
from worker.images.conversation import ImageInputs
from worker.jobs import chat, count

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = len("<user>Hello<assistant>")
CONTEXT = 2048
PICTURES = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Two: "}, image(24), image(30)]}]}
REFUSED: dict[str, Any] = {
    "longer than the context": {"messages": [{"role": "user", "content": "a" * CONTEXT}]},
    "far beyond the context": {"messages": [{"role": "user", "content": "a" * 100_000}]},
    "the template raises": {"messages": [{"role": "user", "content": "refuse"}]},
    "an unknown field": {**HELLO, "mood": "good"},
    "no messages": {},
    "another model": {**HELLO, "model": "other"},
    "too wide an image": {"messages": [{"role": "user", "content": [image(200)]}]},
}


@asynccontextmanager
async def counting(url: str, *, engine: FakeEngine | None = None, **given: Any) -> AsyncIterator[FakeEngine]:
    """Run a worker that has both functions and sees images."""
    template = "{% if messages[-1].content == 'refuse' %}{{ raise_exception('No.') }}{% endif %}"
    tokenizer, known = ByteTokenizer(), settings(url, **given)
    tokenizer.template = template + tokenizer.template
    engine = engine or FakeEngine(lambda request: b"Hi")
    with closing(ImageInputs(known, DimEyes())) as images:
        context = worker_context(known, engine, tokenizer, images=images, context_tokens=CONTEXT)
        async with engine, working(known, chat, count=count, context=context):
            yield engine


@pytest.mark.parametrize("request_body", [HELLO, PICTURES], ids=["text", "images"])
async def test_a_count_is_what_the_chat_reports(
    redis_url: str, db: Redis, client: Client, request_body: dict[str, Any]
) -> None:
    async with counting(redis_url) as engine:
        counted = await client.count_tokens(request_body, timeout=10)
        assert engine.sequences == []
        job = await client.submit(request_body)
        usage = (await client.result(job.id))["usage"]
    assert counted == usage["prompt_tokens"] > PROMPT - 1
    assert usage["prompt_tokens_details"].get("image_tokens") == (2 * len(SIGN) if request_body is PICTURES else None)
    await check_all_ended(db)


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_is_refused_as_by_the_chat(redis_url: str, client: Client, name: str) -> None:
    async with counting(redis_url):
        with pytest.raises(JobFailed) as of_count:
            await client.count_tokens(REFUSED[name], timeout=10)
        job = await client.submit(REFUSED[name])
        with pytest.raises(JobFailed) as of_chat:
            await client.result(job.id, timeout=10)
    assert of_count.value.error == of_chat.value.error


async def test_a_count_ends_with_its_only_event_and_a_result_of_its_own(redis_url: str, db: Redis) -> None:
    async with counting(redis_url):
        await put(db, "a", envelope(PICTURES, function="count"))
        (finished,) = await ended(db, "a")
    assert (finished["type"], finished["finish_reason"], finished["stop_sequence"]) == ("finished", "stop", None)
    assert finished["usage"]["image_tokens"] == 2 * len(SIGN)
    result = CountResult.model_validate_json(await db.get(keys.result("a")))
    assert result.usage.prompt_tokens == finished["usage"]["prompt_tokens"]
    assert json.loads(await db.get(keys.result("a"))).keys() == CountResult.model_fields.keys()
    await check_all_ended(db)


async def test_the_pixels_of_a_count_are_released(redis_url: str, client: Client) -> None:
    """The pixel budget holds the images of one job."""
    async with counting(redis_url, image_max_pixels=100 * 16):
        async with asyncio.timeout(10):
            for _ in range(3):
                await client.count_tokens({"messages": [{"role": "user", "content": [image(100)]}]})


async def test_a_count_waits_for_a_worker_no_longer_than_it_is_told_to(redis_url: str, client: Client) -> None:
    with pytest.raises(NoWorker):
        await client.count_tokens(HELLO, wait_worker_s=0)
    with pytest.raises(TimeoutError):
        await client.count_tokens(HELLO, timeout=0.05)


async def test_a_deadline_that_passed_in_the_queue_ends_a_count(redis_url: str, db: Redis) -> None:
    now_s, _ = await db.time()
    await put(db, "a", envelope({**HELLO, "deadline_s": 30}, function="count"), at_ms=(now_s - 60) * 1000)
    async with counting(redis_url):
        (said,) = await ended(db, "a")
    assert (said["type"], said["error"]["type"]) == ("failed", "deadline")


async def test_a_count_after_a_crash_is_made_again(redis_url: str, db: Redis) -> None:
    await db.hset(keys.job("a"), mapping={"state": "queued", "attempt": 1})
    await put(db, "a", envelope(HELLO, function="count"))
    async with counting(redis_url):
        events = await ended(db, "a")
    assert (types(events), events[0]["attempt"]) == (["finished"], 2)


async def test_a_dead_letter_of_a_count_is_retried_as_a_count(redis_url: str, db: Redis, client: Client) -> None:
    letter = {
        "id": "a", "model": "default", "lane": "interactive", "crashes": 3, "parked_at": 1.0,
        "error": {"type": "internal", "message": "", "retryable": False},
        "body": envelope(HELLO, function="count").decode(),
    }  # fmt: skip
    await db.hset(keys.DEAD, "a", json.dumps(letter))
    job = await client.retry("a")
    assert json.loads(await db.get(f"arq:job:{job.id}"))["f"] == "count"


async def test_counts_are_answered_while_all_rows_are_taken(redis_url: str, db: Redis, client: Client) -> None:
    slow = FakeEngine(lambda request: b"x" * 1_000, step_s=0.05)
    async with counting(redis_url, engine=slow, max_rows=1, reserved_rows=0) as engine:
        running = await client.submit({**HELLO, "max_tokens": 2_000})

        async def is_running() -> bool:
            return await client.state(running.id) == "running"

        await until(is_running)
        waiting = await client.submit(HELLO)
        counts = [client.count_tokens({**HELLO, "tenant": f"t{number % 2}"}, timeout=10) for number in range(20)]
        assert await asyncio.gather(*counts) == [PROMPT] * 20
        assert len(engine.running) == 1
        assert await client.state(waiting.id) == "queued"
        for job in (running, waiting):
            await client.cancel(job.id)
        await ended(db, running.id)
    await check_all_ended(db)


def test_the_client_submits_what_a_worker_runs() -> None:
    assert set(get_args(JobFunction)) == {chat.__name__, count.__name__, embed.__name__}
