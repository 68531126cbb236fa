"""Models on two servers: each job is on its model's, an id finds it again, and a dead server takes its models alone."""

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from redis.asyncio import Redis

from sluice import MappedClient, NoWorker, ServerUnreachable, SyncClient, UnknownJob
from sluice.contract import keys
from sluice.contract.redis_url import MapFile
from sluice.gateway import ServeSettings
from sluice.gateway.key_file import key_digest
from sluice.webhooks.deliverer import deliver
from sluice.webhooks.endpoint import Endpoint
from sluice.webhooks.store import WebhookStore
from tests.client.streaming import HELLO
from tests.fakes import FakeChat
from tests.gateway.gateways import events, serving
from tests.queue.helpers import settings, working
from tests.support.stack import Server
from tests.waiting import until
from tests.webhooks.receiver import receiving

BOTH = ("big", "small")
SAY = {"messages": HELLO, "say": ["a", "b"]}
HANG = {"messages": HELLO, "say": ["a"], "then": "hang"}


@pytest.fixture
def second() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def file(redis_url: str, second: Server, tmp_path: Path) -> Path:
    """A map: `small`, and all that is not named, on the test's server, `big` on the second."""
    path = tmp_path / "servers.toml"
    path.write_text(f'default = "{redis_url}"\n[models]\nbig = "{second.url}"\n')
    return path


@pytest.fixture
async def mapped(file: Path) -> AsyncIterator[MappedClient]:
    async with MappedClient(file, outage_s=0.5) as client:
        yield client


@pytest.fixture
async def served(mapped: MappedClient, redis_url: str, second: Server) -> AsyncIterator[FakeChat]:
    """A worker for each model, on its server."""
    chat = FakeChat()
    async with AsyncExitStack() as stack:
        for model, url in zip(BOTH, (second.url, redis_url), strict=True):
            given = settings(url, model_name=model, worker_name=f"of-{model}")
            await stack.enter_async_context(working(given, chat.chat))

        async def are_alive() -> bool:
            return len(await mapped.workers()) == len(BOTH)

        await until(are_alive)
        yield chat


@pytest.fixture
async def db2(second: Server) -> AsyncIterator[Redis]:
    async with Redis.from_url(second.url) as client:
        yield client


@pytest.mark.usefixtures("served")
async def test_jobs_of_two_models_are_on_their_servers_and_end(mapped: MappedClient, db: Redis, db2: Redis) -> None:
    for model in BOTH:
        assert (await mapped.submit(SAY, model=model, id=f"job-{model}")).served
    for model in BOTH:
        assert (await mapped.result(f"job-{model}"))["said"] == "ab"
        assert [event.type async for event in mapped.stream(f"job-{model}")][-1] == "finished"
        assert await mapped.state(f"job-{model}") == "finished"
    assert [await db.exists(keys.job(f"job-{model}")) for model in BOTH] == [0, 1]
    assert [await db2.exists(keys.job(f"job-{model}")) for model in BOTH] == [1, 0]


async def test_another_client_finds_jobs_by_their_ids(file: Path, mapped: MappedClient, served: FakeChat) -> None:
    for model in BOTH:
        await mapped.submit(HANG, model=model, id=f"job-{model}")
    async with MappedClient(file) as other:
        for model in BOTH:
            stream = other.stream(f"job-{model}")
            assert [(await anext(stream)).type for _ in range(2)] == ["started", "delta"]
            assert await other.state(f"job-{model}") == "running"
            assert await other.cancel(f"job-{model}") == "requested"
            assert [event.type async for event in stream] == ["cancelled"]
            assert await other.cancel(f"job-{model}") == "ended"


async def test_a_waiting_job_is_cancelled_on_its_server(file: Path, mapped: MappedClient) -> None:
    await mapped.submit(SAY, model="big", id="a")
    async with MappedClient(file) as other:
        assert (await other.waits_for("a"), await other.cancel("a")) == ("big", "cancelled")


async def test_a_stream_may_begin_before_its_job(mapped: MappedClient, served: FakeChat) -> None:
    stream = asyncio.create_task(anext(mapped.stream("late")))
    await asyncio.sleep(0.3)
    await mapped.submit(SAY, model="big", id="late")
    assert (await stream).type == "started"


async def test_a_job_that_no_server_knows_is_unknown(mapped: MappedClient) -> None:
    with pytest.raises(UnknownJob):
        await anext(mapped.stream("nobody", unknown_s=0))
    assert (await mapped.state("nobody"), await mapped.waits_for("nobody")) == (None, None)


async def test_a_cancellation_that_comes_first_holds_on_every_server(mapped: MappedClient, db: Redis) -> None:
    assert await mapped.cancel("early") == "requested"
    for model in BOTH:
        assert await mapped.of_model(model).redis.exists(keys.cancel("early"))


