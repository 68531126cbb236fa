"""Stored responses: whose they are, how long they are kept, and how far a conversation may grow."""

import json
import threading
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.gateway import ServeSettings
from sluice.gateway.caller import LOCAL, Caller
from sluice.gateway.gateway import Gateway
from sluice.gateway.responses import history as module
from sluice.gateway.responses.history import (
    History,
    Store,
    final_key,
    record_key,
)
from sluice.interfaces.errors import ApiError
from sluice.interfaces.responses.conversation import read_conversation
from sluice.interfaces.responses.record import NewResponse, Record, new_response, parse_record, skeleton
from sluice.interfaces.responses.request import read_response_request
from sluice.interfaces.responses.stream import ResponseState
from sluice.interfaces.tools import read_tools
from sluice.transport import Retries
from tests.gateway.responses.events import TOOLS, call, delta, finished, log, started

ADA, BOB = Caller(tenant="ada"), Caller(tenant="bob")
TTL_S = 1000


class RecordStore(Store):
    """A store that can write records of responses without jobs."""

    async def put(self, response_id: str, record: bytes) -> None:
        key = self.record(response_id, record)
        await self._client.redis.set(key.name, key.value, ex=key.ttl_s)


@pytest.fixture
def store(client: Client) -> RecordStore:
    gateway = Gateway(client, ServeSettings(_env_file=None))
    return RecordStore(gateway.client, TTL_S)


@pytest.fixture
def history(client: Client, store: RecordStore) -> History:
    return History(Gateway(client, ServeSettings(_env_file=None)), store)


async def put(store: RecordStore, number: int, *, tenant: str | None = "ada", status: str = "completed") -> Record:
    """Store response `number`, which continues all those before it, and has ended unless it is in progress."""
    request = read_response_request({"input": f"Q{number}"})
    previous = tuple(f"resp_{each}" for each in range(number))
    new = new_response(request, f"resp_{number}", tenant, previous)
    await store.put(new.record.head.id, new.written)
    if status != "in_progress":
        output = [{"id": f"msg_{number}", "type": "message", "role": "assistant", "content": [], "status": status}]
        await store.store_final({**skeleton(new.record.head), "status": status, "output": output})
    return new.record


async def test_a_record_is_read_as_it_was_written(store: RecordStore) -> None:
    record = await put(store, 1)
    raw = await store.read("resp_1")
    assert raw is not None
    parsed = parse_record(raw)
    assert parsed is not None
    assert parsed.to_json() == record.to_json() == raw


@pytest.mark.parametrize("response_id", ["resp_0", "resp_unknown", "a b", "x" * 200, "resp_0:final"])
async def test_for_another_tenant_no_response_exists(history: History, store: RecordStore, response_id: str) -> None:
    await put(store, 0)
    with pytest.raises(ApiError) as refused:
        await history.find(BOB, response_id)
    assert (refused.value.form.status, refused.value.form.code) == (404, "not_found")
    assert refused.value.message == f'There is no response "{response_id[:80]}", or it has expired.'


async def test_the_operator_and_the_tenant_find_a_response(history: History, store: RecordStore) -> None:
    await put(store, 0)
    for caller in (ADA, LOCAL):
        assert (await history.find(caller, "resp_0")).head.id == "resp_0"


async def test_a_conversation_is_the_inputs_and_outputs_of_its_responses(history: History, store: RecordStore) -> None:
    for number in range(3):
        await put(store, number)
    ids, items = await history.conversation(ADA, "resp_2")
    assert ids == ("resp_0", "resp_1", "resp_2")
    assert [item["role"] for item in items] == ["user", "assistant"] * 3
    assert items[2]["content"] == [{"type": "input_text", "text": "Q1"}]


async def answered(store: RecordStore, number: int, tenant: str = "ada") -> list[dict[str, Any]]:
    """Store response `number` with every kind of output item, and return these."""
    request = read_response_request({"input": f"Q{number}", "tools": TOOLS})
    new = new_response(request, f"resp_{number}", tenant)
    state = ResponseState(new.record.head)
    written = log(
        started(), delta(reasoning="Hm."), delta(content="Yes."), call(0, "get_weather", "{}"),
        call(1, "apply_patch", '{"input": "a"}'), finished("tool_calls"),
    )  # fmt: skip
    for event in written:
        state.add(event)
    await store.put(new.record.head.id, new.written)
    await store.store_final(state.response)
    return list(state.response["output"])


def reference(id: str) -> dict[str, str]:
    return {"type": "item_reference", "id": id}


