"""What the requests of a key, and all together, may hold in a gateway's memory."""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from sluice.contract import keys as names
from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from sluice.gateway.protection import Memory
from sluice.interfaces.errors import ApiError
from tests.fakes import TIMINGS, FakeChat
from tests.gateway.gateways import HttpGateway, serving
from tests.queue.helpers import settings, working
from tests.waiting import until
from worker.queue.job.job import JobResult

COMPLETIONS = "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "x" * 300}], "say": ["1"]}


def test_a_key_holds_a_quarter_and_all_together_hold_the_limit() -> None:
    memory = Memory(400, longest=10)
    for key_id in ("a", "b", "c"):
        memory.hold(key_id).add(100)
    with pytest.raises(ApiError) as of_key:
        memory.hold("a").add(1)
    assert (of_key.value.form.status, of_key.value.form.code) == (429, "too_many_bytes")
    local = memory.hold(None)
    local.add(100)
    with pytest.raises(ApiError) as of_gateway:
        memory.hold("d").add(1)
    assert (of_gateway.value.form.status, of_gateway.value.form.code) == (503, "overloaded")
    assert {error.value.headers["retry-after"] for error in (of_key, of_gateway)} == {"1"}
    local.release()
    local.release()
    memory.hold("d").add(100)
    assert memory.total == 400


def test_a_key_may_hold_the_longest_text_however_small_its_share_is() -> None:
    Memory(100, longest=90).hold("a").add(90)


@pytest.fixture
def guarded(redis_url: str, fake_worker: None, tmp_path: Path) -> Iterator[HttpGateway]:
    entries = [{"id": secret, "sha256": key_digest(secret), "tenant": secret} for secret in ("ada", "bob")]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    keys = tmp_path / "keys.json"
    settings = ServeSettings(_env_file=None, keys=keys, max_body_bytes=1_000, max_held_bytes=1_600)
    with serving(redis_url, settings) as gateway:
        yield gateway


