"""Events from the end of a job or run to a real receiver, by a clock that the tests set."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from openai import InvalidWebhookSignatureError, OpenAI
from redis.asyncio import Redis
from standardwebhooks import Webhook, WebhookVerificationError

from sluice import Client
from sluice.batch.registry import BatchRegistry
from sluice.contract.batch import NO_DETAILS, NO_LINES, Batch
from sluice.network import BadUrl
from sluice.webhooks.deliverer import Answer, Deliverer, Sender, check_url
from sluice.webhooks.endpoint import EVENTS, Endpoint, read_events
from sluice.webhooks.store import WebhookStore
from tests.images.internet import ADDRESS, Internet, answer, certified, trusting
from tests.queue.helpers import ask, ended, settings, working
from tests.waiting import until
from tests.webhooks.receiver import Receiver
from worker.queue.scripts import arguments, script

HOUR_MS = 3_600_000


class Clock:
    """Unix milliseconds, which the test moves on."""

    def __init__(self) -> None:
        self.ms = round(time.time() * 1000)

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def store(client: Client) -> WebhookStore:
    return WebhookStore(client.redis, client.retries)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def endpoint_of(url: str, *events: str, tenant: str | None = None, allow_private: bool = True) -> Endpoint:
    created_at = int(time.time())
    return Endpoint.new(url, read_events(events or EVENTS), tenant, allow_private=allow_private, created_at=created_at)


@asynccontextmanager
async def deliverer_of(store: WebhookStore, clock: Clock | None = None, **given: Any) -> AsyncIterator[Deliverer]:
    sender = Sender(**given)
    yield Deliverer(store, sender, clock_ms=clock)
    sender.close()


async def pass_by(deliverer: Deliverer) -> None:
    """Deliver what is due, until nothing is."""
    while await deliverer.step() or deliverer._under_way:
        await deliverer.idle()


def run_of(id: str, tenant: str | None = None, **changed: Any) -> Batch:
    batch = Batch(id=id, input_file_id="in", completion_window="24h", status="in_progress", created_at=1,
                  request_counts=NO_LINES, sluice=replace(NO_DETAILS, tenant=tenant))  # fmt: skip
    return batch.enter(changed.get("status", "completed"), 1_760_000_000)


async def end_run(client: Client, id: str = "batch_000000000001", **changed: Any) -> None:
    await BatchRegistry(client.redis).announce(run_of(id, **changed))


async def test_a_run_that_ends_while_nobody_delivers_is_delivered_later(
    client: Client, store: WebhookStore, receiver: Receiver
) -> None:
    endpoint = endpoint_of(f"{receiver.url}/hook")
    await store.add(endpoint)
    await end_run(client)
    async with deliverer_of(store) as deliverer:
        await pass_by(deliverer)
    (received,) = receiver.received
    secret = endpoint.secrets[0].value
    assert Webhook(secret).verify(received.body, received.headers)["data"] == {"id": "batch_000000000001"}
    event = OpenAI(api_key="none").webhooks.unwrap(received.body, received.headers, secret=secret)
    assert (event.type, event.data.id, event.id, event.object) == (
        "batch.completed", "batch_000000000001", received.id, "event",
    )  # fmt: skip
    assert received.headers["content-type"] == "application/json"
    assert await store.counts(endpoint.id) == replace(await store.counts(endpoint.id), waiting=0, dead=0, delivered=1)


async def test_each_end_of_a_job_is_told_to_those_who_want_it(
    client: Client, db: Redis, store: WebhookStore, redis_url: str, receiver: Receiver
) -> None:
    async def chat(ctx: Any, request: Any) -> Any:
        raise RuntimeError(request)

    await store.add(endpoint_of(f"{receiver.url}/failed", "job.failed"))
    await store.add(endpoint_of(f"{receiver.url}/jobs", "job.*"))
    await store.add(endpoint_of(f"{receiver.url}/runs", "batch.*"))
    waits = await client.submit([{"role": "user", "content": "Hi."}], model="nobody")
    assert await client.cancel(waits.id) == "cancelled"
    async with working(settings(redis_url), chat):
        await ask(db, "plain", {"messages": []})
        assert (await ended(db, "plain"))[-1]["type"] == "failed"
    async with deliverer_of(store) as deliverer:
        await pass_by(deliverer)
    told = sorted(
        (each.path, json.loads(each.body)["type"], json.loads(each.body)["data"]) for each in receiver.received
    )
    assert told == [
        ("/failed", "job.failed", {"id": "plain"}),
        ("/jobs", "job.cancelled", {"id": waits.id}),
        ("/jobs", "job.failed", {"id": "plain"}),
    ]


@pytest.mark.parametrize(
    ("webhooks", "state", "final", "event"),
    [
        ("", "finished", '{"finish_reason":"stop"}', "job.finished"),
        ("", "failed", "{}", "job.failed"),
        ("response", "finished", '{"finish_reason":"tool_calls"}', "response.completed"),
        ("response", "finished", '{"finish_reason":"length"}', "response.incomplete"),
        ("response", "failed", "{}", "response.failed"),
        ("response", "cancelled", "{}", "response.cancelled"),
        ("none", "finished", '{"finish_reason":"stop"}', None),
    ],
)
async def test_a_worker_that_ends_a_job_tells_of_it_as_its_producer_said(
    client: Client, store: WebhookStore, webhooks: Any, state: str, final: str, event: str | None
) -> None:
    await store.add(endpoint_of("http://localhost/"))
    job = await client.submit({"messages": [], "tenant": "acme"}, id="a", webhooks=webhooks)
    await end_job(client.redis, job.id, state, final)
    assert [each["type"] for each in await outbox(client.redis)] == [event] * (event is not None)
    assert {each["tenant"] for each in await outbox(client.redis)} <= {"acme"}


async def end_job(redis: Redis, job_id: str, state: str, final: str) -> None:
    """End a job as its worker does."""
    await redis.hset(f"sluice:job:{job_id}", mapping={"state": "running", "attempt": "1"})
    names = ["job:", "log:", "ch:", "result:"]
    found = [*(f"sluice:{name}{job_id}" for name in names), "sluice:queue:default:interactive"]
    fields = {"life_ms": 10_000, "attempt": 1, "seq": 0, "state": state, "result": final, "log_ttl_ms": 1000}
    args = arguments(**fields, result_ttl_ms=1000, dead_letter="", events=[final], fields=[])
    assert await script(redis, "final")(keys=found, args=args) == b"done"
    assert await script(redis, "final")(keys=found, args=args) == b"done", "repeated, since the reply was lost"


async def outbox(redis: Redis) -> list[dict[str, Any]]:
    found = [await redis.lrange(f"sluice:webhooks:outbox:{kind}", 0, -1) for kind in ("batch", "response", "job")]
    return [json.loads(each) for events in found for each in events]


async def test_counts_and_ends_that_nobody_wants_are_not_told(client: Client, store: WebhookStore) -> None:
    async def end(id: str, function: Any = "chat") -> None:
        await client.submit({"messages": []}, id=id, function=function)
        await end_job(client.redis, id, "finished", '{"finish_reason":"stop"}')

    await end("before")
    await store.add(endpoint_of("http://localhost/", "batch.*", "job.failed"))
    await end("count", "count")
    assert await outbox(client.redis) == []
    await end("wanted-by-kind")  # which endpoint wants which event is found when it is delivered
    await store.change((await store.endpoints())[0].id, lambda _: None)
    await end("after")
    assert [each["type"] for each in await outbox(client.redis)] == ["job.finished"]
    assert (await store.take(None, lease_ms=1, limit=9, under_way={}))[2] == []
    assert await client.redis.keys("sluice:webhooks*") == []


async def test_a_tenants_endpoint_gets_its_events_alone(
    client: Client, store: WebhookStore, receiver: Receiver
) -> None:
    for tenant in ("acme", "zenith", None):
        await store.add(endpoint_of(f"{receiver.url}/{tenant}", tenant=tenant))
    for number, tenant in enumerate(("acme", "zenith", None)):
        await end_run(client, f"batch_00000000000{number}", tenant=tenant)
        job = await client.submit({"messages": [], **({"tenant": tenant} if tenant else {})}, model="nobody")
        await client.cancel(job.id)
    async with deliverer_of(store) as deliverer:
        await pass_by(deliverer)
    told = {path: sorted(json.loads(each.body)["data"]["id"] for each in receiver.at(path) if b"batch" in each.body)
            for path in ("/acme", "/zenith", "/None")}  # fmt: skip
    assert told == {
        "/acme": ["batch_000000000000"],
        "/zenith": ["batch_000000000001"],
        "/None": [f"batch_00000000000{number}" for number in range(3)],
    }
    assert [len(receiver.at(path)) for path in told] == [2, 2, 6]


async def test_a_run_is_told_once_however_often_its_end_is_stored(client: Client, store: WebhookStore) -> None:
    await store.add(endpoint_of("http://localhost/"))
    registry, run = BatchRegistry(client.redis), run_of("batch_000000000001", status="expired")
    await registry.put(run)
    await registry.announce(run)
    await registry.announce_late(run)
    assert [each["type"] for each in await outbox(client.redis)] == ["batch.expired"]


async def test_events_beyond_the_bound_are_dropped_and_counted(client: Client, store: WebhookStore) -> None:
    await store.add(endpoint_of("http://localhost/"))
    await client.redis.rpush("sluice:webhooks:outbox:job", *["{}"] * 10_000)
    job = await client.submit([], model="nobody", id="a")
    await client.cancel(job.id)
    await end_run(client)
    assert await client.redis.llen("sluice:webhooks:outbox:job") == 10_000
    assert await client.redis.llen("sluice:webhooks:outbox:batch") == 1, "runs are not dropped for jobs"
    assert await store.dropped() == 1


async def test_deliveries_beyond_the_bound_are_dropped_and_counted(client: Client, store: WebhookStore) -> None:
    full, other = endpoint_of("http://localhost/a"), endpoint_of("http://localhost/b")
    await store.add(full)
    await store.add(other)
    far = 10**15
    await client.redis.zadd(f"sluice:webhooks:due:{full.id}", {f"evt_{number}": far for number in range(10_000)})
    await end_run(client)
    await store.take(None, lease_ms=60_000, limit=4, under_way={})
    counts = [await store.counts(each.id) for each in (full, other)]
    assert [(each.waiting, each.dropped) for each in counts] == [(10_000, 1), (1, 0)]
    assert (await store.total()).dropped == 1


async def attempts(receiver: Receiver, deliverer: Deliverer, clock: Clock, hours: float) -> list[int]:
    """Let time pass, and return after how many minutes there was a request."""
    began, found = clock.ms, list[int]()
    while clock.ms < began + hours * HOUR_MS:
        before = len(receiver.received)
        await pass_by(deliverer)
        if len(receiver.received) > before:
            found.append((clock.ms - began) // 60_000)
        clock.ms += 60_000
    return found


async def test_a_failing_endpoint_is_tried_for_a_day_and_then_there_is_a_dead_letter(
    client: Client, store: WebhookStore, receiver: Receiver, clock: Clock
) -> None:
    receiver.status = 500
    endpoint = endpoint_of(receiver.url)
    await store.add(endpoint)
    await end_run(client)
    async with deliverer_of(store, clock) as deliverer:
        after = await attempts(receiver, deliverer, clock, hours=26)
        # Immediately, 5 s, 5 min, 30 min, 2 h, 5 h, 10 h after one another, each up to a tenth later, and after a day.
        latest = [0, 1, 8, 41, 173, 503, 1163, 1441]
        least = [0, 1, 6, 36, 156, 456, 1056, 1440]
        assert len(after) == 8
        assert all(low <= at <= high for low, at, high in zip(least, after, latest, strict=True))
        assert len({each.id for each in receiver.received}) == 1
        assert len({each.headers["webhook-timestamp"] for each in receiver.received}) == 8
        (letter,) = await store.dead(endpoint.id)
        assert (letter.attempts, letter.problem, letter.id) == (8, "it answered 500", receiver.received[0].id)
        assert (await store.counts(endpoint.id)).waiting == 0

        receiver.status = 200
        assert await store.retry(endpoint.id, letter.id, clock.ms) == 1
        await pass_by(deliverer)
    assert receiver.received[-1].id == letter.id
    counts = await store.counts(endpoint.id)
    assert (counts.waiting, counts.dead, counts.delivered, counts.failed) == (0, 0, 1, 7)


async def test_a_receiver_that_is_dead_for_an_hour_gets_its_event(
    client: Client, store: WebhookStore, receiver: Receiver, clock: Clock
) -> None:
    async with deliverer_of(store, clock) as deliverer:
        endpoint = endpoint_of("http://127.0.0.1:9/")  # where nobody listens
        await store.add(endpoint)
        await end_run(client)
        assert await attempts(receiver, deliverer, clock, hours=1) == []
        ((waiting, _),) = await store.waiting(endpoint.id)
        assert (waiting.attempts, waiting.problem) == (4, "the server cannot be reached")
        await store.change(endpoint.id, lambda now: replace(now, url=receiver.url))
        await attempts(receiver, deliverer, clock, hours=3)
    assert [each.id for each in receiver.received] == [waiting.id]


async def test_an_endpoint_that_answers_410_is_disabled(
    client: Client, store: WebhookStore, receiver: Receiver, clock: Clock
) -> None:
    receiver.status = 410
    endpoint = endpoint_of(receiver.url)
    await store.add(endpoint)
    for number in range(9):
        await end_run(client, f"batch_00000000000{number}")
    async with deliverer_of(store, clock) as deliverer:
        await pass_by(deliverer)
        asked = len(receiver.received)
        await end_run(client, "batch_00000000000a")
        await pass_by(deliverer)
    assert asked == len(receiver.received) == 4, "those that were sent at once"
    assert [each.disabled for each in await store.endpoints()] == ["it answered 410"]
    letters = await store.dead(endpoint.id)
    assert (
        sorted(each.problem for each in letters)
        == ["it answered 410"] * 4 + ["the endpoint is disabled: it answered 410"] * 5
    )
    assert await outbox(client.redis) == []


async def test_a_receiver_says_how_long_it_wants_nothing(
    client: Client, store: WebhookStore, receiver: Receiver, clock: Clock
) -> None:
    receiver.status, receiver.headers = 429, {"Retry-After": "3600"}
    endpoint = endpoint_of(receiver.url)
    await store.add(endpoint)
    await end_run(client)
    async with deliverer_of(store, clock) as deliverer:
        await pass_by(deliverer)
        await end_run(client, "batch_00000000000a")
        assert await attempts(receiver, deliverer, clock, hours=0.9) == []
        receiver.status, receiver.headers = 200, {}
        assert await attempts(receiver, deliverer, clock, hours=1) == [6]
    assert len(receiver.received) == 3


async def test_a_receiver_that_names_years_stops_its_endpoint_for_an_hour(
    client: Client, store: WebhookStore, receiver: Receiver, clock: Clock
) -> None:
    receiver.status, receiver.headers = 503, {"Retry-After": "9" * 30}
    await store.add(endpoint_of(receiver.url))
    await end_run(client)
    async with deliverer_of(store, clock) as deliverer:
        await pass_by(deliverer)
        await end_run(client, "batch_00000000000a")
        receiver.status, receiver.headers = 200, {}
        assert await attempts(receiver, deliverer, clock, hours=25) == [60, 1440]


async def test_a_redirect_is_a_failure_and_is_not_followed(
    client: Client, store: WebhookStore, receiver: Receiver
) -> None:
    receiver.status, receiver.headers = 302, {"Location": f"{receiver.url}/elsewhere"}
    endpoint = endpoint_of(f"{receiver.url}/hook")
    await store.add(endpoint)
    await end_run(client)
    async with deliverer_of(store) as deliverer:
        await pass_by(deliverer)
    assert [each.path for each in receiver.received] == ["/hook"]
    assert (await store.counts(endpoint.id)).last == "it answered 302"


async def test_a_slow_receiver_delays_no_other_endpoint(
    client: Client, store: WebhookStore, receiver: Receiver
) -> None:
    receiver.slow_s = {"/slow": 5.0}
    slow, quick = endpoint_of(f"{receiver.url}/slow"), endpoint_of(f"{receiver.url}/quick")
    await store.add(slow)
    await store.add(quick)
    for number in range(60):
        await end_run(client, f"batch_0000000000{number:02}")
    async with deliverer_of(store, timeout_s=1.0) as deliverer:
        running = asyncio.create_task(deliverer.run())

        async def all_are_there() -> bool:
            return len(receiver.at("/quick")) == 60

        await until(all_are_there)
        assert len(receiver.at("/slow")) <= 4

        async def has_failed() -> bool:
            return (await store.counts(slow.id)).failed >= 4

        await until(has_failed)
        assert (await store.counts(slow.id)).last == "no answer within 1 s"
        running.cancel()
        await asyncio.wait([running])


async def test_names_that_nobody_answers_for_delay_no_other_endpoint(
    client: Client, store: WebhookStore, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def look_up(host: str, *given: Any, **more: Any) -> Any:
        if host == "silent.example":
            release.wait(20)
        return socket.getaddrinfo("127.0.0.1", *given, **more)

    monkeypatch.setattr("sluice.network.getaddrinfo", look_up)
    for number in range(3):
        await store.add(endpoint_of(f"http://silent.example/{number}"))
    await store.add(endpoint_of(f"{receiver.url}/quick"))
    for number in range(9):
        await end_run(client, f"batch_00000000000{number}")
    async with deliverer_of(store, timeout_s=5.0) as deliverer:
        running = asyncio.create_task(deliverer.run())

        async def all_are_there() -> bool:
            return len(receiver.at("/quick")) == 9

        await until(all_are_there, within_s=4)
        release.set()
        running.cancel()
        await asyncio.wait([running])


async def test_deliverers_share_the_work(client: Client, store: WebhookStore, receiver: Receiver) -> None:
    await store.add(endpoint_of(receiver.url))
    for number in range(40):
        await end_run(client, f"batch_0000000000{number:02}")
    async with deliverer_of(store) as first, deliverer_of(store) as second, deliverer_of(store) as third:
        await asyncio.gather(pass_by(first), pass_by(second), pass_by(third))
    assert len(receiver.received) == len({each.id for each in receiver.received}) == 40


async def test_what_a_dead_deliverer_held_is_delivered_by_another_with_the_same_id(
    client: Client, store: WebhookStore, receiver: Receiver, clock: Clock
) -> None:
    endpoint = endpoint_of(receiver.url)
    await store.add(endpoint)
    await end_run(client)
    _, _, (held,) = await store.take(clock.ms, lease_ms=60_000, limit=4, under_way={})
    async with deliverer_of(store, clock) as deliverer:
        await pass_by(deliverer)
        assert receiver.received == []
        clock.ms += 61_000
        await pass_by(deliverer)
    assert [each.id for each in receiver.received] == [held.delivery.id]
    await store.settle(held, "failed", held.delivery, next_ms=clock.ms)  # the first comes back
    assert (await store.counts(endpoint.id)).waiting == 0


async def test_both_secrets_sign_while_they_overlap(
    client: Client, store: WebhookStore, receiver: Receiver, clock: Clock
) -> None:
    endpoint = endpoint_of(receiver.url)
    await store.add(endpoint)
    rotated = endpoint.rotated(clock.ms, 30_000)
    await store.change(endpoint.id, lambda _: rotated)
    old, new = endpoint.secrets[0].value, rotated.secrets[0].value
    async with deliverer_of(store, clock) as deliverer:
        await end_run(client)
        await pass_by(deliverer)
        clock.ms += 31_000
        await end_run(client, "batch_00000000000a")
        await pass_by(deliverer)
    during, after = receiver.received
    unwrap = OpenAI(api_key="none").webhooks.unwrap
    for secret in (old, new):
        Webhook(secret).verify(during.body, during.headers)
        unwrap(during.body, during.headers, secret=secret)
    Webhook(new).verify(after.body, after.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(old).verify(after.body, after.headers)
    with pytest.raises(InvalidWebhookSignatureError):
        unwrap(after.body, after.headers, secret=old)


@pytest.mark.parametrize(
    "addresses",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "::1", "fd00::1", "::ffff:127.0.0.1", f"{ADDRESS} 10.0.0.1"],
)
async def test_a_name_of_a_private_address_is_not_connected_to(addresses: str) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return addresses.split()

    internet = Internet({})
    sender = Sender(resolve=resolve, network=internet)
    refused = await sender.send(endpoint_of("https://hooks.example/", allow_private=False), "evt_1", b"{}", 1)
    assert (refused.status, "not public" in refused.problem, internet.connected) == (None, True, [])
    sender.close()


async def test_a_name_that_becomes_private_is_not_connected_to_again() -> None:
    internet = Internet({"/": answer(b"", "Content-Length: 0", status="204 No Content")})
    internet.names = {"pictures.example": [[ADDRESS], ["127.0.0.1"]]}
    sender = Sender(resolve=internet.resolve, network=internet, tls=trusting())
    endpoint = endpoint_of("https://pictures.example/", allow_private=False)
    async with internet.on(certified()):
        answers = [await sender.send(endpoint, "evt_1", b"{}", 1) for _ in range(2)]
    assert [each.status for each in answers] == [204, None]
    assert internet.connected == [ADDRESS]
    sender.close()


async def test_a_certificate_of_another_host_is_refused() -> None:
    internet = Internet({})
    sender = Sender(resolve=internet.resolve, network=internet, tls=trusting())
    async with internet.on(certified()):
        refused = await sender.send(endpoint_of("https://other.example/", allow_private=False), "evt_1", b"{}", 1)
    assert refused == Answer(None, "the certificate is not valid for this host")
    sender.close()


@pytest.mark.parametrize(
    "url",
    ["http://hooks.example/", "https://127.0.0.1/", "https://[::1]/", "https://[::ffff:10.0.0.1]/", "https://localhost/",
     "https://10.1.2.3:8443/x", "ftp://hooks.example/", "https://a:b@hooks.example/", "https://", "x" * 9000],
)  # fmt: skip
def test_a_url_that_leads_to_a_private_place_or_nowhere_is_refused(url: str) -> None:
    with pytest.raises(BadUrl):
        check_url(url, allow_private=False)


async def test_an_endless_answer_is_not_read(receiver: Receiver) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x" * 65_536)
            await writer.drain()

    async def interim(writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100)
            await writer.drain()

    internet = Internet({"/endless": endless, "/interim": interim})
    sender = Sender(resolve=internet.resolve, network=internet)
    async with internet.on():
        at = "http://pictures.example"
        assert await sender.send(endpoint_of(f"{at}/endless"), "evt_1", b"{}", 1) == Answer(200, "")
        bad = await sender.send(endpoint_of(f"{at}/interim"), "evt_1", b"{}", 1)
    assert bad == Answer(None, "the answer is not valid HTTP")
    sender.close()


async def test_an_endpoint_that_is_removed_takes_what_waits_for_it(client: Client, store: WebhookStore) -> None:
    endpoint = endpoint_of("http://127.0.0.1:9/")
    await store.add(endpoint)
    await end_run(client)
    async with deliverer_of(store) as deliverer:
        await pass_by(deliverer)
    assert (await store.counts(endpoint.id)).waiting == 1
    assert await store.change(endpoint.id, lambda _: None) == endpoint
    assert await store.change(endpoint.id, lambda _: None) is None
    assert await client.redis.keys("sluice:webhooks*") == []


async def test_foreign_values_stop_no_delivery(client: Client, store: WebhookStore, receiver: Receiver) -> None:
    endpoint = endpoint_of(receiver.url)
    foreign = {f"x{number}": value for number, value in enumerate(("", "1", "{}", '{"events":["batch.completed"]}'))}
    await client.redis.hset("sluice:webhooks", mapping=foreign)
    await store.add(endpoint)
    await client.redis.rpush("sluice:webhooks:outbox:batch", "", "1", "{}")
    await client.redis.set("sluice:webhooks:outbox:job", "x")
    await client.redis.zadd(f"sluice:webhooks:due:{endpoint.id}", {"a": 1, "b": 1})
    await client.redis.hset(f"sluice:webhooks:waiting:{endpoint.id}", "b", "[]")
    await end_run(client)
    await client.cancel((await client.submit([], model="nobody")).id)
    async with deliverer_of(store) as deliverer:
        await pass_by(deliverer)
    assert sorted(json.loads(each.body)["type"] for each in receiver.received) == ["batch.completed", "job.cancelled"]
    assert await store.endpoints() == [endpoint]


async def test_there_is_a_limit_of_endpoints(store: WebhookStore) -> None:
    for _ in range(100):
        await store.add(endpoint_of("http://localhost/"))
    with pytest.raises(ValueError, match="a hundred"):
        await store.add(endpoint_of("http://localhost/"))


def test_events_are_named_one_by_one_or_by_their_kind() -> None:
    assert read_events(["batch.*", "job.failed", "batch.failed"]) == (*EVENTS[:4], "job.failed")
    for wrong in ("batch", "*", ".*", "batch.gone", "batch*"):
        with pytest.raises(ValueError, match="there is no event"):
            read_events([wrong])


async def test_a_time_that_no_clock_has_is_ignored(
    client: Client, store: WebhookStore, receiver: Receiver, clock: Clock
) -> None:
    receiver.status, receiver.headers = 503, {"Retry-After": f"Mon, 01 Jan 2024 00:00:00 +{'9' * 19}"}
    endpoint = endpoint_of(receiver.url)
    await store.add(endpoint)
    await end_run(client)
    async with deliverer_of(store, clock) as deliverer:
        await pass_by(deliverer)
    assert (await store.counts(endpoint.id)).failed == 1
