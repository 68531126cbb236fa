"""Submission by the gateway, when its client leaves, the server refuses, or another request has the same key."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice import Client, QueueFull
from sluice.contract import keys
from sluice.gateway import ServeSettings
from sluice.gateway.gateway import Gateway
from sluice.gateway.responses.history import record_key
from tests.gateway.gateways import HttpGateway, serving
from tests.line import Line
from tests.queue.helpers import field
from tests.waiting import until

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
MODEL = "other"  # with a worker that takes nothing
HELLO = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": HELLO},
    RESPONSES: {"model": MODEL, "input": "Hi.", "background": True},
    MESSAGES: {"model": MODEL, "max_tokens": 9, "messages": HELLO},
}
QUEUE = keys.queue(MODEL, "interactive")


@pytest.fixture(autouse=True)
async def _idle_worker(db: Redis) -> None:
    await db.hset(keys.model(MODEL), "w", "9 1 9999999999 0 0")


@pytest.fixture
def submitting(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the submissions of a gateway, each of which takes a while."""
    submit, ids = Client.submit, list[str]()

    async def slow(client: Client, *positional: Any, id: str, **named: Any) -> Any:
        ids.append(id)
        await asyncio.sleep(0.3)
        return await submit(client, *positional, id=id, **named)

    monkeypatch.setattr(Client, "submit", slow)
    return ids


async def leave_while_submitting(gateway: HttpGateway, path: str, ids: list[str], **headers: str) -> str:
    """Send a request, leave while its job is being submitted, and return the id of the job."""
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        asking = asyncio.create_task(http.post(path, json=BODIES[path], headers=headers))
        await until(lambda: bool(ids))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    return ids[0]


async def until_state(db: Redis, job_id: str, state: str) -> None:
    async def reached() -> bool:
        return await field(db, job_id, "state") == state

    await until(reached)


@pytest.mark.parametrize("path", BODIES)
async def test_a_job_that_is_being_submitted_when_its_client_leaves_is_cancelled(
    gateway: HttpGateway, db: Redis, submitting: list[str], path: str
) -> None:
    job_id = await leave_while_submitting(gateway, path, submitting)
    await until_state(db, job_id, "cancelled")
    assert await db.zcard(QUEUE) == 0


@pytest.mark.parametrize("path", BODIES)
async def test_with_a_key_it_continues_and_a_retry_joins_it(
    gateway: HttpGateway, db: Redis, submitting: list[str], path: str
) -> None:
    job_id = await leave_while_submitting(gateway, path, submitting, **{"idempotency-key": "k"})
    await until_state(db, job_id, "queued")
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        asking = asyncio.create_task(http.post(path, json=BODIES[path], headers={"idempotency-key": "k"}))
        await until(lambda: len(submitting) == 2)
        await asyncio.sleep(0.5)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert submitting == [job_id] * 2
    assert (await field(db, job_id, "state"), await db.zcard(QUEUE)) == ("queued", 1)


@pytest.mark.parametrize(("given", "stored"), [("", ""), (None, "cancel"), ("continue", "continue")])
async def test_a_policy_that_is_given_reaches_the_worker_also_if_it_is_none(
    gateway: HttpGateway, db: Redis, given: str | None, stored: str
) -> None:
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        asking = asyncio.create_task(http.post(CHAT, json={**BODIES[CHAT], "on_disconnect": given}))
        while not (queued := await db.zrange(QUEUE, 0, -1)):
            await asyncio.sleep(0.01)
        body = json.loads(await db.get(b"arq:job:" + queued[0]))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    assert body["a"][0]["on_disconnect"] == stored


@pytest.mark.usefixtures("fake_worker")
async def test_a_model_that_cannot_be_noted_for_other_gateways_fails_no_request(
    http: httpx.AsyncClient, db: Redis
) -> None:
    await db.set("sluice:serve:models", "no sorted set")
    answers = [await http.post(CHAT, json={"messages": HELLO, "say": ["1"]}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    await db.delete("sluice:serve:models")
    assert (await http.post(CHAT, json={"messages": HELLO, "say": ["1"]})).status_code == 200

    async def noted() -> bool:
        return await db.zscore("sluice:serve:models", "default") is not None

    await until(noted)


@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "k"}])
@pytest.mark.parametrize("path", BODIES)
async def test_a_server_out_of_memory_is_overloaded_and_nothing_is_queued(
    http: httpx.AsyncClient, db: Redis, path: str, headers: dict[str, str]
) -> None:
    await db.config_set("maxmemory", 1)
    try:
        answer = await http.post(path, json=BODIES[path], headers=headers)
    finally:
        await db.config_set("maxmemory", 0)
    assert answer.status_code == (529 if path == MESSAGES else 503)  # Anthropic's status for it, and OpenAI's
    assert (answer.headers["x-should-retry"], answer.headers["retry-after"]) == ("true", "5")
    assert await db.zcard(QUEUE) == 0


def names_of(job_id: str) -> list[str]:
    """The keys of a response and of its job."""
    return [record_key(job_id), keys.job(job_id), keys.body(job_id)]


async def names_of_all(db: Redis) -> list[bytes]:
    """The keys of all responses, jobs and Idempotency-Keys, in order."""
    patterns = ("sluice:serve:response:*", "sluice:serve:key:*", keys.job("*"), keys.body("*"))
    return sorted([key for pattern in patterns for key in await db.keys(pattern)])


