"""Chat completions over real sockets, from a worker whose answers the request itself dictates."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.gateway import ServeSettings
from sluice.gateway.jobs import Jobs
from tests.fakes import FakeChat
from tests.gateway.gateways import HttpGateway, serving
from tests.queue.helpers import field
from tests.waiting import until

Said = dict[str, Any]

PATH = "/v1/chat/completions"


def request(*words: str, **fields: Any) -> Said:
    return {"messages": [{"role": "user", "content": "Hi."}], "say": list(words), **fields}


def frames_of(body: str) -> list[dict[str, str]]:
    """Return the fields of each event of a stream."""
    blocks = [block.splitlines() for block in body.split("\n\n") if block]
    return [dict(line.split(": ", 1) for line in block if not line.startswith(":")) for block in blocks]


def data_of(body: str) -> list[Any]:
    """Return the data of each event of a stream."""
    data = [frame["data"] for frame in frames_of(body)]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices if choice["index"] == index)


async def until_idle(chat: FakeChat) -> None:
    async def idle() -> bool:
        return not chat.running

    await until(idle)


async def until_running(chat: FakeChat, jobs: int) -> None:
    async def running() -> bool:
        return len(chat.running) == jobs

    await until(running)


pytestmark = pytest.mark.usefixtures("fake_worker")


async def test_a_whole_answer_is_the_result_and_its_id_is_the_job_s(http: httpx.AsyncClient, db: Redis) -> None:
    answer = await http.post(PATH, json=request("1", " 2"))
    assert (answer.status_code, answer.json()["said"]) == (200, "1 2")
    assert await field(db, answer.headers["x-request-id"], "state") == "finished"


async def test_a_streamed_answer_has_the_positions_as_ids_and_ends_with_done(http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json=request("1", " 2", stream=True))
    *chunks, done = data_of(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (text_of(chunks), done) == ("1 2", "[DONE]")
    assert [frame.get("id") for frame in frames_of(answer.text)] == ["0", "1", "2", "3", None]
    assert {chunk["id"] for chunk in chunks} == {answer.headers["x-request-id"]}
    assert frames_of(answer.text)[0]["retry"] == "500"


async def test_usage_comes_before_done_if_the_request_wants_it(http: httpx.AsyncClient) -> None:
    options = {"include_usage": True}
    *chunks, usage, _ = data_of((await http.post(PATH, json=request("1", stream=True, stream_options=options))).text)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 1)
    assert [chunk["usage"] for chunk in chunks] == [None] * 3


@pytest.mark.parametrize("last", range(4))
async def test_a_stream_continues_after_the_last_event_that_the_client_has(http: httpx.AsyncClient, last: int) -> None:
    first = await http.post(PATH, json=request("1", " 2", stream=True))
    path = f"{PATH}/{first.headers['x-request-id']}/stream"
    rest = await http.get(path, headers={"last-event-id": str(last)})
    assert data_of(rest.text) == data_of(first.text)[last + 1 :]


@pytest.mark.parametrize("last", ["zzz", "7.5", "-1"])
async def test_a_last_event_id_that_is_no_number_is_refused_by_name(http: httpx.AsyncClient, last: str) -> None:
    first = await http.post(PATH, json=request("1", stream=True))
    answer = await http.get(f"{PATH}/{first.headers['x-request-id']}/stream", headers={"last-event-id": last})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_nothing_but_the_end_follows_a_last_event_id_beyond_the_end(http: httpx.AsyncClient) -> None:
    first = await http.post(PATH, json=request("1", stream=True))
    answer = await http.get(f"{PATH}/{first.headers['x-request-id']}/stream", headers={"last-event-id": "999"})
    assert data_of(answer.text) == ["[DONE]"]


async def test_a_stream_of_an_unknown_job_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.get(f"{PATH}/chatcmpl-none/stream")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_job")


async def test_a_job_that_fails_after_its_first_text_ends_in_an_error_event_and_no_done(
    http: httpx.AsyncClient,
) -> None:
    *chunks, last = data_of((await http.post(PATH, json=request("1", then="Ouch.", stream=True))).text)
    assert text_of(chunks) == "1"
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "internal")


async def test_a_job_that_fails_is_an_error_with_a_status_if_nothing_was_streamed(http: httpx.AsyncClient) -> None:
    answer = await http.post(PATH, json=request(then="Ouch."))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert answer.headers["x-should-retry"] == "true"


async def test_a_cancelled_job_ends_its_stream_with_an_error(http: httpx.AsyncClient, chat: FakeChat) -> None:
    streaming = asyncio.create_task(http.post(PATH, json=request("1", then="hang", stream=True)))
    await until_running(chat, 1)
    outcome = await http.post(f"{PATH}/{chat.began[0]}/cancel")
    assert outcome.json() == {"id": chat.began[0], "outcome": "requested"}
    assert data_of((await streaming).text)[-1]["error"]["code"] == "cancelled"


# Clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_cancels_its_jobs(
    unforgiving: HttpGateway, chat: FakeChat, db: Redis, stream: bool, n: int
) -> None:
    async with httpx.AsyncClient(base_url=unforgiving.url) as http:
        asking = asyncio.create_task(http.post(PATH, json=request("1", then="hang", stream=stream, n=n)))
        await until_running(chat, n)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until_idle(chat)
    assert {await field(db, job_id, "state") for job_id in chat.began} <= {"running", "cancelled"}

    async def cancelled() -> bool:
        return {await field(db, job_id, "state") for job_id in chat.began} == {"cancelled"}

    await until(cancelled)


async def test_a_queued_job_of_a_client_that_leaves_is_cancelled(unforgiving: HttpGateway, db: Redis) -> None:
    await db.hset(keys.model("other"), "w", "9 1 9999999999 0 0")  # a worker that takes nothing
    async with httpx.AsyncClient(base_url=unforgiving.url) as http:
        asking = asyncio.create_task(http.post(PATH, json=request("1", model="other")))

        async def queued() -> bool:
            return bool(await db.exists(keys.queue("other", "interactive")))

        await until(queued)
        (job_id,) = await db.zrange(keys.queue("other", "interactive"), 0, -1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def cancelled() -> bool:
        return await field(db, job_id.decode(), "state") == "cancelled"

    await until(cancelled)


# Several choices


async def test_several_choices_are_as_many_jobs_with_indexes_and_one_id(
    http: httpx.AsyncClient, chat: FakeChat
) -> None:
    answer = await http.post(PATH, json=request("1", " 2", n=3, stream=True, stream_options={"include_usage": True}))
    *chunks, usage, done = data_of(answer.text)
    assert [text_of(chunks, index) for index in range(3)] == ["1 2"] * 3
    assert (done, usage["usage"]["completion_tokens"]) == ("[DONE]", 6)
    first = answer.headers["x-request-id"]
    assert sorted(chat.began) == [first, f"{first}.1", f"{first}.2"]
    assert {chunk["id"] for chunk in chunks} == {first}


async def test_a_stream_of_several_choices_continues_where_each_one_was(http: httpx.AsyncClient) -> None:
    first = await http.post(PATH, json=request("1", " 2", n=2, stream=True))
    position = frames_of(first.text)[4]["id"]
    path = f"{PATH}/{first.headers['x-request-id']}/stream"
    rest = await http.get(path, headers={"last-event-id": position})
    for index in range(2):
        everything = [*data_of(first.text)[:5], *data_of(rest.text)]
        assert text_of(everything, index) == "1 2"


@pytest.mark.parametrize("n", [0, 129, 1.5, "2", True])
async def test_a_number_of_choices_that_cannot_be_is_refused(http: httpx.AsyncClient, n: Any) -> None:
    answer = await http.post(PATH, json=request("1", n=n))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


# Idempotency-Key


@pytest.fixture
async def other(redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a second gateway."""
    settings = ServeSettings(_env_file=None, no_worker_s=0.5)
    with serving(redis_url, settings) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as client:
            yield client


