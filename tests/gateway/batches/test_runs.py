"""`/v1/batches`, through OpenAI's SDK, with a feeder and a worker."""

import asyncio
import json
import shutil
from pathlib import Path
from threading import current_thread

import httpx
import openai as sdk
import pytest
from openai import AsyncOpenAI
from openai.types import Batch
from redis.asyncio import Redis

from sluice import Client
from sluice.batch.store import FileStore
from sluice.gateway.batches import runs
from sluice.gateway.batches.folder import Shared
from sluice.gateway.batches.runs import public
from tests.batch.helpers import as_bytes, feed_folder, says, write
from tests.fakes import FakeChat
from tests.gateway.batches.test_files import tenants
from tests.gateway.gateways import HttpGateway
from tests.queue.helpers import until


async def uploaded(openai: AsyncOpenAI, *custom_ids: str, **more: object) -> str:
    data = as_bytes(says(custom_id, **more) for custom_id in custom_ids)
    return (await openai.files.create(file=("in.jsonl", data), purpose="batch")).id


async def created(openai: AsyncOpenAI, file_id: str, **more: object) -> Batch:
    fields = {"completion_window": "24h", "endpoint": "/v1/chat/completions", **more}
    return await openai.batches.create(input_file_id=file_id, **fields)  # type: ignore[arg-type]