@asynccontextmanager
async def half_sent(gateway: HttpGateway, secret: str, length: int, announced: int) -> AsyncIterator[None]:
    """Hold a connection on which `length` bytes of a body have arrived."""
    url = httpx.URL(gateway.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {secret}\r\n"
    try:
        writer.write(f"{head}Content-Length: {announced}\r\n\r\n".encode() + b"{" * length)
        await writer.drain()
        yield
    finally:
        writer.close()


async def refused(http: httpx.AsyncClient, secret: str) -> tuple[int, str | None]:
    answer = await http.post(COMPLETIONS, json=CHAT, headers={"authorization": f"Bearer {secret}"})
    error = answer.json().get("error")
    assert not error or answer.headers["retry-after"] == "1"
    return answer.status_code, error and error["code"]


async def test_half_sent_bodies_count_for_their_key_and_for_the_gateway_until_they_are_left(
    guarded: HttpGateway,
) -> None:
    async with httpx.AsyncClient(base_url=guarded.url) as http, AsyncExitStack() as sending:

        async def is_full(secret: str, answer: tuple[int, str], length: int) -> bool:
            # A request that is being read when the half-sent one arrives can have that one refused: send another.
            await sending.enter_async_context(half_sent(guarded, secret, length, length + 100))
            return await refused(http, secret) == answer

        await until(lambda: is_full("ada", (429, "too_many_bytes"), 900))
        assert await refused(http, "bob") == (200, None)
        await until(lambda: is_full("bob", (503, "overloaded"), 500))
        await sending.aclose()

        async def all_is_free() -> bool:
            return [await refused(http, secret) for secret in ("ada", "bob")] == [(200, None)] * 2

        await until(all_is_free)


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that a gateway held after each change."""
    add, totals = Memory.add, list[int]()

    def recorded(memory: Memory, key_id: str | None, length: int) -> None:
        add(memory, key_id, length)
        totals.append(memory.total)

    monkeypatch.setattr(Memory, "add", recorded)
    return totals


async def test_a_body_is_not_held_while_its_answer_is_awaited(
    guarded: HttpGateway, chat: FakeChat, totals: list[int]
) -> None:
    headers = {"authorization": "Bearer ada"}
    waiting = {**CHAT, "then": "hang"}
    large = {**CHAT, "messages": [{"role": "user", "content": "x" * 800}]}
    async with httpx.AsyncClient(base_url=guarded.url, timeout=60) as http:
        asking = [
            asyncio.create_task(http.post(COMPLETIONS, json={**waiting, "stream": stream}, headers=headers))
            for stream in (False, True)
        ]
        await until(lambda: len(chat.running) == 2 and totals[-1] == 0)
        assert (await http.post(COMPLETIONS, json=large, headers=headers)).status_code == 200
        assert len(chat.running) == 2
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@pytest.mark.usefixtures("fake_worker")
async def test_each_choice_holds_the_body_once_until_it_is_queued(http: httpx.AsyncClient, totals: list[int]) -> None:
    content = json.dumps({**CHAT, "n": 3, "stream": True})
    assert (await http.post(COMPLETIONS, content=content)).status_code == 200
    await until(lambda: totals[-1] == 0)
    assert max(totals) == 3 * len(content)


@pytest.mark.usefixtures("fake_worker")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_retry_holds_the_answer_that_it_joins(
    http: httpx.AsyncClient, db: "redis.asyncio.Redis", totals: list[int], stream: bool
) -> None:
    body, headers = {**CHAT, "say": ["1", "2"], "stream": stream}, {"idempotency-key": "k"}
    job_id = (await http.post(COMPLETIONS, json=body, headers=headers)).headers["x-request-id"]
    await until(lambda: totals[-1] == 0)
    totals.clear()
    assert (await http.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
    await until(lambda: totals[-1] == 0)
    events = sum(map(len, await db.lrange(names.log(job_id), 0, -1)))
    stored = events if stream else await db.strlen(names.result(job_id))
    held = [after for before, after in pairwise([0, *totals]) if after != before]  # the end releases nothing again
    assert held[-3:] == [0, stored, 0]


@pytest.mark.usefixtures("fake_worker")
@pytest.mark.parametrize("stream", [True, False])
async def test_a_retried_message_holds_the_events_that_it_joins(
    http: httpx.AsyncClient, db: "redis.asyncio.Redis", totals: list[int], stream: bool
) -> None:
    message = {"model": "default", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}], "stream": stream}
    headers = {"idempotency-key": "k"}
    for _ in range(2):
        totals.clear()
        answer = await http.post("/v1/messages", json=message, headers=headers)
        assert answer.status_code == 200
        await until(lambda: totals[-1] == 0)
    assert sum(map(len, await db.lrange(names.log(answer.headers["request-id"]), 0, -1))) in totals


VECTOR = base64.b64encode(struct.pack("<300f", *[0.1] * 300)).decode()


@asynccontextmanager
async def embedding(redis_url: str) -> AsyncIterator[None]:
    """A worker whose answer is two vectors."""

    async def embed(ctx: dict[Any, Any], request: dict[str, Any]) -> JobResult:
        data = [{"object": "embedding", "index": index, "embedding": VECTOR} for index in range(2)]
        return JobResult("stop", TIMINGS, {"object": "list", "data": data, "usage": {"total_tokens": 2}})

    async with working(settings(redis_url), embed, embed=embed):
        yield


@pytest.mark.parametrize(("encoding", "factor"), [("base64", 1), ("float", 5)])
async def test_the_vectors_of_an_answer_are_held_until_it_is_sent(
    redis_url: str, http: httpx.AsyncClient, totals: list[int], encoding: str, factor: int
) -> None:
    async with embedding(redis_url):
        body, headers = {"input": ["a", "b"], "encoding_format": encoding}, {"idempotency-key": "k"}
        for _ in range(2):  # a retry, too
            totals.clear()
            answer = await http.post("/v1/embeddings", json=body, headers=headers)
            assert (answer.status_code, len(answer.json()["data"])) == (200, 2)
            await until(lambda: totals[-1] == 0)
            held = [after for before, after in pairwise([0, *totals]) if after != before]
            assert held[-2:] == [2 * len(VECTOR) * factor, 0]


async def test_an_answer_that_can_never_be_held_is_not_to_be_asked_for_again(redis_url: str) -> None:
    given = ServeSettings(_env_file=None, max_body_bytes=1_000, max_held_bytes=10 * len(VECTOR) - 1)
    async with embedding(redis_url):
        with serving(redis_url, given) as gateway:
            async with httpx.AsyncClient(base_url=gateway.url) as http:
                answers = {
                    encoding: await http.post("/v1/embeddings", json={"input": ["a", "b"], "encoding_format": encoding})
                    for encoding in ("float", "base64")
                }
    assert [each.status_code for each in answers.values()] == [400, 200]
    assert answers["float"].headers["x-should-retry"] == "false"
    assert "base64" in answers["float"].json()["error"]["message"]