async def test_a_retry_with_the_same_key_joins_its_job_on_another_gateway(
    http: httpx.AsyncClient, other: httpx.AsyncClient, chat: FakeChat
) -> None:
    body = request("1", " 2", " 3", pace_s=0.1, stream=True)
    answers = [await client.post(PATH, json=body, headers={"Idempotency-Key": "k"}) for client in (http, other)]
    assert data_of(answers[0].text) == data_of(answers[1].text)
    assert text_of(data_of(answers[0].text)) == "1 2 3"
    assert len(chat.began) == 1


async def test_the_same_key_with_another_body_is_refused(http: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    assert (await http.post(PATH, json=request("1"), headers=headers)).status_code == 200
    answer = await http.post(PATH, json=request("2"), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert (await http.post(PATH, json=request("2"), headers={"Idempotency-Key": "l"})).status_code == 200


async def test_a_keyed_job_continues_when_its_client_leaves(gateway: HttpGateway, chat: FakeChat) -> None:
    body, headers = request("1", " 2", " 3", pace_s=0.2), {"Idempotency-Key": "k"}
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        asking = asyncio.create_task(http.post(PATH, json=body, headers=headers))
        await until_running(chat, 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.post(PATH, json=body, headers=headers)).json()["said"] == "1 2 3"
    assert len(chat.began) == 1


async def test_a_refused_request_leaves_its_key_free_for_another_body(http: httpx.AsyncClient, db: Redis) -> None:
    headers = {"Idempotency-Key": "k"}
    assert (await http.post(PATH, json=request("1", model="nowhere"), headers=headers)).status_code == 404
    assert [key async for key in db.scan_iter("sluice:serve:key:*")] == []
    assert (await http.post(PATH, json=request("1"), headers=headers)).status_code == 200


async def test_a_retry_after_the_events_have_expired_gets_the_result_or_a_clear_refusal(
    http: httpx.AsyncClient, db: Redis, chat: FakeChat
) -> None:
    headers = {"Idempotency-Key": "k"}
    for stream, status in ((False, 200), (True, 410)):
        body = request("1", stream=stream)
        first = await http.post(PATH, json=body, headers=headers | {"Idempotency-Key": str(stream)})
        await db.delete(keys.log(first.headers["x-request-id"]))
        again = await http.post(PATH, json=body, headers=headers | {"Idempotency-Key": str(stream)})
        assert again.status_code == status
        if not stream:
            assert again.json() == first.json()
        else:
            assert again.json()["error"]["code"] == "answer_expired"
    assert len(chat.began) == 2


@pytest.mark.parametrize("path", [PATH, "/v1/messages"])
async def test_a_retry_after_its_answer_has_expired_is_refused_and_starts_nothing(
    http: httpx.AsyncClient, db: Redis, chat: FakeChat, path: str
) -> None:
    body = {"model": "default", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}], "stream": True}
    first = await http.post(path, json=body, headers={"Idempotency-Key": "k"})
    assert first.status_code == 200
    job_id = first.headers["x-request-id"]
    await db.delete(keys.log(job_id), keys.job(job_id), keys.result(job_id))
    again = await http.post(path, json=body, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.headers["x-should-retry"]) == (410, "false")
    assert len(chat.began) == 1