async def ended(openai: AsyncOpenAI, batch_id: str) -> Batch:
    found = list[Batch]()

    async def is_ended() -> bool:
        found.append(await openai.batches.retrieve(batch_id))
        return found[-1].status in ("completed", "failed", "expired", "cancelled")

    await until(is_ended)
    return found[-1]


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_a_batch_runs_from_upload_to_download(openai: AsyncOpenAI, folder: Path) -> None:
    file_id = await uploaded(openai, "a", "b")
    made = await created(openai, file_id, metadata={"team": "x"}, completion_window="90m")
    assert (made.status, made.input_file_id, made.endpoint) == ("validating", file_id, "/v1/chat/completions")
    batch = await ended(openai, made.id)
    assert (batch.status, batch.metadata, batch.completion_window) == ("completed", {"team": "x"}, "90m")
    assert batch.request_counts is not None
    assert (batch.request_counts.total, batch.request_counts.completed) == (2, 2)
    assert (batch.created_at, batch.error_file_id) == (made.created_at, None)
    assert batch.output_file_id is not None
    assert str(folder) not in batch.to_json(), "no path of the server"
    assert {*batch.to_dict()["sluice"]} & {"host", "tenant"} == set()  # type: ignore[misc, attr-defined]
    answers = (await openai.files.content(batch.output_file_id)).text.splitlines()
    assert sorted(json.loads(answer)["custom_id"] for answer in answers) == ["a", "b"]
    (listed,) = (await openai.files.list(purpose="batch_output")).data
    assert (listed.id, listed.filename) == (batch.output_file_id, f"{batch.id}_output.jsonl")
    await openai.files.delete(listed.id)
    assert not (folder / "done" / batch.id / "output.jsonl").exists()
    assert (await openai.batches.retrieve(batch.id)).status == "completed"


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_half_a_surrogate_pair_in_metadata_spoils_no_answer(openai: AsyncOpenAI, gateway: HttpGateway) -> None:
    body = {"input_file_id": await uploaded(openai, "a"), "endpoint": "/v1/chat/completions", "completion_window": "1h"}
    async with httpx.AsyncClient(base_url=gateway.base_url) as http:
        made = await http.post("/batches", content=json.dumps({**body, "metadata": {"emoji": "\ud83d"}}))
        assert (made.status_code, made.json()["metadata"]) == (200, {"emoji": "\ud83d"})
        assert (await http.post("/batches", content=json.dumps({"\ud83d": 1}))).status_code == 400
    assert (await ended(openai, made.json()["id"])).status == "completed"
    assert [each.metadata async for each in openai.batches.list()] == [{"emoji": "\ud83d"}]


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_a_bad_file_fails_with_its_lines(
    openai: AsyncOpenAI, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await ended(openai, (await created(openai, await uploaded(openai, "a", "a"))).id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(each.code, each.line) for each in batch.errors.data] == [("duplicate_custom_id", 2)]
    threads = list[str]()
    monkeypatch.setattr(runs, "public", lambda batch: threads.append(current_thread().name) or public(batch))
    for _ in range(2):  # read, and kept
        assert [each.errors async for each in openai.batches.list()] == [batch.errors]
    (kept,) = Shared(folder).runs(None)
    assert (kept.id, kept.errors) == (batch.id, None)  # of thousands of runs they would fill the memory
    assert {name.partition("_")[0] for name in threads} == {"sluice-files"}


@pytest.mark.usefixtures("fake_worker")
async def test_a_cancelled_batch_keeps_its_answers(
    openai: AsyncOpenAI, client: Client, folder: Path, chat: FakeChat
) -> None:
    data = as_bytes([says("a"), says("slow", pace_s=60, then="x")])
    file_id = (await openai.files.create(file=("in.jsonl", data), purpose="batch")).id
    made = await created(openai, file_id)
    feeding = asyncio.create_task(feed_folder(client, folder, take=True, models={}))

    async def is_answered() -> bool:
        counts = (await openai.batches.retrieve(made.id)).request_counts
        return counts is not None and counts.completed == 1

    await until(is_answered)
    with pytest.raises(sdk.ConflictError):
        await openai.files.delete(file_id)
    assert (await openai.batches.cancel(made.id)).status == "cancelling"
    batch = await ended(openai, made.id)
    await feeding
    assert batch.status == "cancelled"
    assert batch.output_file_id is not None
    assert batch.error_file_id is not None
    assert json.loads((await openai.files.content(batch.output_file_id)).text)["custom_id"] == "a"
    assert json.loads((await openai.files.content(batch.error_file_id)).text)["error"]["code"] == "batch_cancelled"
    with pytest.raises(sdk.ConflictError):
        await openai.batches.cancel(made.id)
    await openai.files.delete(file_id)


async def test_a_waiting_batch_is_shown_as_cancelling(openai: AsyncOpenAI, client: Client) -> None:
    made = await created(openai, await uploaded(openai, "a"))
    asked = await openai.batches.cancel(made.id)
    again = await openai.batches.retrieve(made.id)
    assert (asked.status, again.status) == ("cancelling", "cancelling")
    assert asked.cancelling_at is not None
    assert again.cancelling_at is not None
    assert abs(asked.cancelling_at - again.cancelling_at) <= 1


async def test_batches_are_listed_in_pages_the_newest_first(openai: AsyncOpenAI) -> None:
    file_id = await uploaded(openai, "a")
    made = [await created(openai, file_id) for _ in range(5)]
    expected = [each.id for each in sorted(made, key=lambda batch: (batch.created_at, batch.id), reverse=True)]
    assert [each.id async for each in openai.batches.list(limit=2)] == expected
    with pytest.raises(sdk.BadRequestError):
        await openai.batches.list(after="batch_" + "0" * 32)
    with pytest.raises(sdk.BadRequestError):
        await openai.batches.list(limit=0)


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_runs_of_the_command_and_of_http_are_the_same(
    openai: AsyncOpenAI, client: Client, folder: Path, tmp_path: Path
) -> None:
    submitted = await client.submit_batch(write(tmp_path / "in.jsonl", says("a")), folder)
    batch = await ended(openai, submitted.id)
    assert batch.output_file_id is not None
    assert (await openai.files.content(batch.output_file_id)).text.startswith('{"id"')
    made = await created(openai, await uploaded(openai, "b"))
    await ended(openai, made.id)
    assert {run.id for run in await client.batches()} == {submitted.id, made.id}


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_files_of_a_run_go_with_its_folder(openai: AsyncOpenAI, folder: Path) -> None:
    batch = await ended(openai, (await created(openai, await uploaded(openai, "a"))).id)
    FileStore(folder).sweep()
    assert len((await openai.files.list(purpose="batch_output")).data) == 1
    shutil.rmtree(folder / "done" / batch.id)
    FileStore(folder).sweep()
    assert (await openai.files.list(purpose="batch_output")).data == []
    with pytest.raises(sdk.NotFoundError):
        await openai.batches.retrieve(batch.id)


@pytest.mark.usefixtures("fake_worker")
async def test_runs_survive_the_loss_of_the_server_s_data(
    openai: AsyncOpenAI, client: Client, db: Redis, folder: Path
) -> None:
    done, waits = [await created(openai, await uploaded(openai, "a")) for _ in range(2)][:2]
    (folder / "inbox" / f"{waits.id}.jsonl").rename(folder / "kept")
    await feed_folder(client, folder, take=True, models={})
    (folder / "kept").rename(folder / "inbox" / f"{waits.id}.jsonl")
    for key in await db.keys("sluice:batch:*"):
        await db.delete(key)
    assert {each.id: each.status async for each in openai.batches.list()} == {
        done.id: "completed",
        waits.id: "validating",
    }
    assert (await openai.batches.retrieve(done.id)).output_file_id is not None


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"input_file_id": "file-" + "0" * 24}, "input_file_id"),
        ({"input_file_id": "../x"}, "input_file_id"),
        ({"endpoint": "/v1/other"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"extra_body": {"priority": 1}}, "priority"),
    ],
)
async def test_wrong_fields_of_a_batch_are_named(
    openai: AsyncOpenAI, folder: Path, changed: dict[str, object], param: str
) -> None:
    fields = {"input_file_id": await uploaded(openai, "a"), **changed}
    with pytest.raises(sdk.APIStatusError) as refused:
        await created(openai, fields.pop("input_file_id"), **fields)  # type: ignore[arg-type]
    assert (refused.value.status_code in (400, 404), refused.value.param) == (True, param)
    assert (await openai.batches.list()).data == []


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_an_idempotency_key_makes_one_batch(openai: AsyncOpenAI) -> None:
    file_id = await uploaded(openai, "a")
    key = {"idempotency-key": "k"}
    made = await asyncio.gather(*(created(openai, file_id, extra_headers=key) for _ in range(4)))
    assert len({batch.id for batch in made}) == 1
    await ended(openai, made[0].id)
    assert (await created(openai, file_id, extra_headers=key)).id == made[0].id
    with pytest.raises(sdk.ConflictError):
        await created(openai, file_id, completion_window="1h", extra_headers=key)
    assert len((await openai.batches.list()).data) == 1


