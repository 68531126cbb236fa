"""Messages over real sockets, from workers in this process whose answers are known."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import (
    APIStatusError,
    AsyncAnthropic,
    AuthenticationError,
    NotFoundError,
    RateLimitError,
    RequestTooLargeError,
)
from anthropic.types import ModelInfo
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from sluice.interfaces.messages.stream import UNCHANGED
from tests.fakes import TIMINGS, ByteTokenizer, FakeEngine, worker_context
from tests.gateway.gateways import HttpGateway, serving
from tests.images.pictures import patch, saved
from tests.queue.helpers import field, listening, settings, working
from tests.queue.test_images import SIGN, DimEyes
from tests.waiting import until
from worker.images.conversation import ImageInputs
from worker.jobs import chat, count

Said = dict[str, Any]

PATH = "/v1/messages"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]
HELLO: Said = {"model": "default", "max_tokens": 50, "messages": MESSAGES}
ANSWER = "one two three"


@asynccontextmanager
async def answering(url: str, db: Redis, *, step_s: float = 0.001, **given: Any) -> AsyncIterator[FakeEngine]:
    """Run a worker that sees images and answers `ANSWER`, a byte in each step."""
    tokenizer, known = ByteTokenizer(), settings(url, **given)
    engine = FakeEngine(lambda request: ANSWER.encode(), step_s=step_s)
    with closing(ImageInputs(known, DimEyes())) as images:
        context = worker_context(known, engine, tokenizer, images=images)
        async with engine, working(known, chat, count=count, context=context):
            await listening(db)
            yield engine


@pytest.fixture
async def engine(redis_url: str, db: Redis) -> AsyncIterator[FakeEngine]:
    async with answering(redis_url, db) as engine:
        yield engine


@pytest.fixture
async def anthropic(gateway: HttpGateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


def events_of(body: str) -> list[Said]:
    """Return the data of each event of a stream."""
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]


def error_of(error: APIStatusError) -> tuple[int, str]:
    body: Any = error.body
    assert body.keys() == {"type", "error", "request_id"}
    assert error.response.headers["request-id"] == body["request_id"]
    return error.status_code, body["error"]["type"]


async def test_images_are_seen_and_counted(anthropic: AsyncAnthropic, engine: FakeEngine) -> None:
    data = base64.b64encode(saved(patch(24))).decode()
    source: Any = {"type": "base64", "media_type": "image/png", "data": data}
    content: Any = [{"type": "text", "text": "What? "}, {"type": "image", "source": source}]
    messages: Any = [{"role": "user", "content": content}]
    answer = await anthropic.messages.create(model="default", max_tokens=50, messages=messages)
    counted = await anthropic.messages.count_tokens(model="default", messages=messages)
    assert answer.usage.input_tokens == counted.input_tokens == len(f"<user>What? {SIGN}<assistant>")
    assert len(engine.sequences[0].images) == 1


async def test_a_count_that_is_refused_is_refused_in_anthropic_s_form(
    anthropic: AsyncAnthropic, engine: FakeEngine
) -> None:
    long: Any = [{"role": "user", "content": "a" * 4000}]
    for call in (anthropic.messages.count_tokens, anthropic.messages.create):
        limit = {"max_tokens": 5} if call == anthropic.messages.create else {}
        with pytest.raises(APIStatusError) as refused:
            await call(model="default", messages=long, **limit)  # type: ignore[operator]
        assert error_of(refused.value) == (400, "invalid_request_error")
        assert "prompt is too long: " in refused.value.message


async def test_a_model_that_was_never_served_is_not_found(
    anthropic: AsyncAnthropic, engine: FakeEngine, db: Redis
) -> None:
    with pytest.raises(NotFoundError) as refused:
        await anthropic.messages.create(**{**HELLO, "model": "claude-9"})
    assert error_of(refused.value) == (404, "not_found_error")
    assert await db.keys("sluice:cancel:*") == []


async def test_a_model_whose_workers_have_left_is_overloaded(anthropic: AsyncAnthropic, db: Redis) -> None:
    with pytest.raises(APIStatusError) as refused:
        await anthropic.messages.create(**HELLO)
    assert error_of(refused.value) == (529, "overloaded_error")
    assert refused.value.response.headers["retry-after"] == "5"


@pytest.mark.parametrize(("method", "path", "status"), [("GET", PATH, 405), ("POST", f"{PATH}/batches", 404)])
async def test_an_unknown_route_is_refused_in_anthropic_s_form(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.json()["type"]) == (status, "error")
    assert answer.json()["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")


async def test_a_body_beyond_the_limit_is_too_large(redis_url: str) -> None:
    with serving(redis_url, ServeSettings(_env_file=None, max_body_bytes=1000)) as gateway:
        async with AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
            with pytest.raises(RequestTooLargeError) as refused:
                await client.messages.create(**{**HELLO, "system": "a" * 1000})
    assert error_of(refused.value) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("version", "status"),
    [("2023-06-01", 200), ("2026-10-21", 200), ("2023-01-01", 400), ("latest", 400), ("", 400), (None, 200)],
)
async def test_versions_of_the_form_that_it_has_are_accepted(
    http: httpx.AsyncClient, engine: FakeEngine, version: str | None, status: int
) -> None:
    headers = {} if version is None else {"anthropic-version": version}
    answer = await http.post(PATH, json=HELLO, headers=headers)
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["message"].startswith("anthropic-version: ")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_its_job(
    redis_url: str, unforgiving: HttpGateway, db: Redis, stream: bool
) -> None:
    async with answering(redis_url, db, step_s=0.3) as engine:
        async with httpx.AsyncClient(base_url=unforgiving.url) as http:
            asking = asyncio.create_task(http.post(PATH, json={**HELLO, "stream": stream}))
            await until(lambda: bool(engine.running))
            (attempt,) = engine.running
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        async def cancelled() -> bool:
            return await field(db, attempt.partition("#")[0], "state") == "cancelled"

        await until(cancelled)
        assert engine.running == set()


async def test_a_count_of_a_client_that_leaves_is_cancelled(unforgiving: HttpGateway, db: Redis) -> None:
    await db.hset(keys.model("other"), "w", "9 1 9999999999 0 0")  # a worker that takes nothing
    body = {"model": "other", "messages": HELLO["messages"]}
    async with httpx.AsyncClient(base_url=unforgiving.url) as http:
        asking = asyncio.create_task(http.post(f"{PATH}/count_tokens", json=body))
        job_id = await queued_job(db, "other")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def cancelled() -> bool:
        return await field(db, job_id, "state") == "cancelled"

    await until(cancelled)


@pytest.mark.parametrize("program", ["claude-cli/2.1.332 (external, cli)", "LiteLLM"])
async def test_a_silent_stream_is_kept_open_by_what_its_client_counts(redis_url: str, db: Redis, program: str) -> None:
    limited: Said = {**HELLO, "max_tokens": 3}
    async with answering(redis_url, db, step_s=0.4):
        with serving(redis_url, ServeSettings(_env_file=None, heartbeat_s=0.02)) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url) as http:
                answer = await http.post(PATH, json={**limited, "stream": True}, headers={"user-agent": program})
            client = AsyncAnthropic(
                base_url=gateway.url, api_key="none", max_retries=0, default_headers={"user-agent": program}
            )
            async with client, client.messages.stream(**limited) as stream:
                message = await stream.get_final_message()
    events = events_of(answer.text)
    assert events[0]["type"] == "message_start"
    assert [event["type"] for event in events].count("message_start") == 1
    assert ({"type": "ping"} in events) == (program == "LiteLLM")
    assert (UNCHANGED in events) == (program != "LiteLLM")
    assert {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": ""}} in events
    assert events[-1] == {"type": "message_stop"}
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": ANSWER[:3], "citations": None}]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


async def test_a_job_that_ends_badly_in_its_stream_ends_it_with_an_error_event(
    redis_url: str, http: httpx.AsyncClient, db: Redis
) -> None:
    async with answering(redis_url, db, step_s=0.05) as engine:
        asking = asyncio.create_task(http.post(PATH, json={**HELLO, "stream": True}))
        await until(lambda: bool(engine.running))
        (attempt,) = engine.running
        job_id = attempt.partition("#")[0]
        await until_it_speaks(db, job_id)
        await db.set(keys.cancel(job_id), "1", ex=60)
        await db.publish(keys.CONTROL, job_id)
        last = events_of((await asking).text)[-1]
    assert (last["type"], last["request_id"]) == ("error", job_id)
    assert last["error"]["message"] == "The job was cancelled, as requested."


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_starts_over_is_whole_or_breaks_its_stream_off(
    http: httpx.AsyncClient, db: Redis, stream: bool
) -> None:
    await db.hset(keys.model("other"), "w", "9 1 9999999999 0 0")  # a worker that this test plays
    asking = asyncio.create_task(http.post(PATH, json={**HELLO, "model": "other", "stream": stream}))
    job_id = await queued_job(db, "other")
    began = {"model": "other", "fingerprint": "f", "worker": "w", "seed": 1}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
    events: list[Said] = [
        {"type": "started", **began},
        {"type": "delta", "token_ids": [1], "content": "old"},
        {"type": "restarted", **began},
        {"type": "delta", "token_ids": [2], "content": "new"},
        {"type": "finished", "finish_reason": "stop", "usage": usage, "timings": TIMINGS},
    ]
    for seq, event in enumerate(events):
        raw = json.dumps({"id": job_id, "seq": seq, "attempt": 1, "ts": 1.0, **event})
        await db.rpush(keys.log(job_id), raw)
        await db.publish(keys.channel(job_id), raw)
    answer = await asking
    if stream:
        assert events_of(answer.text)[-1]["error"]["type"] == "api_error"
    else:
        assert answer.json()["content"] == [{"type": "text", "text": "new", "citations": None}]


async def queued_job(db: Redis, model: str) -> str:
    """Return the id of the only queued job, once there is one."""

    async def queued() -> bool:
        return bool(await db.exists(keys.queue(model, "interactive")))

    await until(queued)
    (job_id,) = await db.zrange(keys.queue(model, "interactive"), 0, -1)
    return str(job_id.decode())


async def until_it_speaks(db: Redis, job_id: str) -> None:
    async def speaks() -> bool:
        return bool(await db.llen(keys.log(job_id)) >= 3)

    await until(speaks)


async def test_a_retry_with_the_same_key_joins_its_job(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    headers = {"Idempotency-Key": "k"}
    answers = [await http.post(PATH, json=HELLO, headers=headers) for _ in range(2)]
    assert answers[0].json() == answers[1].json()
    assert len(engine.sequences) == 1
    other = await http.post(PATH, json={**HELLO, "max_tokens": 1}, headers=headers)
    assert (other.status_code, other.json()["error"]["type"]) == (409, "conflict_error")


async def test_a_long_conversation_is_accepted(anthropic: AsyncAnthropic, redis_url: str, db: Redis) -> None:
    """Its body is longer than what is validated on the event loop."""
    block = {"type": "text", "text": "a", "cache_control": None}
    turns = [{"role": role, "content": [block]} for role in ("user", "assistant")]
    messages: Any = [*turns * 700, turns[0]]
    async with answering(redis_url, db):
        with pytest.raises(APIStatusError) as refused:  # the worker's context is short
            await anthropic.messages.create(model="default", max_tokens=5, messages=messages)
    assert "prompt is too long: " in refused.value.message


async def test_a_limit_of_images_or_of_an_option_has_words_of_its_own(
    anthropic: AsyncAnthropic, redis_url: str, db: Redis
) -> None:
    """Claude Code compacts its conversation after `prompt is too long`, which ends in the same error then."""
    data = base64.b64encode(saved(patch(24))).decode()
    image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    messages: Any = [{"role": "user", "content": [image] * 3}]
    async with answering(redis_url, db, max_images=2, max_output_tokens=10):
        with pytest.raises(APIStatusError) as refused:
            await anthropic.messages.create(model="default", max_tokens=5, messages=messages)
        assert error_of(refused.value) == (400, "invalid_request_error")
        body: Any = refused.value.body
        said = "Could not process image: messages: 3 images are 1 more than this worker accepts (2); "
        assert body["error"]["message"].startswith(said)  # after which it goes on without images
        with pytest.raises(APIStatusError) as refused:
            await anthropic.messages.create(model="default", max_tokens=50, messages=MESSAGES)
        assert "prompt is too long" not in refused.value.message


# Models and keys


async def test_models_have_anthropic_s_form_for_its_clients(anthropic: AsyncAnthropic, engine: FakeEngine) -> None:
    (model,) = [each async for each in anthropic.models.list()]
    ModelInfo.model_validate(model.to_dict())
    assert (model.id, model.type, model.created_at.tzinfo is not None) == ("default", "model", True)
    assert await anthropic.models.retrieve("default") == model
    with pytest.raises(NotFoundError) as refused:
        await anthropic.models.retrieve("claude-9")
    assert error_of(refused.value) == (404, "not_found_error")


async def test_models_have_openai_s_form_for_all_others(http: httpx.AsyncClient, engine: FakeEngine) -> None:
    assert (await http.get("/v1/models")).json()["object"] == "list"


async def test_a_key_is_accepted_in_both_headers_and_a_count_costs_no_tokens(
    redis_url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    entry = {"id": "k", "sha256": key_digest("secret"), "tenant": "acme", "tokens_per_minute": 1_000}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    with serving(redis_url, ServeSettings(_env_file=None, keys=tmp_path / "keys.json")) as gateway:
        async with AsyncAnthropic(base_url=gateway.url, max_retries=0, api_key="secret") as client:
            for _ in range(3):
                counted = await client.messages.with_raw_response.count_tokens(model="default", messages=MESSAGES)
                assert counted.headers["anthropic-ratelimit-tokens-remaining"] == "1000"
            answer = await client.messages.with_raw_response.create(**HELLO)
            assert int(answer.headers["anthropic-ratelimit-tokens-remaining"]) < 1000
        async with AsyncAnthropic(base_url=gateway.url, max_retries=0, auth_token="secret") as client:
            assert (await client.messages.count_tokens(model="default", messages=MESSAGES)).input_tokens > 0
        async with AsyncAnthropic(base_url=gateway.url, max_retries=0, api_key="wrong") as client:
            with pytest.raises(AuthenticationError) as refused:
                await client.messages.create(**HELLO)
    assert error_of(refused.value) == (401, "authentication_error")


async def test_a_key_beyond_its_limit_is_told_when_to_come_back(
    redis_url: str, engine: FakeEngine, tmp_path: Path
) -> None:
    entry = {"id": "k", "sha256": key_digest("secret"), "tenant": "acme", "requests_per_minute": 1}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    with serving(redis_url, ServeSettings(_env_file=None, keys=tmp_path / "keys.json")) as gateway:
        async with AsyncAnthropic(base_url=gateway.url, max_retries=0, api_key="secret") as client:
            await client.messages.create(**HELLO)
            with pytest.raises(RateLimitError) as refused:
                await client.messages.create(**HELLO)
    assert error_of(refused.value) == (429, "rate_limit_error")
    assert 0 < int(refused.value.response.headers["retry-after"]) <= 60
