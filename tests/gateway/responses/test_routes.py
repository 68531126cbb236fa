"""The routes of responses over real sockets, beyond OpenAI's client: raw bodies, keys, restarts, two gateways."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from tests.gateway.gateways import HttpGateway, serving
from tests.gateway.responses.test_openai_sdk import COUNT, ENDLESS, TWELVE
from tests.waiting import until

Said = dict[str, Any]


@pytest.fixture
async def http(real_gateway: HttpGateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=real_gateway.base_url, timeout=60) as client:
        yield client


def data_of(body: str) -> list[Said]:
    return [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]


async def test_the_ids_of_server_sent_events_are_the_numbers_and_a_reconnection_continues(
    http: httpx.AsyncClient,
) -> None:
    answer = await http.post("/responses", json={"input": COUNT, "stream": True, "temperature": 0})
    lines = answer.text.splitlines()
    events = data_of(answer.text)
    ids = [int(line.removeprefix("id: ")) for line in lines if line.startswith("id: ")]
    assert ids == [event["sequence_number"] for event in events] == list(range(len(events)))
    assert "data: [DONE]" not in lines
    path = f"/responses/{events[0]['response']['id']}?stream=true"
    rest = await http.get(path, headers={"last-event-id": "4"})
    assert data_of(rest.text) == events[5:]


async def test_another_gateway_continues_the_stream_with_the_same_numbers(
    http: httpx.AsyncClient, redis_url: str
) -> None:
    answer = await http.post("/responses", json={"input": COUNT, "stream": True, "temperature": 0})
    events = data_of(answer.text)
    with serving(redis_url, ServeSettings(_env_file=None)) as other:
        path = f"{other.base_url}/responses/{events[0]['response']['id']}?stream=true&starting_after=2"
        rest = await http.get(path)
    assert data_of(rest.text) == events[3:]


async def test_a_retried_request_with_its_key_joins_its_own_response(http: httpx.AsyncClient, db: Redis) -> None:
    headers, body = {"idempotency-key": "k1"}, {"input": COUNT, "temperature": 0}
    first = await http.post("/responses", json=body, headers=headers)
    await until(lambda: time.time() > first.json()["created_at"] + 1)  # another second of creation
    second = await http.post("/responses", json=body, headers=headers)
    assert first.json() == second.json()
    assert first.json()["output"][0]["content"][0]["text"] == TWELVE
    assert len([key async for key in db.scan_iter("sluice:job:*")]) == 1
    other = await http.post("/responses", json={**body, "input": "Hi."}, headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")


async def test_a_retried_request_in_the_background_finds_its_response_as_it_is_now(http: httpx.AsyncClient) -> None:
    headers, body = {"idempotency-key": "k2"}, {"input": COUNT, "temperature": 0, "background": True}
    first = (await http.post("/responses", json=body, headers=headers)).json()
    done = data_of((await http.get(f"/responses/{first['id']}?stream=true")).text)[-1]["response"]
    assert (await http.post("/responses", json=body, headers=headers)).json() == done


async def test_a_restart_after_text_is_an_error_that_the_rest_of_the_stream_follows(
    http: httpx.AsyncClient, db: Redis
) -> None:
    created = (await http.post("/responses", json={"input": COUNT, "background": True, "temperature": 0})).json()
    path = f"/responses/{created['id']}?stream=true"
    original = data_of((await http.get(path)).text)
    log = [json.loads(raw) for raw in await db.lrange(f"sluice:log:{created['id']}", 0, -1)]
    first_text = next(index for index, event in enumerate(log) if event.get("content"))
    restarted = {**log[0], "type": "restarted", "attempt": 2}
    longer = [*log[: first_text + 1], restarted, *log[1:]]
    await db.delete(f"sluice:log:{created['id']}")
    await db.rpush(
        f"sluice:log:{created['id']}", *(json.dumps({**event, "seq": seq}) for seq, event in enumerate(longer))
    )
    broken = data_of((await http.get(path)).text)
    assert (broken[-1]["type"], broken[-1]["code"]) == ("error", "restarted")
    rest = data_of((await http.get(f"{path}&starting_after={broken[-1]['sequence_number']}")).text)
    assert rest[0]["sequence_number"] == broken[-1]["sequence_number"] + 1
    assert rest[-1]["response"]["output"] == original[-1]["response"]["output"]


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=yes", "stream"),
        ("?stream=", "stream"),
        ("?starting_after=3", "starting_after"),
        ("?stream=false&starting_after=3", "starting_after"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_9", "after"),
    ],
)
async def test_a_wrong_query_is_refused_by_name(http: httpx.AsyncClient, path: str, param: str) -> None:
    created = (await http.post("/responses", json={"input": COUNT, "max_output_tokens": 1})).json()
    answer = await http.get(f"/responses/{created['id']}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("last", ["zzz", "7.5", "-1"])
async def test_a_last_event_id_that_is_no_number_is_refused_by_name(http: httpx.AsyncClient, last: str) -> None:
    created = (await http.post("/responses", json={"input": COUNT, "max_output_tokens": 1})).json()
    answer = await http.get(f"/responses/{created['id']}?stream=true", headers={"last-event-id": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_half_a_surrogate_pair_is_refused_and_breaks_nothing(http: httpx.AsyncClient) -> None:
    for body in (rb'{"input":"\ud83d"}', rb'{"input":"a","\ud83d":1}', rb'{"input":"a","instructions":"\ud83d"}'):
        answer = await http.post("/responses", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


async def test_a_silent_stream_is_kept_open_by_events_without_a_number_of_their_own(
    redis_url: str, real_gateway: HttpGateway
) -> None:
    settings = ServeSettings(_env_file=None, heartbeat_s=0.05)
    waiting = {"input": COUNT, "stream": True, **ENDLESS, "deadline_s": 1.5}
    with serving(redis_url, settings) as gateway:
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as http:
            busy = [asyncio.create_task(http.post("/responses", json=waiting)) for _ in range(40)]
            answers = [await each for each in busy]
    late = [answer.text for answer in answers if answer.status_code == 200 and "keepalive" in answer.text]
    assert late
    for text in late:
        numbers = [event["sequence_number"] for event in data_of(text) if event["type"] != "keepalive"]
        assert numbers == [*range(len(numbers))]
        before = 0
        for event in data_of(text):
            assert event["type"] != "keepalive" or event["sequence_number"] == before
            before = event["sequence_number"]


async def test_for_another_key_s_tenant_a_response_does_not_exist(
    redis_url: str, real_gateway: HttpGateway, tmp_path: Path
) -> None:
    entries = [{"id": secret, "sha256": key_digest(secret), "tenant": secret} for secret in ("ada", "bob")]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    settings = ServeSettings(_env_file=None, keys=tmp_path / "keys.json")
    ada, bob = ({"authorization": f"Bearer {secret}"} for secret in ("ada", "bob"))
    with serving(redis_url, settings) as gateway:
        async with httpx.AsyncClient(base_url=gateway.base_url, timeout=60) as http:
            made = await http.post("/responses", json={"input": COUNT, "max_output_tokens": 1}, headers=ada)
            own, unknown = f"/responses/{made.json()['id']}", f"/responses/resp_{'0' * 32}"
            for method, end in [
                ("GET", ""), ("GET", "?stream=true"), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", ""),
            ]:  # fmt: skip
                answers = [await http.request(method, path + end, headers=bob) for path in (own, unknown)]
                assert [answer.status_code for answer in answers] == [404, 404]
                first, second = (
                    answer.text.replace(path[11:], "ID") for answer, path in zip(answers, (own, unknown), strict=True)
                )
                assert first == second
            body = {"input": COUNT, "previous_response_id": made.json()["id"]}
            continued = await http.post("/responses", json=body, headers=bob)
            assert (continued.status_code, continued.json()["error"]["param"]) == (404, "previous_response_id")
            assert (await http.get(own, headers=ada)).json() == made.json()


async def test_a_stream_that_cannot_be_read_on_ends_with_an_error_outside_of_the_numbering(
    http: httpx.AsyncClient, db: Redis
) -> None:
    body = {"input": COUNT, "background": True, **ENDLESS}
    created = (await http.post("/responses", json=body)).json()
    path = f"/responses/{created['id']}"
    async with http.stream("GET", f"{path}?stream=true") as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        await db.rpush(f"sluice:log:{created['id']}", "no event")
        text = "\n".join([line async for line in lines])
    *events, error = data_of(text)
    assert (error["type"], error["error"]["type"]) == ("error", "server_error")
    assert error["sequence_number"] == events[-1]["sequence_number"]
    assert text.count("id: ") == len(events)
    await http.post(f"{path}/cancel")


async def test_a_long_conversation_is_stored_and_continued(http: httpx.AsyncClient) -> None:
    long = {"input": "x" * 100_000, "background": True}
    first = (await http.post("/responses", json=long)).json()
    await http.post(f"/responses/{first['id']}/cancel")
    answer = await http.get(f"/responses/{first['id']}/input_items")
    assert len(answer.json()["data"][0]["content"][0]["text"]) == 100_000
    body = {"input": COUNT, "previous_response_id": first["id"]}
    refused = await http.post("/responses", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_retry_after_the_events_have_expired_gets_the_stored_response_or_a_clear_refusal(
    http: httpx.AsyncClient, db: Redis
) -> None:
    body = {"input": COUNT, "temperature": 0}
    for stream, status in ((False, 200), (True, 410)):
        headers, asked = {"idempotency-key": f"k-{stream}"}, {**body, "stream": stream}
        first = await http.post("/responses", json=asked, headers=headers)
        await db.delete(f"sluice:log:{first.headers['x-request-id']}", f"sluice:job:{first.headers['x-request-id']}")
        again = await http.post("/responses", json=asked, headers=headers)
        assert again.status_code == status
        if stream:
            assert again.json()["error"]["code"] == "answer_expired"
        else:
            assert again.json() == first.json()
    assert [key async for key in db.scan_iter("sluice:job:*")] == []


@pytest.mark.parametrize("store", [True, False])
async def test_a_retry_after_its_response_has_expired_is_refused_and_starts_nothing(
    http: httpx.AsyncClient, db: Redis, store: bool
) -> None:
    headers, body = {"idempotency-key": "k"}, {"input": COUNT, "temperature": 0, "store": store}
    first = await http.post("/responses", json=body, headers=headers)
    response_id = first.headers["x-request-id"]
    if store:
        assert (await http.delete(f"/responses/{response_id}")).status_code == 200
    await db.delete(*[f"sluice:{name}:{response_id}" for name in ("log", "job", "result")])
    again = await http.post("/responses", json=body, headers=headers)
    assert (again.status_code, again.json()["error"]["code"]) == (410, "answer_expired")
    assert [key async for key in db.scan_iter("sluice:job:*")] == []


async def test_a_retry_of_a_failed_response_gets_its_error_again(http: httpx.AsyncClient) -> None:
    headers, body = {"idempotency-key": "k"}, {"input": "word " * 50_000}
    first, again = [await http.post("/responses", json=body, headers=headers) for _ in range(2)]
    assert first.status_code == 400
    assert (again.status_code, again.json()) == (400, first.json())


async def holding(db: Redis, text: str) -> list[str]:
    """Return the keys of the server that hold a text."""
    found = []
    async for key in db.scan_iter("*"):
        match await db.type(key):
            case b"string":
                values = [await db.get(key)]
            case b"list":
                values = await db.lrange(key, 0, -1)  # type: ignore[misc]
            case b"hash":
                values = await db.hvals(key)  # type: ignore[misc]
            case _:
                values = []
        found += [key.decode() for value in values if value and text.encode() in value]
    return found


async def test_a_deleted_response_leaves_nothing_of_its_text_on_the_server(http: httpx.AsyncClient, db: Redis) -> None:
    made = await http.post("/responses", json={"input": COUNT, "temperature": 0, "metadata": {"a": "Xylophone"}})
    assert await holding(db, "Xylophone")
    assert await holding(db, TWELVE)
    assert (await http.delete(f"/responses/{made.json()['id']}")).json()["deleted"] is True
    assert await holding(db, "Xylophone") == await holding(db, TWELVE) == []
    assert await db.hget(f"sluice:job:{made.json()['id']}", "state") == b"finished"  # type: ignore[misc]


async def test_a_running_response_that_is_deleted_leaves_nothing_after_its_end(
    http: httpx.AsyncClient, db: Redis
) -> None:
    made = (await http.post("/responses", json={"input": COUNT, "background": True, **ENDLESS})).json()
    async with http.stream("GET", f"/responses/{made['id']}?stream=true") as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        assert (await http.delete(f"/responses/{made['id']}")).status_code == 200
        async for _ in lines:
            pass

    async def gone() -> bool:
        texts = [f"sluice:log:{made['id']}", f"sluice:result:{made['id']}"]
        kept = [key async for key in db.scan_iter("sluice:serve:response:*")]
        return not kept and not await db.exists(*texts)

    await until(gone)


async def test_a_stored_response_and_its_items_count_for_the_limit_and_the_memory_of_their_key(
    redis_url: str, real_gateway: HttpGateway, tmp_path: Path
) -> None:
    entry = {"id": "ada", "sha256": key_digest("ada"), "tenant": "ada", "requests_per_minute": 3}
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [entry]}))
    headers, settings = {"authorization": "Bearer ada"}, {"_env_file": None, "keys": tmp_path / "keys.json"}
    small = ServeSettings(**settings, max_body_bytes=1_000, max_held_bytes=1_000)
    body = {"input": COUNT, "max_output_tokens": 1, "instructions": "x" * 2_000}
    with serving(redis_url, ServeSettings(**settings)) as gateway, serving(redis_url, small) as narrow:
        async with httpx.AsyncClient(timeout=60, headers=headers) as http:
            path = f"/responses/{(await http.post(f'{gateway.base_url}/responses', json=body)).json()['id']}"
            full = await http.get(narrow.base_url + path)
            answers = [
                await http.get(gateway.base_url + path + end) for end in ("", "/input_items", "", "?stream=true")
            ]
    assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_bytes")
    assert [answer.status_code for answer in answers] == [200, 200, 429, 200]