async def test_a_response_and_its_job_are_stored_in_one_step(
    http: httpx.AsyncClient, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, before = Client.submit, list[int]()

    async def counted(client: Client, *positional: Any, id: str, **named: Any) -> Any:
        before.append(await client.redis.exists(*names_of(id)))
        return await submit(client, *positional, id=id, **named)

    monkeypatch.setattr(Client, "submit", counted)
    made = await http.post(RESPONSES, json=BODIES[RESPONSES])
    assert (made.status_code, before) == (200, [0])
    assert await db.exists(*names_of(made.json()["id"])) == 3
    assert 86_000 < await db.ttl(record_key(made.json()["id"])) <= 86_400


@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
async def test_a_response_that_is_refused_leaves_neither_record_nor_job(
    http: httpx.AsyncClient, db: Redis, key: dict[str, str]
) -> None:
    await db.hset(keys.model(MODEL), "w", "1 1 9999999999 0 0")  # its queue has room for one job
    assert (await http.post(RESPONSES, json=BODIES[RESPONSES])).status_code == 200
    before = await names_of_all(db)
    refused = await http.post(RESPONSES, json=BODIES[RESPONSES], headers=key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert await names_of_all(db) == before


async def test_a_response_whose_submission_is_lost_on_the_way_leaves_neither_record_nor_job(
    redis_url: str, db: Redis
) -> None:
    async with Line(redis_url) as line:
        with serving(line.url, ServeSettings(_env_file=None)) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
                made = await http.post(RESPONSES, json=BODIES[RESPONSES])
                await until_state(db, made.json()["id"], "queued")
                before = await names_of_all(db)
                line.down()
                lost = await http.post(RESPONSES, json=BODIES[RESPONSES])
                line.up()
    assert lost.status_code == 503
    assert await names_of_all(db) == before


async def test_a_submission_whose_answer_is_lost_is_repeated_and_stores_one_response(redis_url: str, db: Redis) -> None:
    async with Line(redis_url) as line:
        with serving(line.url, ServeSettings(_env_file=None)) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
                assert (await http.post(RESPONSES, json=BODIES[RESPONSES])).status_code == 200
                line.loses = lambda: line.lost == 0
                made = await http.post(RESPONSES, json=BODIES[RESPONSES])
    assert (made.status_code, line.lost) == (200, 1)
    assert await db.zcard(QUEUE) == 2
    assert len([key async for key in db.scan_iter("sluice:serve:response:*")]) == 2
    assert await db.exists(*names_of(made.json()["id"])) == 3


async def test_a_refused_request_leaves_the_record_of_another_with_its_key(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = Client.submit, list[str]()

    async def first_is_refused(client: Client, *positional: Any, id: str, **named: Any) -> Any:
        calls.append(id)
        if len(calls) == 1:
            await until(lambda: len(calls) == 2)
            raise QueueFull(8, 8, 1.0)
        await asyncio.sleep(0.2)  # the other request is refused meanwhile
        return await submit(client, *positional, id=id, **named)

    monkeypatch.setattr(Client, "submit", first_is_refused)
    headers = {"idempotency-key": "k"}
    answers = await asyncio.gather(*(http.post(RESPONSES, json=BODIES[RESPONSES], headers=headers) for _ in range(2)))
    assert sorted(answer.status_code for answer in answers) == [200, 503]
    found = await http.get(f"{RESPONSES}/{calls[0]}")
    assert (found.status_code, found.json()["status"]) == (200, "queued")


# Several versions of the gateway


@pytest.mark.usefixtures("fake_worker")
@pytest.mark.parametrize("claim", ["2 {digest}", "2 {digest} queued", "{digest}", "{digest} queued", "\xff", ""])
async def test_a_key_that_another_version_has_claimed_is_409_and_may_be_tried_again(
    http: httpx.AsyncClient, db: Redis, claim: str
) -> None:
    body, headers = {"messages": HELLO, "say": ["1"]}, {"idempotency-key": "k"}
    first = await http.post(CHAT, json=body, headers=headers)
    name = f"sluice:serve:key:{first.headers['x-request-id']}"

    async def is_queued() -> bool:
        return (await db.get(name)).split()[-1] == b"queued"

    await until(is_queued)
    version, digest, _ = (await db.get(name)).decode().split()
    assert (version, len(digest)) == ("1", 64)
    await db.set(name, claim.format(digest=digest))
    again = await http.post(CHAT, json=body, headers=headers)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "idempotency_key_in_use")
    assert (again.headers["x-should-retry"], again.headers["retry-after"]) == ("true", "1")


async def test_a_response_of_another_version_is_absent_and_its_key_is_in_use(
    http: httpx.AsyncClient, db: Redis
) -> None:
    headers = {"idempotency-key": "k"}
    made = await http.post(RESPONSES, json=BODIES[RESPONSES], headers=headers)
    record = f"sluice:serve:response:{made.json()['id']}"
    await db.set(record, json.dumps({**json.loads(await db.get(record)), "version": 2}))
    found = await http.get(f"{RESPONSES}/{made.json()['id']}")
    continued = await http.post(RESPONSES, json={**BODIES[RESPONSES], "previous_response_id": made.json()["id"]})
    again = await http.post(RESPONSES, json=BODIES[RESPONSES], headers=headers)
    assert [found.status_code, continued.status_code, again.status_code] == [404, 404, 409]
    assert again.json()["error"]["code"] == "idempotency_key_in_use"


@pytest.mark.parametrize(
    ("report", "served"),
    [("9 1 9999999999 0 0", True), ("draining 1 9999999999 0 0", False), ("9 1 1000000000 0 0", False), ("", False)],
)
async def test_a_model_is_served_while_a_worker_of_it_takes_jobs(
    db: Redis, client: Client, report: str, served: bool
) -> None:
    await db.hset(keys.model(MODEL), "w", report)
    assert await Gateway(client, ServeSettings(_env_file=None)).workers.is_served(MODEL) == served