@pytest.mark.usefixtures("served")
async def test_lists_are_those_of_all_servers(mapped: MappedClient) -> None:
    for model in (*BOTH, "unserved"):
        await mapped.submit(HANG, model=model)
    assert {worker["model"] for worker in await mapped.workers()} == await mapped.served_models() == {*BOTH}
    assert [(queue.model, queue.workers) for queue in await mapped.queues()] == [
        ("big", 1), ("small", 1), ("unserved", 0),
    ]  # fmt: skip
    assert [head.model for head in await mapped.queue_heads()] == ["big", "small", "unserved"]
    assert [await mapped.queued(model, "interactive") for model in BOTH] == [1, 1]
    assert await mapped.purge("unserved", "interactive") == 1
    with pytest.raises(NoWorker) as refused:
        await mapped.submit(SAY, model="unserved", wait_worker_s=0)
    assert refused.value.served == BOTH


async def test_a_queue_on_the_wrong_server_is_named(mapped: MappedClient, db: Redis) -> None:
    await db.zadd(keys.queue("big", "batch"), {"a": 1})
    assert await mapped.queues() == []
    assert [(found.key, found.jobs) for found in await mapped.misplaced_jobs()] == [(keys.queue("big", "batch"), 1)]


async def test_a_dead_server_takes_its_models_alone(
    file: Path, mapped: MappedClient, served: FakeChat, second: Server
) -> None:
    await mapped.submit(SAY, model="small", id="kept")
    second.kill()
    with pytest.raises(ServerUnreachable, match=f"127.0.0.1:{second.port}/0 of big: "):
        await mapped.submit(SAY, model="big")
    async with MappedClient(file, outage_s=0.5) as other:
        assert (await other.result("kept"))["said"] == "ab"  # found, although the other server may have had it
        assert (await other.submit(SAY, model="small", id="b")).new
        assert (await other.result("b"))["said"] == "ab"
        assert [worker["model"] for worker in await other.workers()] == ["small"]
        (sentence,) = other.absent
        assert f"127.0.0.1:{second.port}/0 of big: " in sentence
        await other.ping()
        with pytest.raises(ServerUnreachable):  # it may be on the dead server
            await other.state("nobody")
        second.start()
        await until(lambda: _all_answer(other))


async def _all_answer(client: MappedClient) -> bool:
    await client.workers()
    return not client.absent


@pytest.mark.timing
async def test_lists_of_a_dead_server_are_awaited_once(mapped: MappedClient, second: Server) -> None:
    second.kill()
    await mapped.workers()
    started = time.monotonic()
    await mapped.workers()
    assert time.monotonic() - started < 2.0


@pytest.mark.timing
async def test_a_server_that_hangs_takes_its_models_alone(mapped: MappedClient, second: Server) -> None:
    await mapped.submit(SAY, model="small", id="a")
    assert second.process is not None
    second.process.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        await mapped.ping()
        assert (await mapped.submit(SAY, model="small")).new
        assert (await mapped.state("a"), time.monotonic() - started < 1.0) == ("queued", True)
        assert [queue.model for queue in await mapped.queues()] == ["small"]
        started = time.monotonic()
        assert [queue.model for queue in await mapped.queues()] == ["small"]
        assert time.monotonic() - started < 2.0
    finally:
        second.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
async def test_the_death_of_the_default_server_is_that_of_its_models_alone(
    redis_url: str, second: Server, tmp_path: Path
) -> None:
    path = tmp_path / "servers.toml"
    path.write_text(f'default = "{second.url}"\n[models]\nsmall = "{redis_url}"\n')
    async with working(settings(redis_url, model_name="small"), FakeChat().chat), MappedClient(path) as client:
        with serving(MapFile(path), ServeSettings(_env_file=None, no_worker_s=0.5)) as gateway:
            second.kill()
            assert (await client.batches(), [each["model"] for each in await client.workers()]) == ([], ["small"])
            assert len(client.absent) == 1
            async with httpx.AsyncClient(base_url=gateway.base_url, timeout=30) as http:
                body = {"model": "small", "messages": HELLO, "stream": True, "say": ["a", "b"]}
                streamed = await http.post("/chat/completions", json=body, headers={"Idempotency-Key": "k"})
                assert [each["choices"][0]["delta"].get("content") for each in events(streamed.text)][1:3] == ["a", "b"]
                assert [each["id"] for each in (await http.get("/models")).json()["data"]] == ["small"]


@pytest.mark.slow
@pytest.mark.timing
async def test_keys_without_limits_need_no_default_server(redis_url: str, second: Server, tmp_path: Path) -> None:
    path, key_file = tmp_path / "servers.toml", tmp_path / "keys.json"
    path.write_text(f'default = "{second.url}"\n[models]\nsmall = "{redis_url}"\n')
    limits: dict[str, dict[str, int]] = {"free": {}, "limited": {"tokens_per_minute": 9_000}}
    entries = [{"id": id, "sha256": key_digest(id), "tenant": id, **limit} for id, limit in limits.items()]
    key_file.write_text(json.dumps({"keys": entries}))
    given = ServeSettings(_env_file=None, no_worker_s=0.5, keys=key_file)
    async with working(settings(redis_url, model_name="small"), FakeChat().chat):
        with serving(MapFile(path), given) as gateway:
            second.kill()
            async with httpx.AsyncClient(base_url=gateway.base_url, timeout=30) as http:

                async def ask(key: str) -> tuple[int, float]:
                    started, body = time.monotonic(), {"model": "small", **SAY, "stream": True}
                    headers = {"authorization": f"Bearer {key}"}
                    answer = await http.post("/chat/completions", json=body, headers=headers)
                    return answer.status_code, time.monotonic() - started

                await ask("free")  # the lists of the dead server are awaited once
                status, took_s = await ask("free")
                assert (status, took_s < 2.0) == (200, True), took_s
                assert (await ask("limited"))[0] == 503