async def test_references_to_output_items_are_read_as_the_items_themselves(
    history: History, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await answered(store, 1), await answered(store, 2)
    assert [item["type"] for item in first] == ["reasoning", "message", "function_call", "custom_tool_call"]
    output = {"type": "function_call_output", "call_id": "call_0", "output": "Rain."}
    reads = list[int]()

    async def counted(retries: Retries, send: Callable[[], Awaitable[Any]]) -> Any:
        found = await send()
        reads.append(len(found))
        return found

    monkeypatch.setattr(Retries, "run", counted)
    resolved = await history.resolved(ADA, [*(reference(item["id"]) for item in first + second), output])
    assert list(resolved) == [*first, *second, output]
    assert reads == [4, 4]  # two records and two ends: their lengths, which bound what is held, and then all at once
    messages = read_conversation(resolved[:4], read_tools(TOOLS))
    assert [each["role"] for each in messages] == ["assistant"]
    assert (messages[0]["reasoning"], messages[0]["content"]) == ("Hm.", "Yes.")
    assert [each["function"]["name"] for each in messages[0]["tool_calls"]] == ["get_weather", "apply_patch"]


@pytest.mark.parametrize("id", ["msg_2_0", "msg_1_9", "resp_1", "a b", "rs_unknown_0"])
async def test_a_reference_to_an_item_that_is_not_the_caller_s_is_named(
    history: History, store: RecordStore, id: str
) -> None:
    known = await answered(store, 1)
    await answered(store, 2, tenant="bob")
    with pytest.raises(ApiError) as refused:
        await history.resolved(ADA, [reference(known[0]["id"]), reference(id)])
    assert (refused.value.form.status, refused.value.param) == (404, "input[1].id")


async def test_an_item_of_a_response_whose_end_is_not_stored_yet_is_read_from_its_job(
    history: History, store: RecordStore, client: Client
) -> None:
    await put(store, 0, status="in_progress")
    with pytest.raises(ApiError) as refused:
        await history.resolved(ADA, [reference("msg_0_in0"), reference("msg_0_0")])
    assert refused.value.form.status == 404  # it has no job


async def test_references_to_too_many_responses_are_refused(
    history: History, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_RESPONSES", 1)
    items = [*(await answered(store, 1)), *(await answered(store, 2))]
    with pytest.raises(ApiError) as refused:
        await history.resolved(ADA, [reference(item["id"]) for item in items])
    assert (refused.value.form.status, refused.value.param) == (400, "input")


async def test_continuing_a_conversation_renews_all_of_it(history: History, store: RecordStore, db: Redis) -> None:
    await put(store, 0)
    await put(store, 1)
    for each in ("resp_0", "resp_1"):
        for key in (record_key(each), final_key(each)):
            await db.expire(key, 5)
    await history.conversation(ADA, "resp_1")
    assert [await db.ttl(key(each)) for key in (record_key, final_key) for each in ("resp_0", "resp_1")] == [TTL_S] * 4


async def test_a_response_that_was_deleted_ends_the_conversations_that_need_it(
    history: History, store: RecordStore
) -> None:
    await put(store, 0)
    await put(store, 1)
    await store.delete("resp_0")
    with pytest.raises(ApiError) as refused:
        await history.conversation(ADA, "resp_1")
    assert (refused.value.form.status, refused.value.param) == (404, "previous_response_id")


async def test_a_response_in_progress_cannot_be_continued(history: History, store: RecordStore, client: Client) -> None:
    await put(store, 0, status="in_progress")
    await client.submit([{"role": "user", "content": "Hi."}], id="resp_0")
    with pytest.raises(ApiError) as refused:
        await history.conversation(ADA, "resp_0")
    assert (refused.value.form.status, refused.value.param) == (400, "previous_response_id")


@pytest.mark.parametrize(("limit", "value"), [("_MAX_RESPONSES", 1), ("MAX_BYTES", 100)])
async def test_a_conversation_has_a_limit(
    history: History, store: RecordStore, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    for number in range(2):
        await put(store, number)
    monkeypatch.setattr(module, limit, value)
    with pytest.raises(ApiError) as refused:
        await history.conversation(ADA, "resp_1")
    assert (refused.value.form.status, refused.value.param) == (400, "previous_response_id")


async def test_the_last_response_counts_for_the_limit_of_a_conversation(
    history: History, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(store, 0)
    monkeypatch.setattr(module, "MAX_BYTES", await store.length("resp_0"))
    assert (await history.conversation(ADA, "resp_0"))[0] == ("resp_0",)
    monkeypatch.setattr(module, "MAX_BYTES", await store.length("resp_0") - 1)
    with pytest.raises(ApiError) as refused:
        await history.conversation(ADA, "resp_0")
    assert (refused.value.form.status, refused.value.param) == (400, "previous_response_id")


@pytest.mark.parametrize(
    ("final", "status"),
    [
        ({"type": "failed", "error": {"type": "internal", "message": "It broke.", "retryable": True}}, "failed"),
        ({"type": "cancelled", "reason": "requested"}, "cancelled"),
    ],
)
async def test_the_end_of_a_job_without_events_is_that_of_its_response(
    history: History, store: RecordStore, db: Redis, final: dict[str, Any], status: str
) -> None:
    record = await put(store, 0, status="in_progress")
    await db.hset("sluice:job:resp_0", "state", status)
    await db.set("sluice:result:resp_0", json.dumps(final))
    assert (await history.current(record))["status"] == status
    assert json.loads(await db.get(final_key("resp_0")))["status"] == status


async def test_a_response_that_was_deleted_does_not_come_back_with_its_end(store: RecordStore, db: Redis) -> None:
    record = await put(store, 0, status="in_progress")
    await store.delete("resp_0")
    await store.store_final({**skeleton(record.head), "status": "completed"})
    assert not await db.exists(record_key("resp_0"), final_key("resp_0"))


async def test_retrieving_a_response_renews_it(history: History, store: RecordStore, db: Redis) -> None:
    await put(store, 0)
    for key in (record_key("resp_0"), final_key("resp_0")):
        await db.expire(key, 5)
    await history.current(await history.find(ADA, "resp_0"))
    assert [await db.ttl(key("resp_0")) for key in (record_key, final_key)] == [TTL_S] * 2


async def test_a_continued_conversation_is_read_in_a_thread_however_short_its_request(
    http: httpx.AsyncClient, store: RecordStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = list[str]()

    def made(*arguments: Any) -> NewResponse:
        threads.append(threading.current_thread().name)
        return new_response(*arguments)

    monkeypatch.setattr(import_module("sluice.gateway.responses.routes"), "new_response", made)
    await put(store, 0, tenant=None)
    await http.post("/v1/responses", json={"input": "Hi.", "previous_response_id": "resp_0"})
    assert [name.partition("_")[0] for name in threads] == ["sluice-text"]
