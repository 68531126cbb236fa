"""`/v1/messages/batches`, through Anthropic's SDK, with a feeder and the tiny model."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic as sdk
import httpx
import pytest
from anthropic import AsyncAnthropic
from anthropic.types.messages import MessageBatch, MessageBatchIndividualResponse
from openai import AsyncOpenAI
from redis.asyncio import Redis

from sluice import Client
from sluice.batch.files import RunState
from sluice.batch.folder import RunFolder, place_run, run_paths
from sluice.batch.registry import BatchRegistry
from sluice.batch.run import new_batch
from sluice.batch.source import RunOptions
from sluice.contract.batch import new_run_id
from sluice.gateway import ServeSettings
from tests.batch.helpers import as_bytes, feed_folder, line, write
from tests.gateway.batches.test_files import tenants
from tests.gateway.batches.test_runs import ended as ended_batch
from tests.gateway.gateways import HttpGateway, serving
from tests.queue.helpers import until
from tests.support.stack import WorkerProcess

COUNT = {"model": "default", "max_tokens": 64, "messages": [{"role": "user", "content": "Count to 4."}]}


def asked(custom_id: str, **more: Any) -> Any:
    return {"custom_id": custom_id, "params": {**COUNT, **more}}


def client_of(url: str, key: str = "none") -> AsyncAnthropic:
    return AsyncAnthropic(base_url=url, api_key=key, max_retries=0)


@pytest.fixture
async def anthropic(gateway: HttpGateway) -> AsyncIterator[AsyncAnthropic]:
    async with client_of(gateway.url) as client:
        yield client


async def ended(anthropic: AsyncAnthropic, batch_id: str) -> MessageBatch:
    found = list[MessageBatch]()

    async def is_ended() -> bool:
        found.append(await anthropic.messages.batches.retrieve(batch_id))
        return found[-1].processing_status == "ended"

    await until(is_ended)
    return found[-1]


async def results(anthropic: AsyncAnthropic, batch_id: str) -> dict[str, MessageBatchIndividualResponse]:
    found = [each async for each in await anthropic.messages.batches.results(batch_id)]
    named = {each.custom_id: each for each in found}
    assert len(named) == len(found)
    return named


@pytest.mark.usefixtures("feeder")
async def test_a_batch_is_created_read_and_deleted(
    anthropic: AsyncAnthropic, worker: WorkerProcess, client: Client, folder: Path, gateway: HttpGateway
) -> None:
    worker.wait_ready()
    requests = [asked("a"), asked("cut", max_tokens=2), asked("bad", messages=[]), asked("long", temperature=7)]
    made = await anthropic.messages.batches.create(requests=requests)
    assert (made.type, made.processing_status, made.results_url, made.ended_at) == (
        "message_batch", "in_progress", None, None,
    )  # fmt: skip
    assert made.request_counts.processing == 4
    batch = await ended(anthropic, made.id)
    assert batch.request_counts.to_dict() == {
        "processing": 0, "succeeded": 2, "errored": 2, "canceled": 0, "expired": 0,
    }  # fmt: skip
    assert batch.created_at == made.created_at
    assert batch.expires_at >= made.expires_at, "its window began when it was taken"
    MessageBatch.model_validate_json(batch.to_json(), strict=False)
    found = await results(anthropic, batch.id)
    assert found.keys() == {"a", "cut", "bad", "long"}
    alone = await anthropic.messages.create(**COUNT)  # type: ignore[call-overload]
    answer = found["a"].result
    assert answer.type == "succeeded"
    assert (answer.message.content, answer.message.stop_reason) == (alone.content, "end_turn")
    assert found["cut"].result.type == "succeeded"
    assert found["cut"].result.message.stop_reason == "max_tokens"
    for name in ("bad", "long"):
        failed = found[name].result
        assert failed.type == "errored"
        assert (failed.error.type, failed.error.error.type) == ("error", "invalid_request_error")
    assert (await client.batch_status(batch.id)).endpoint == "/v1/messages"
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="none") as openai:
        assert [each.id for each in (await openai.batches.list()).data] == [batch.id]
    deleted = await anthropic.messages.batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    with pytest.raises(sdk.NotFoundError):
        await anthropic.messages.batches.retrieve(batch.id)
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert left == []


async def test_batches_are_listed_by_pages_both_ways(anthropic: AsyncAnthropic, client: Client, folder: Path) -> None:
    made = [(await anthropic.messages.batches.create(requests=[asked("a")])).id for _ in range(5)]
    await client.submit_batch(write(folder.parent / "in.jsonl", line("a")), folder)  # of another endpoint
    newest_first = [each.id async for each in anthropic.messages.batches.list(limit=2)]
    assert sorted(newest_first) == sorted(made)
    page = await anthropic.messages.batches.list(limit=2, after_id=newest_first[1])
    assert ([each.id for each in page.data], page.has_more) == (newest_first[2:4], True)
    page = await anthropic.messages.batches.list(limit=2, before_id=newest_first[4])
    assert ([each.id for each in page.data], page.has_more) == (newest_first[2:4], True)
    page = await anthropic.messages.batches.list(before_id=newest_first[1])
    assert ([each.id for each in page.data], page.has_more) == (newest_first[:1], False)


async def test_a_cancelled_batch_tells_which_requests_were_not_answered(
    anthropic: AsyncAnthropic, client: Client, folder: Path
) -> None:
    made = await anthropic.messages.batches.create(requests=[asked("a"), asked("b")])
    with pytest.raises(sdk.BadRequestError, match="has not ended"):
        await anthropic.messages.batches.delete(made.id)
    with pytest.raises(sdk.AnthropicError, match="results_url"):
        await anthropic.messages.batches.results(made.id)
    batch = await anthropic.messages.batches.cancel(made.id)
    assert (batch.processing_status, batch.cancel_initiated_at is not None) == ("canceling", True)
    await feed_folder(client, folder, take=True, models={})
    batch = await ended(anthropic, made.id)
    assert (batch.request_counts.canceled, batch.request_counts.processing) == (2, 0)
    assert {each.result.type for each in (await results(anthropic, made.id)).values()} == {"canceled"}
    assert (await anthropic.messages.batches.cancel(made.id)).processing_status == "ended"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "requests: it must be a list of 1 to 50,000 requests."),
        ({"requests": []}, "requests: it must be a list"),
        ({"requests": [1]}, "requests.0: it must be an object with a custom_id and params alone."),
        ({"requests": [{**asked("a"), "method": "POST"}]}, "requests.0: it must be an object"),
        ({"requests": [asked("a b")]}, "requests.0.custom_id: it must have 1 to 64 letters"),
        ({"requests": [asked("a"), asked("a")]}, "requests.1.custom_id: a is there twice."),
        ({"requests": [asked("a", model=7)]}, "model: it must be a string."),
        ({"requests": [asked("a")], "metadata": {}}, "metadata: Extra inputs are not permitted"),
    ],
)
async def test_what_is_no_batch_is_refused_in_anthropic_s_form(
    gateway: HttpGateway, folder: Path, body: dict[str, Any], sentence: str
) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{gateway.url}/v1/messages/batches", json=body)
    told = answer.json()
    assert (answer.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert told["error"]["message"].startswith(sentence)
    assert not [path for path in folder.rglob("*") if path.is_file()]


async def test_a_tenant_has_its_own_batches(redis_url: str, folder: Path, tmp_path: Path) -> None:
    keys = ({"tenant": "acme"}, {"tenant": "other", "batch_bytes": 10}, {"tenant": "third", "models": ["small"]})
    async with tenants(redis_url, folder, tmp_path / "keys.json", *keys) as clients, AsyncExitStack() as stack:
        url = str(clients[0].base_url).removesuffix("/v1/")
        keys_of = [each.api_key for each in clients] + ["wrong"]
        made_of = [await stack.enter_async_context(client_of(url, key)) for key in keys_of]
        acme, other, small, unknown = made_of
        made = await acme.messages.batches.create(requests=[asked("a")])
        for call in (other.messages.batches.retrieve, other.messages.batches.cancel, other.messages.batches.delete):
            with pytest.raises(sdk.NotFoundError):
                await call(made.id)
        assert (await other.messages.batches.list()).data == []
        assert [each.id for each in (await acme.messages.batches.list()).data] == [made.id]
        with pytest.raises(sdk.PermissionDeniedError, match="10 bytes"):
            await other.messages.batches.create(requests=[asked("a")])
        with pytest.raises(sdk.NotFoundError, match="model: "):
            await small.messages.batches.create(requests=[asked("a")])
        with pytest.raises(sdk.AuthenticationError):
            await unknown.messages.batches.list()


async def test_a_retry_of_a_batch_is_the_same_batch_and_leaves_one_file(gateway: HttpGateway, folder: Path) -> None:
    async with httpx.AsyncClient(headers={"idempotency-key": "k"}) as http:
        made = [
            (await http.post(f"{gateway.url}/v1/messages/batches", json={"requests": [asked("a")]})).json()
            for _ in "ab"
        ]
    assert made[0] == made[1]
    assert len([*(folder / "files").rglob("data")]) == 1


async def test_requests_with_one_key_at_once_are_one_batch_and_another_body_is_refused(
    gateway: HttpGateway, folder: Path
) -> None:
    path = f"{gateway.url}/v1/messages/batches"
    async with httpx.AsyncClient(headers={"idempotency-key": "k"}, timeout=30) as http:
        made = await asyncio.gather(*(http.post(path, json={"requests": [asked("a")]}) for _ in range(8)))
        other = await http.post(path, json={"requests": [asked("b")]})
    assert {(each.status_code, each.json().get("id")) for each in made} == {(200, made[0].json().get("id"))}
    assert len([*(folder / "files").rglob("data")]) == 1
    assert other.status_code == 409


@pytest.mark.usefixtures("feeder")
async def test_a_batch_whose_lines_are_of_another_endpoint_is_refused_with_their_numbers(
    gateway: HttpGateway, worker: WorkerProcess
) -> None:
    worker.wait_ready()
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="none") as openai:
        file = await openai.files.create(file=("in.jsonl", as_bytes([line("a"), line("b")])), purpose="batch")
        made = await openai.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
        batch = await ended_batch(openai, made.id)
    assert (batch.status, batch.endpoint) == ("failed", "/v1/responses")
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [("mixed_urls", 1), ("mixed_urls", 2)]


async def test_a_page_of_many_batches_needs_no_connection_for_each(
    anthropic: AsyncAnthropic, folder: Path, tmp_path: Path, db: Redis
) -> None:
    runs, file = RunFolder(folder), write(tmp_path / "in.jsonl", line("a", url="/v1/messages"))
    ids = [new_run_id() for _ in range(120)]
    for run_id in ids:
        batch = new_batch(run_paths(runs.running / run_id), RunOptions(id=run_id))
        place_run(runs, RunState(replace(batch, endpoint="/v1/messages"), "", {}), file)
    await BatchRegistry(db).request_cancel(ids[7])
    before = len(await db.client_list())
    page = await anthropic.messages.batches.list(limit=1_000)
    assert {each.id for each in page.data} == {*ids}
    assert [each.id for each in page.data if each.processing_status == "canceling"] == [ids[7]]
    assert len(await db.client_list()) < before + 20


async def test_a_request_that_no_feeder_would_take_is_refused_alone(redis_url: str, folder: Path) -> None:
    line = {"custom_id": "b", "method": "POST", "url": "/v1/messages", "body": asked("b", system="")["params"]}
    long_by_its_end = "x" * (16_000_000 - len(json.dumps(line, separators=(",", ":"))))
    with serving(redis_url, ServeSettings(_env_file=None, batch_dir=folder, max_body_bytes=40_000_000)) as gateway:
        async with client_of(gateway.url) as anthropic:
            with pytest.raises(sdk.APIStatusError, match="requests.1: it has more than 16,000,000 bytes"):
                await anthropic.messages.batches.create(requests=[asked("a"), asked("b", system=long_by_its_end)])
            with pytest.raises(sdk.APIStatusError, match="more than 100 models"):
                await anthropic.messages.batches.create(requests=[asked(f"{k}", model=f"m{k}") for k in range(101)])
            await anthropic.messages.batches.create(requests=[asked("a", system="字" * 3_000_000)])
        half = json.dumps({"requests": [asked("a", system="\ud800")]}).encode()
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{gateway.url}/v1/messages/batches", content=half)).status_code == 200
    long, short = sorted((path.read_bytes() for path in (folder / "files").rglob("data")), key=len, reverse=True)
    assert len(long) < 9_100_000, "as long as its request, not with escapes"
    assert b"\\ud800" in short