async def test_ping_raises_if_no_server_answers(tmp_path: Path, second: Server) -> None:
    path = tmp_path / "servers.toml"
    path.write_text(f'default = "{second.url}"\n')
    second.kill()
    async with MappedClient(path) as client:
        with pytest.raises(ServerUnreachable):
            await client.ping()
        with pytest.raises(ServerUnreachable):
            await client.workers()


LETTER = (
    '{"id":"x","model":"big","lane":"batch","crashes":3,"parked_at":1.0,"error":{},'
    '"body":"{\\"f\\":\\"chat\\",\\"a\\":[{}]}"}'
)


async def test_a_dead_letter_is_found_and_retried_on_its_server(mapped: MappedClient, db2: Redis) -> None:
    await db2.hset(keys.DEAD, "x", LETTER)
    assert [each.id for each in await mapped.dead_letters()] == ["x"]
    retried = await mapped.retry("x")
    assert await db2.exists(keys.job(retried.id))
    with pytest.raises(UnknownJob):
        await mapped.drop_dead_letter("x")


async def test_a_dead_letter_is_found_although_another_server_is_down(
    redis_url: str, second: Server, tmp_path: Path, db: Redis
) -> None:
    path = tmp_path / "servers.toml"
    path.write_text(f'default = "{second.url}"\n[models]\nbig = "{redis_url}"\n')
    await db.hset(keys.DEAD, "x", LETTER)
    second.kill()
    async with MappedClient(path, outage_s=0.5) as client:
        assert (await client.dead_letter("x")).model == "big"
        with pytest.raises(ServerUnreachable):  # the dead server may have it
            await client.dead_letter("y")
        assert (await client.retry("x")).new
        await db.hset(keys.DEAD, "x", LETTER)
        await client.drop_dead_letter("x")
    assert not await db.exists(keys.DEAD)


def test_a_blocking_client_takes_the_map(file: Path, redis_url: str, second: Server) -> None:
    with SyncClient(servers=file) as client:
        assert [client.submit(SAY, model=model, id=model).state for model in BOTH] == ["queued", "queued"]
        assert [(queue.model, queue.jobs) for queue in client.queues()] == [("big", 1), ("small", 1)]
        assert client.cancel("big") == "cancelled"


@pytest.mark.usefixtures("served")
async def test_an_alias_is_on_the_server_of_its_model(mapped: MappedClient, db: Redis, db2: Redis) -> None:
    """Of one server's models by itself, of another's once the map names it there too."""
    assert await mapped.set_alias("quick", "small") is None
    with pytest.raises(ValueError, match="name it in the map beside the model, with the server .* of big"):
        await mapped.set_alias("deep", "big")
    assert await mapped.aliases() == {"quick": "small"}
    submitted = await mapped.submit(SAY, model="quick")
    assert submitted.model == "small"
    assert (await mapped.result(submitted.id))["said"] == "ab"
    assert [await each.hgetall("sluice:aliases") for each in (db, db2)] == [{b"quick": b"small"}, {}]


@pytest.mark.usefixtures("served")
async def test_an_alias_that_the_map_names_beside_its_model(file: Path, second: Server, db2: Redis) -> None:
    file.write_text(file.read_text() + f'deep = "{second.url}"\n')
    async with MappedClient(file, outage_s=0.5) as client:
        assert await client.set_alias("deep", "big") is None
        assert (await client.submit(SAY, model="deep")).model == "big"
        assert await client.set_alias("deep", None) == "big"
    assert not await db2.exists("sluice:aliases")


async def test_webhooks_of_all_servers_are_delivered(mapped: MappedClient) -> None:
    with receiving() as receiver:
        endpoint = Endpoint.new(receiver.url, ["job.cancelled"], None, allow_private=True, created_at=1)
        for server in mapped.servers:
            await WebhookStore(server.redis, server.retries).add(endpoint)
        for model in BOTH:
            assert await mapped.cancel((await mapped.submit(SAY, model=model, id=f"job-{model}")).id) == "cancelled"
        delivering = asyncio.create_task(deliver(mapped))

        async def are_told() -> bool:
            return len(receiver.received) == len(BOTH)

        await until(are_told)
        delivering.cancel()
        await asyncio.wait([delivering])
    assert sorted(json.loads(each.body)["data"]["id"] for each in receiver.received) == ["job-big", "job-small"]
