"""Users of the server with the permissions of docs/operations.md: each is enough for its role, and no more."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from sluice import Client, Finished, JobCancelled
from sluice.batch.registry import BatchRegistry
from sluice.contract import keys
from sluice.transport import connect
from sluice.webhooks.deliverer import Deliverer, Sender
from sluice.webhooks.store import WebhookStore
from tests.end_to_end.test_cli import Command
from tests.end_to_end.test_cli_operators import park
from tests.support.stack import ROOT
from tests.webhooks.receiver import receiving

ROLES = ("worker", "gateway", "backend", "operator", "monitoring")
HELLO = [{"role": "user", "content": "Count to 3."}]
ENDLESS = {"messages": HELLO, "max_tokens": 30_000, "logit_bias": {"0": -100, "2": -100}}
NOBODY_MAY = (
    ("FLUSHDB",), ("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("SHUTDOWN", "NOSAVE"),
    ("ACL", "LIST"), ("MONITOR",), ("REPLICAOF", "NO", "ONE"), ("EVAL", "return 1", "0"),
    ("GET", "other"), ("SET", "other", "1"), ("PUBLISH", "other", "m"),
)  # fmt: skip
MONITORING_MAY_NOT = (
    ("GET", "arq:job:a"), ("GET", "sluice:result:a"), ("LRANGE", "sluice:log:a", "0", "-1"), ("HGETALL", "sluice:dead"),
    ("SET", "sluice:cancel:a", "1"), ("DEL", "sluice:queue:default:interactive"), ("EVALSHA", "0" * 40, "0"),
    ("ZADD", "sluice:queue:default:interactive", "1", "a"), ("PUBLISH", "sluice:control", "a"),
    ("HSET", "sluice:worker:ada", "a", "b"), ("SUBSCRIBE", "sluice:ch:a"),
)  # fmt: skip


def line_of(role: str) -> list[str]:
    """The command of the document that makes a role's user."""
    page = (ROOT / "docs" / "operations.md").read_text()
    (line,) = re.findall(rf"^(ACL SETUSER {role} on >PASSWORD .*)$", page, re.MULTILINE)
    return line.split()


@pytest.fixture
def admin(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        for role in ROLES:
            client.execute_command("ACL", "DELUSER", role)
            client.execute_command("ACL", "SETUSER", role, "resetchannels")
            client.execute_command(*line_of(role))
        client.execute_command("ACL", "LOG", "RESET")
        yield client
        client.execute_command("ACL", "DELUSER", *ROLES)


@pytest.fixture
def denied(admin: redis.Redis) -> Callable[[], list[tuple[str, str]]]:
    """Return a function for what the server has denied: the user, and the command, key or channel."""

    def read() -> list[tuple[str, str]]:
        entries = [each for each in admin.acl_log() if not str(each["object"]).startswith("client|")]
        return [(str(each["username"]), str(each["object"])) for each in entries]

    return read


def url_of(redis_url: str, role: str) -> str:
    return redis_url.replace("redis://", f"redis://{role}:PASSWORD@")


def as_role(sluice: Command, redis_url: str, role: str) -> Command:
    sluice.env["SLUICE_REDIS_URL"] = url_of(redis_url, role)
    return sluice


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_do_what_none_needs(admin: redis.Redis, redis_url: str, role: str) -> None:
    with redis.Redis.from_url(url_of(redis_url, role)) as user:
        for command in NOBODY_MAY if role != "monitoring" else (*NOBODY_MAY, *MONITORING_MAY_NOT):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*command)


@pytest.mark.usefixtures("alive", "admin")
def test_a_backend_may_submit_stream_and_cancel(redis_url: str, denied: Callable[[], object]) -> None:
    async def use() -> None:
        async with Client(url_of(redis_url, "backend")) as client:
            await client.ping()
            job = await client.submit(HELLO, wait_worker_s=10)
            events = [event async for event in client.stream(job.id)]
            assert isinstance(events[-1], Finished)
            assert (await client.result(job.id))["choices"]
            assert await client.state(job.id) == "finished"
            assert await client.count_tokens(HELLO) > 0
            running = await client.submit(ENDLESS)
            async for _ in client.stream(running.id):
                assert await client.cancel(running.id) in ("requested", "cancelled")
                break
            with pytest.raises(JobCancelled):
                await client.result(running.id)
            await client.redis.set(keys.capture("nobody"), "1", px=60_000)
            waiting = await client.submit(HELLO, model="nobody")
            assert [(queue.model, queue.jobs) for queue in await client.queues()] == [("nobody", 1)]
            assert await client.cancel(waiting.id) == "cancelled"
            assert await client.redis.exists(keys.captured("nobody", waiting.id))
            assert len(await client.workers()) == 1

    asyncio.run(use())
    assert denied() == []


