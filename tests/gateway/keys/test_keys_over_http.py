"""Keys and limits as clients meet them: over HTTP, from one gateway or two."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from sluice import Client, QueueFull
from sluice.gateway import ServeSettings
from sluice.gateway.caller import reservation_key
from sluice.gateway.key_file import key_digest
from tests.fakes import FakeChat
from tests.gateway.gateways import serving
from tests.waiting import until
from worker.errors import JobFailure
from worker.queue.job.job import JobResult

pytestmark = pytest.mark.usefixtures("fake_worker")

KEYS: dict[str, dict[str, Any]] = {
    "acme-key": {"tenant": "acme"},
    "rival-key": {"tenant": "rival"},
    "slow-key": {"tenant": "slow", "requests_per_minute": 2, "tokens_per_minute": 100_000},
    "small-key": {"tenant": "small", "tokens_per_minute": 3_000},
    "narrow-key": {"tenant": "narrow", "models": ["other"], "lanes": ["interactive"]},
    "old-key": {"tenant": "old", "expires": "2020-01-01T00:00:00Z"},
}
CHAT = {"messages": [{"role": "user", "content": "Hi."}], "say": ["1", " 2"]}
COMPLETIONS = "/v1/chat/completions"
TOO_LARGE = "too_large"


class CountingChat(FakeChat):
    """Reports the tokens of an answer in its result, as a worker does, and one choice. `then` may be `TOO_LARGE`."""

    async def chat(self, ctx: dict[Any, Any], request: dict[str, Any]) -> JobResult:
        try:
            done = await super().chat(ctx, request)
        except ValueError:
            if request["then"] == TOO_LARGE:
                raise JobFailure("too_large", "It is too long.") from None
            raise
        tokens = ctx["job"].usage.completion_tokens
        done.result["usage"] = {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}
        done.result["choices"] = [{"index": 0, "finish_reason": "stop"}]
        return done


@pytest.fixture
def chat() -> FakeChat:
    return CountingChat()


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    entries = [{"id": secret, "sha256": key_digest(secret), **fields} for secret, fields in KEYS.items()]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    return tmp_path / "keys.json"


@asynccontextmanager
async def gateway(redis_url: str, key_file: Path, **fields: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = ServeSettings(_env_file=None, no_worker_s=0.5, keys=key_file, **fields)
    with serving(redis_url, settings) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            yield http


@pytest.fixture
async def guarded(redis_url: str, key_file: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway(redis_url, key_file) as http:
        yield http


async def ask(http: httpx.AsyncClient, secret: str, **fields: Any) -> httpx.Response:
    return await http.post(COMPLETIONS, json={**CHAT, **fields}, headers={"authorization": f"Bearer {secret}"})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer"},
        {"authorization": "Basic acme-key"},
        {"authorization": "acme-key"},
        {"authorization": "Bearer old-key"},
        {"x-api-key": "wrong"},
    ],
)
async def test_a_wrong_key_is_401(guarded: httpx.AsyncClient, headers: dict[str, str]) -> None:
    answer = await guarded.post(COMPLETIONS, json=CHAT, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("headers", [{"authorization": "bearer  acme-key"}, {"x-api-key": "acme-key"}])
async def test_a_key_sets_the_tenant_of_its_jobs(
    guarded: httpx.AsyncClient, db: "redis.asyncio.Redis", headers: dict[str, str]
) -> None:
    answer = await guarded.post(COMPLETIONS, json={**CHAT, "tenant": "rival"}, headers=headers)
    assert answer.status_code == 200
    assert await db.hget(f"sluice:job:{answer.headers['x-request-id']}", "tenant") == b"acme"  # type: ignore[misc]


async def test_a_model_and_a_lane_that_the_key_does_not_have_are_refused(guarded: httpx.AsyncClient) -> None:
    assert (await ask(guarded, "narrow-key", model="default")).json()["error"]["code"] == "model_not_found"
    unnamed = (await ask(guarded, "narrow-key", model=None)).json()["error"]
    assert (unnamed["code"], unnamed["param"]) == ("missing_required_parameter", "model")
    refused = await ask(guarded, "narrow-key", model="other", service_tier="flex")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "lane_not_allowed")


async def test_a_key_s_model_without_a_worker_does_not_exist_if_its_key_may_use_no_other(
    guarded: httpx.AsyncClient,
) -> None:
    refused = await ask(guarded, "narrow-key", model="other")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    ("path", "body", "unknown"),
    [
        (COMPLETIONS, CHAT, f"chatcmpl-{'0' * 32}"),
        (COMPLETIONS, {**CHAT, "n": 2}, f"chatcmpl-{'0' * 32}-n2"),
        ("/v1/messages", {"messages": CHAT["messages"], "model": "default", "max_tokens": 9}, f"msg_{'0' * 32}"),
    ],
)
@pytest.mark.parametrize(("method", "route"), [("GET", ""), ("GET", "/stream"), ("POST", "/cancel")])
async def test_another_tenant_s_answer_is_refused_as_one_that_does_not_exist(
    guarded: httpx.AsyncClient, path: str, body: dict[str, Any], unknown: str, method: str, route: str
) -> None:
    made = (await guarded.post(path, json=body, headers=bearer("acme-key"))).headers["x-request-id"]
    assert len(made) == len(unknown)
    refused, absent = [
        await guarded.request(method, f"{COMPLETIONS}/{id}{route}", headers=bearer("rival-key"))
        for id in (made, unknown)
    ]
    assert (refused.status_code, absent.status_code) == (404, 404)
    assert refused.text.replace(made, unknown) == absent.text
    assert refused.headers.keys() == absent.headers.keys()
    own = await guarded.request(method, f"{COMPLETIONS}/{made}{route}", headers=bearer("acme-key"))
    assert own.status_code == 200


async def test_the_same_idempotency_key_of_two_tenants_is_two_jobs(guarded: httpx.AsyncClient, chat: FakeChat) -> None:
    for secret in ("acme-key", "rival-key", "acme-key"):
        answer = await guarded.post(COMPLETIONS, json=CHAT, headers={**bearer(secret), "idempotency-key": "k"})
        assert answer.status_code == 200
    assert len(chat.began) == len({*chat.began}) == 2


async def test_a_limit_holds_across_two_gateways_and_its_headers_count_down(redis_url: str, key_file: Path) -> None:
    async with gateway(redis_url, key_file) as one, gateway(redis_url, key_file) as two:
        answers = [
            await ask(http, "slow-key", stream=stream) for http, stream in ((one, False), (two, True), (one, False))
        ]
    assert [each.status_code for each in answers] == [200, 200, 429]
    assert [each.headers["x-ratelimit-remaining-requests"] for each in answers] == ["1", "0", "0"]
    assert {each.headers["x-ratelimit-limit-tokens"] for each in answers} == {"100000"}
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_tokens_that_were_not_used_come_back_at_the_end(
    guarded: httpx.AsyncClient, db: "redis.asyncio.Redis", stream: bool
) -> None:
    for _ in range(4):  # by the estimates three would be too many: 1,024 of an answer without a limit
        answer = await ask(guarded, "small-key", stream=stream, say=["x"] * 300)
        assert answer.status_code == 200

        async def settled(reservation: str = reservation_key(answer.headers["x-request-id"])) -> bool:
            return await db.get(reservation) == b"settled"

        await until(settled)
    # What was used comes back within 24 s, at 50 tokens a second.
    assert (await ask(guarded, "small-key", max_tokens=3_001)).status_code == 429


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("then", "used"),
    [("It broke.", 300), ("hang", 300), (TOO_LARGE, 0)],
)
async def test_a_job_that_does_not_finish_is_settled_by_its_usage_and_a_refused_one_by_none(
    guarded: httpx.AsyncClient, db: "redis.asyncio.Redis", chat: FakeChat, stream: bool, then: str, used: int
) -> None:
    asking = asyncio.create_task(ask(guarded, "small-key", stream=stream, say=["x"] * 300, then=then))
    if then == "hang":
        await until(lambda: bool(chat.running) and chat.running[0].usage.completion_tokens == 300)
        await guarded.post(f"{COMPLETIONS}/{chat.began[0]}/cancel", headers=bearer("small-key"))
    await asking
    assert await db.get(reservation_key(chat.began[0])) == b"settled"
    left = int((await guarded.get("/v1/models", headers=bearer("small-key"))).headers["x-ratelimit-remaining-tokens"])
    assert 3_000 - used <= left < 3_000 - used + 300


async def test_a_request_that_was_not_queued_costs_no_tokens(guarded: httpx.AsyncClient) -> None:
    for _ in range(3):
        assert (await ask(guarded, "small-key", model="nowhere")).status_code == 404
    assert (await ask(guarded, "small-key", max_tokens=2_900)).status_code == 200


async def test_connections_of_a_key_are_limited_and_freed(redis_url: str, key_file: Path) -> None:
    async with gateway(redis_url, key_file, max_connections_per_key=1) as http:
        bearer = {"authorization": "Bearer acme-key"}
        body = {**CHAT, "stream": True, "say": ["x"] * 100, "pace_s": 0.02}
        async with http.stream("POST", COMPLETIONS, json=body, headers=bearer) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            refused = await ask(http, "acme-key")
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_connections")
            assert (await ask(http, "rival-key")).status_code == 200
            async for _ in lines:
                pass

        async def is_freed() -> bool:
            return (await ask(http, "acme-key")).status_code == 200

        await until(is_freed)


async def test_a_gateway_with_keys_answers_without_them_nowhere(guarded: httpx.AsyncClient) -> None:
    paths = (await guarded.get("/openapi.json")).json()["paths"]
    operations = [(method, path) for path in paths if path.startswith("/v1/") for method in paths[path]]
    assert ("post", "/v1/completions") in operations
    for method, path in operations:
        answer = await guarded.request(method, re.sub(r"\{\w+\}", "x", path), json=CHAT)
        assert (method, path, answer.status_code) == (method, path, 401)


async def test_without_keys_no_header_about_limits_is_sent(redis_url: str) -> None:
    with serving(redis_url, ServeSettings(_env_file=None)) as gateway:
        async with httpx.AsyncClient() as http:
            answer = await http.post(gateway.url + COMPLETIONS, json=CHAT)
    assert answer.status_code == 200
    assert not [name for name in answer.headers if "ratelimit" in name]


async def test_each_choice_is_a_connection_and_a_request_of_its_key(redis_url: str, key_file: Path) -> None:
    async with gateway(redis_url, key_file, max_connections_per_key=3) as http:
        refused = await ask(http, "acme-key", n=4)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_connections")
        assert (await ask(http, "acme-key", n=3, stream=True)).status_code == 200

        async def all_are_freed() -> bool:
            return (await ask(http, "acme-key", n=3, stream=True)).status_code == 200

        await until(all_are_freed)
        refused = await ask(http, "slow-key", n=3)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        answer = await ask(http, "slow-key", n=2, stream=True)
    assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (200, "0")


async def test_cancelling_an_answer_of_many_choices_takes_one_connection(redis_url: str, key_file: Path) -> None:
    async with gateway(redis_url, key_file, max_connections_per_key=3) as http:
        path = f"{COMPLETIONS}/{(await ask(http, 'acme-key', n=3)).headers['x-request-id']}"
        body = {**CHAT, "stream": True, "then": "hang"}
        async with http.stream("POST", COMPLETIONS, json=body, headers=bearer("acme-key")) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            cancelled = await http.post(f"{path}/cancel", headers=bearer("acme-key"))
            read = [await http.get(f"{path}{route}", headers=bearer("acme-key")) for route in ("", "/stream")]
    assert (cancelled.status_code, cancelled.json()["outcome"]) == (200, "ended")
    assert [each.status_code for each in read] == [429, 429]


async def test_choices_that_the_limit_does_not_hold_cost_nothing(guarded: httpx.AsyncClient) -> None:
    assert (await ask(guarded, "slow-key")).status_code == 200
    assert (await ask(guarded, "slow-key", n=2)).status_code == 429
    assert (await ask(guarded, "slow-key")).status_code == 200


async def test_choices_that_were_queued_before_others_were_refused_keep_their_reservations(
    guarded: httpx.AsyncClient, db: "redis.asyncio.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, submitted = Client.submit, list[str]()

    async def only_one(client: Client, *positional: Any, id: str, **named: Any) -> Any:
        submitted.append(id)
        if len(submitted) > 1:
            raise QueueFull(8, 8, 1.0)
        return await submit(client, *positional, id=id, **named)

    monkeypatch.setattr(Client, "submit", only_one)
    headers = {"authorization": "Bearer small-key", "idempotency-key": "k"}
    refused = await guarded.post(COMPLETIONS, json={**CHAT, "n": 3, "max_tokens": 10}, headers=headers)
    assert refused.status_code == 503
    reserved = [id for id in submitted if await db.exists(reservation_key(id))]
    assert reserved == submitted[:1]


async def test_retrieving_an_answer_counts_as_a_request(guarded: httpx.AsyncClient) -> None:
    made = await ask(guarded, "slow-key")
    path, headers = f"{COMPLETIONS}/{made.headers['x-request-id']}", {"authorization": "Bearer slow-key"}
    answers = [await guarded.get(path, headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert (await guarded.post(f"{path}/cancel", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "", 429), ("GET", "/input_items", 429), ("POST", "/cancel", 200), ("DELETE", "", 200)],
)
async def test_a_response_can_be_cancelled_and_deleted_beyond_the_limit_and_all_is_in_the_metrics(
    guarded: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    headers = {"authorization": "Bearer slow-key"}
    first = await guarded.post("/v1/responses", json={"input": "Hi."}, headers=headers)
    second = await guarded.post("/v1/responses", json={"input": "Hi."}, headers=headers)
    assert second.status_code == 200
    assert (await guarded.post("/v1/responses", json={"input": "Hi."}, headers=headers)).status_code == 429
    done = await guarded.request(method, f"/v1/responses/{first.json()['id']}{path}", headers=headers)
    assert done.status_code == status
    counted = f'http_requests_total{{handler="/v1/responses/{{id}}{path}",method="{method}",status="{status}"}} 1.0'

    async def is_counted() -> bool:
        return counted in (await guarded.get("/metrics")).text

    await until(is_counted)


async def test_a_request_beyond_a_limit_leaves_its_idempotency_key_free(
    guarded: httpx.AsyncClient, db: "redis.asyncio.Redis"
) -> None:
    headers = {"authorization": "Bearer slow-key", "idempotency-key": "k"}
    answers = [await ask(guarded, "slow-key"), await ask(guarded, "slow-key")]
    answers.append(await guarded.post(COMPLETIONS, json=CHAT, headers=headers))
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [key async for key in db.scan_iter("sluice:serve:key:*")] == []
