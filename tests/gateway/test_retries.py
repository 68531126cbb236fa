"""A request that is sent again after its connection was lost: it returns to the job that it has queued before."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from tests.fakes import FakeChat
from tests.gateway.gateways import HttpGateway, serving
from tests.queue.helpers import field
from tests.waiting import until

Said = dict[str, Any]

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
TALK: list[Said] = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, Said] = {
    CHAT: {"messages": TALK},
    MESSAGES: {"model": "default", "max_tokens": 9, "messages": TALK},
    RESPONSES: {"input": "Hi."},
}
LEFT = "sluice:serve:left:*"
WORDS: Said = {"say": [f" {k}" for k in range(30)], "pace_s": 0.05}  # 1.5 s, which fields of chat completions dictate

EACH = pytest.mark.parametrize("path", BODIES)


def given(path: str, **fields: Any) -> Said:
    return {**BODIES[path], **fields}


@asynccontextmanager
async def asked(
    gateway: HttpGateway, path: str, body: Said, **headers: str
) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """Send a request whose connection is lost at the end of the block."""
    async with httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60) as http:
        asking = asyncio.create_task(http.post(path, json=body))
        yield asking
        await asyncio.sleep(0.5)  # a client that leaves before the gateway knows that it has queued the job cancels it
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def noted(db: Redis, jobs: int) -> Callable[[], Awaitable[bool]]:
    """Return a check: so many answers wait for their clients."""

    async def check() -> bool:
        return sum([await db.hlen(key) for key in await db.keys(LEFT)]) == jobs

    return check


async def queued_jobs(db: Redis, jobs: int) -> list[str]:
    """Return the ids of so many jobs in the queue of the model `other`, the oldest first."""

    async def queued() -> bool:
        return bool(await db.zcard(keys.queue("other", "interactive")) == jobs)

    await until(queued)
    return [job_id.decode() for job_id in await db.zrange(keys.queue("other", "interactive"), 0, -1)]


@pytest.fixture
async def other(db: Redis) -> None:
    """A worker of the model `other` that takes nothing."""
    await db.hset(keys.model("other"), "w", "9 1 9999999999 0 0")


@EACH
@pytest.mark.parametrize("streams", [(True, False), pytest.param((True, True), marks=pytest.mark.slow)])
async def test_a_retry_keeps_the_place_of_its_job_in_the_queue(
    gateway: HttpGateway, db: Redis, other: None, path: str, streams: tuple[bool, bool]
) -> None:
    first, again = (given(path, model="other", stream=stream) for stream in streams)
    async with asked(gateway, path, first):
        (job_id,) = await queued_jobs(db, 1)
    await until(noted(db, 1))
    async with asked(gateway, CHAT, given(CHAT, model="other", user="another")):
        before = await queued_jobs(db, 2)
        async with asked(gateway, path, again):
            await until(noted(db, 0))
            await asyncio.sleep(4)  # beyond the grace
            assert await queued_jobs(db, 2) == before
            assert before[0] == job_id
            assert await field(db, job_id, "state") == "queued"


@pytest.mark.usefixtures("fake_worker")
async def test_a_retry_gets_the_answer_of_the_running_job_from_the_beginning(
    redis_url: str, gateway: HttpGateway, chat: FakeChat, db: Redis
) -> None:
    body = given(CHAT, **WORDS)
    async with asked(gateway, CHAT, {**body, "stream": True}):
        await until(lambda: bool(chat.running))
    await until(noted(db, 1))
    with serving(redis_url, ServeSettings(_env_file=None)) as second:
        async with httpx.AsyncClient(base_url=second.url, timeout=60) as http:
            reordered = dict(reversed(body.items()))
            answer = await http.post(CHAT, json=reordered)
    assert answer.json()["said"] == "".join(WORDS["say"])
    assert answer.headers["x-request-id"] == chat.began[0]
    assert len(chat.began) == 1


async def test_requests_whose_clients_wait_are_no_retries(gateway: HttpGateway, db: Redis, other: None) -> None:
    body = given(CHAT, model="other")
    async with asked(gateway, CHAT, body), asked(gateway, CHAT, body):
        assert len(set(await queued_jobs(db, 2))) == 2


async def test_each_of_several_retries_gets_a_job_of_its_own(gateway: HttpGateway, db: Redis, other: None) -> None:
    body = given(CHAT, model="other")
    async with asked(gateway, CHAT, body), asked(gateway, CHAT, body):
        before = await queued_jobs(db, 2)
    await until(noted(db, 2))
    async with asked(gateway, CHAT, body), asked(gateway, CHAT, body):
        await until(noted(db, 0))
        assert await queued_jobs(db, 2) == before
        async with asked(gateway, CHAT, body):
            assert len(await queued_jobs(db, 3)) == 3


@pytest.mark.usefixtures("fake_worker")
async def test_a_request_after_the_whole_answer_is_a_new_one(http: httpx.AsyncClient, chat: FakeChat) -> None:
    for stream in (True, False):
        body = given(CHAT, say=["1"], stream=stream)
        await http.post(CHAT, json=body)
    assert len(set(chat.began)) == 2


async def test_a_job_that_was_cancelled_meanwhile_is_not_returned_to(
    gateway: HttpGateway, db: Redis, other: None
) -> None:
    body = given(CHAT, model="other")
    async with asked(gateway, CHAT, body):
        (job_id,) = await queued_jobs(db, 1)
    await until(noted(db, 1))
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        await http.post(f"{CHAT}/{job_id}/cancel")
    async with asked(gateway, CHAT, body):
        assert await queued_jobs(db, 1) != [job_id]


async def test_the_job_of_another_tenant_is_not_found(redis_url: str, db: Redis, other: None, tmp_path: Path) -> None:
    entries = [{"id": secret, "sha256": key_digest(secret), "tenant": secret} for secret in ("ada", "bob")]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": entries}))
    body = given(CHAT, model="other")
    with serving(redis_url, ServeSettings(_env_file=None, keys=tmp_path / "keys.json")) as gateway:
        async with asked(gateway, CHAT, body, authorization="Bearer ada"):
            await queued_jobs(db, 1)
        await until(noted(db, 1))
        async with asked(gateway, CHAT, body, authorization="Bearer bob"):
            assert len(await queued_jobs(db, 2)) == 2
            assert await noted(db, 1)()


@pytest.mark.parametrize("grace_s", [0, 0.2])
async def test_without_a_retry_the_job_is_cancelled(redis_url: str, db: Redis, other: None, grace_s: float) -> None:
    with serving(redis_url, ServeSettings(_env_file=None, disconnect_grace_s=grace_s)) as gateway:
        async with asked(gateway, CHAT, given(CHAT, model="other")):
            (job_id,) = await queued_jobs(db, 1)

        async def cancelled() -> bool:
            return await field(db, job_id, "state") == "cancelled"

        await until(cancelled, within_s=2.5)  # less than the default
        assert await noted(db, 0)()