@pytest.mark.usefixtures("alive", "admin")
def test_a_feeder_may_run_and_cancel_batches(
    sluice: Command, redis_url: str, tmp_path: Path, denied: Callable[[], object]
) -> None:
    feeder = as_role(sluice, redis_url, "operator")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    assert feeder("batch", "run", "in.jsonl", "-o", "out.jsonl")[0] == 0
    assert "choices" in (tmp_path / "out.jsonl").read_text()
    (tmp_path / "endless.jsonl").write_text(json.dumps({**line, "body": ENDLESS}))
    with feeder.running("batch", "run", "endless.jsonl", "-o", "cut.jsonl") as process:
        run = wait_for_run(feeder)
        assert feeder("batch", "status", run)[0] == 0
        assert feeder("batch", "cancel", run)[0] == 0
        process.communicate(timeout=60)
    assert feeder("batch", "list")[0] == 0
    asyncio.run(touch(url_of(redis_url, "operator"), run))
    assert denied() == []


async def touch(url: str, run: str) -> None:
    async with connect(url) as feeder:  # as a feeder does every two seconds
        await BatchRegistry(feeder).touch(run)


def wait_for_run(feeder: Command) -> str:
    """Return the id of the run that has queued its line."""
    while True:
        for text in feeder("batch", "list", "--json")[1].splitlines():
            each = json.loads(text)
            if each["status"] == "in_progress" and feeder.db.zcard("sluice:queue:default:batch"):
                return str(each["id"])


@pytest.mark.usefixtures("alive", "admin")
def test_an_operator_may_use_every_command(sluice: Command, redis_url: str, denied: Callable[[], object]) -> None:
    operator = as_role(sluice, redis_url, "operator")
    for job_id in ("a", "b"):
        park(operator, job_id)
    commands = (
        ("workers",),
        ("chat", "Count to 3."),
        ("submit", "--id", "waits", "--model", "nobody", "Hi."),
        ("queue", "list"),
        ("cancel", "waits"),
        ("submit", "--id", "more", "--model", "nobody", "Hi."),
        ("queue", "purge", "nobody", "--yes"),
        ("submit", "--id", "done", "--wait", "Count to 3."),
        ("tail", "done"),
        ("dead", "list"),
        ("dead", "show", "a"),
        ("dead", "retry", "a"),
        ("dead", "drop", "b"),
        ("batch", "list"),
        ("webhooks", "list"),
        ("webhooks", "deliveries", "--dead"),
    )
    failed = {" ".join(each): err for each in commands for code, _, err in [operator(*each)] if code}
    assert failed == {}
    assert denied() == []


def test_a_gateway_may_deliver_webhooks_and_an_operator_may_manage_them(
    sluice: Command, admin: redis.Redis, redis_url: str, denied: Callable[[], object]
) -> None:
    operator = as_role(sluice, redis_url, "operator")
    with receiving() as receiver:
        receiver.status = 410
        code, out, err = operator("webhooks", "add", receiver.url, "--event", "job.*", "--allow-private", "--json")
        assert code == 0, err
        endpoint = json.loads(out)["id"]
        operator("submit", "--id", "a", "--model", "nobody", "Hi.")
        assert operator("cancel", "a")[0] == 0
        asyncio.run(deliver_once(url_of(redis_url, "gateway")))
        assert len(receiver.received) == 1
        receiver.status = 200
        for command in (
            ("test", endpoint),
            ("retry", endpoint),
            ("rotate", endpoint),
            ("deliveries",),
            ("rm", endpoint),
        ):
            code, _, err = operator("webhooks", *command)
            assert code == 0, err
    assert denied() == []


async def deliver_once(url: str) -> None:
    async with Client(url) as client:
        store, sender = WebhookStore(client.redis, client.retries), Sender()
        deliverer = Deliverer(store, sender)
        await deliverer.step()
        await deliverer.idle()
        await store.total()
        sender.close()


@pytest.mark.usefixtures("alive", "admin")
def test_monitoring_may_list_workers_queues_and_batches(
    sluice: Command, redis_url: str, denied: Callable[[], object]
) -> None:
    sluice.db.zadd("sluice:queue:nobody:batch", {"a": 1})
    sluice.db.set("sluice:batch:a", "any value")
    monitoring = as_role(sluice, redis_url, "monitoring")
    for command in (("workers",), ("workers", "--json"), ("queue", "list"), ("batch", "list"), ("top", "--once")):
        code, _, err = monitoring(*command)
        assert (code, "NOPERM" in err) == (0, False), err
    assert denied() == []
    code, _, err = monitoring("submit", "Hi.")
    assert code == 2
    assert "denies a command to its user" in err
    assert "ACL SETUSER operator" in err
    assert line_of("operator")