async def test_a_key_s_batch_is_created_after_a_kill_in_its_hand_over(openai: AsyncOpenAI, folder: Path) -> None:
    file_id = await uploaded(openai, "a")
    made = await created(openai, file_id, extra_headers={"idempotency-key": "k"})
    waiting = folder / "inbox" / f"{made.id}.jsonl"
    waiting.rename(waiting.with_name(f".{made.id}.part"))
    with pytest.raises(sdk.NotFoundError):
        await openai.batches.retrieve(made.id)
    assert (await created(openai, file_id, extra_headers={"idempotency-key": "k"})).id == made.id
    assert {path.name for path in waiting.parent.iterdir()} == {waiting.name, f"{made.id}.run"}


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_results_expire_as_the_batch_says(openai: AsyncOpenAI) -> None:
    expires = {"anchor": "created_at", "seconds": 3600}
    batch = await ended(openai, (await created(openai, await uploaded(openai, "a"), output_expires_after=expires)).id)
    assert batch.output_file_id is not None
    output = await openai.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 3600


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_a_tenant_has_its_own_batches(
    redis_url: str, folder: Path, tmp_path: Path, chat: FakeChat, client: Client
) -> None:
    keys = (
        {"tenant": "acme", "models": ("default",)},
        {"tenant": "other"},
        {"tenant": "live", "lanes": ("interactive",)},
    )
    async with tenants(redis_url, folder, tmp_path / "keys.json", *keys) as (acme, other, live):
        file_id = await uploaded(acme, "a", tenant="other")
        batch = await ended(acme, (await created(acme, file_id)).id)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        assert [run.sluice.tenant for run in await client.batches()] == ["acme"]
        for call in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(sdk.NotFoundError):
                await call(batch.id)
        with pytest.raises(sdk.NotFoundError):
            await other.files.content(batch.output_file_id)
        with pytest.raises(sdk.NotFoundError):
            await created(other, file_id)
        assert ((await other.batches.list()).data, (await other.files.list()).data) == ([], [])
        forbidden = await ended(acme, (await created(acme, await uploaded(acme, "a", model="big"))).id)
        assert forbidden.errors is not None
        assert forbidden.errors.data is not None
        assert [each.code for each in forbidden.errors.data] == ["model_not_allowed"]
        with pytest.raises(sdk.PermissionDeniedError):
            await created(live, await uploaded(live, "a"))
        await client.submit_batch(write(tmp_path / "in.jsonl", says("a")), folder)
        assert len((await acme.batches.list()).data) == 2


async def test_a_key_limits_the_open_batches_of_its_tenant(redis_url: str, folder: Path, tmp_path: Path) -> None:
    keys = ({"tenant": "acme", "batch_runs": 1}, {"tenant": "other", "batch_runs": 1})
    async with tenants(redis_url, folder, tmp_path / "keys.json", *keys) as (acme, other):
        file_id = await uploaded(acme, "a")
        outcomes = await asyncio.gather(*(created(acme, file_id) for _ in range(4)), return_exceptions=True)
        refused = [each for each in outcomes if isinstance(each, sdk.RateLimitError)]
        assert (len(refused), {each.code for each in refused}) == (3, {"too_many_batches"})
        await created(other, await uploaded(other, "a"))
        assert len((await acme.batches.list()).data) == 1


@pytest.mark.usefixtures("fake_worker", "feeder")
async def test_names_of_models_are_mapped_as_in_requests(
    redis_url: str, folder: Path, gateway: HttpGateway, openai: AsyncOpenAI
) -> None:
    batch = await ended(openai, (await created(openai, await uploaded(openai, "a", model="default"))).id)
    assert batch.model == "default"