@pytest.mark.parametrize("key", ["", "k" * 256])
async def test_a_key_of_a_wrong_length_is_refused(http: httpx.AsyncClient, key: str) -> None:
    assert (await http.post(PATH, json=request("1"), headers={"Idempotency-Key": key})).status_code == 400


# Models without a worker


async def test_a_model_that_never_had_a_worker_does_not_exist(http: httpx.AsyncClient, db: Redis) -> None:
    answer = await http.post(PATH, json=request("1", model="gpt-9"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert answer.json()["error"]["param"] == "model"
    assert not await db.exists(keys.queue("gpt-9", "interactive"))


async def test_a_model_whose_workers_have_left_may_come_back(http: httpx.AsyncClient, db: Redis) -> None:
    await db.zadd("sluice:serve:models", {"gpt-9": 9999999999})
    answer = await http.post(PATH, json=request("1", model="gpt-9"))
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert not await db.exists(keys.queue("gpt-9", "interactive"))


async def test_a_job_whose_workers_leave_before_they_take_it_is_refused_and_cancelled(
    http: httpx.AsyncClient, db: Redis
) -> None:
    await db.hset(keys.model("gone"), "w", "9 1 9999999999 0 0")
    await db.expire(keys.model("gone"), 1)
    answer = await http.post(PATH, json=request("1", model="gone"))
    assert (answer.status_code, answer.headers["x-should-retry"]) == (503, "true")
    assert not await db.exists(keys.queue("gone", "interactive"))


# Bodies and paths


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"[1", 400), (b"[]", 400), (b"{\xff", 400), (b"[" * 200_000, 413), (b'{"a":' * 50_000, 400), (b"1e999", 400)],
)
async def test_a_body_that_is_no_object_is_refused(http: httpx.AsyncClient, content: bytes, status: int) -> None:
    answer = await http.post(PATH, content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("path", [PATH, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"])
async def test_a_body_that_is_nested_too_deep_is_refused_on_each_interface(http: httpx.AsyncClient, path: str) -> None:
    content = b'{"input": "Hi.", "metadata": ' + b"[" * 200 + b"]" * 200 + b"}"
    answer = await http.post(path, content=content)
    assert answer.status_code == 400
    assert "nested more than 100 levels" in answer.json()["error"]["message"]


async def test_a_request_that_is_refused_before_it_is_queued_cancels_nothing(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    abandoned = list[str]()
    monkeypatch.setattr(Jobs, "abandon", lambda _, job_ids: abandoned.extend(job_ids))
    answers = [
        await http.post(PATH, json=request("1", model="gpt-9", n=20)),
        await http.post("/v1/responses", json={"model": "gpt-9", "input": "Hi."}),
    ]
    assert [answer.status_code for answer in answers] == [404, 404]
    assert abandoned == []


async def test_a_long_body_is_refused_before_it_is_read(redis_url: str) -> None:
    with serving(redis_url, ServeSettings(_env_file=None, max_body_bytes=1000)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            assert (await http.post(PATH, json=request("1" * 1000))).status_code == 413


async def test_raw_prompts_are_refused_by_name(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "Hi."})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")


async def test_an_unknown_path_is_refused_in_openai_s_form(http: httpx.AsyncClient) -> None:
    answer = await http.get("/v1/nothing")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "invalid_request_error")


async def test_a_silent_stream_is_kept_open_by_comments(redis_url: str) -> None:
    with serving(redis_url, ServeSettings(_env_file=None, heartbeat_s=0.05)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            body = (await http.post(PATH, json=request("1", " 2", pace_s=0.3, stream=True))).text
    assert ": keep-alive\n" in body
    assert text_of(data_of(body)) == "1 2"


async def test_the_stream_of_an_unknown_job_is_404_at_once(http: httpx.AsyncClient, db: Redis) -> None:
    for path in (f"{PATH}/chatcmpl-{'0' * 32}/stream", f"{PATH}/nobody/stream"):
        started = time.monotonic()
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_job")
        assert time.monotonic() - started < 1


async def test_the_stream_of_a_job_whose_events_have_expired_is_410_at_once(http: httpx.AsyncClient, db: Redis) -> None:
    job = (await http.post(PATH, json=request("a"))).headers["x-request-id"]
    await db.delete(keys.log(job))
    started = time.monotonic()
    answer = await http.get(f"{PATH}/{job}/stream")
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "answer_expired")
    assert answer.json()["error"]["message"].endswith(f"get it at {PATH}/{job}.")
    assert time.monotonic() - started < 1
    assert (await http.get(f"{PATH}/{job}")).status_code == 200
