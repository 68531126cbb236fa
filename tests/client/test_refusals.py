"""The server's errors are raised at once, and never taken for an outage."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import TimeoutError as RedisTimeoutError

from sluice import CancelNotStored, Client, ServerFull, ServerUnreachable, SluiceError, SyncClient
from sluice.batch.run import endless_retries
from sluice.contract import keys
from sluice.openai import error_reply
from sluice.transport import is_transient
from tests.client.streaming import HELLO, event, say, seqs, subscribed
from tests.queue.refusing import disk_full
from tests.support.stack import Server


async def test_a_wrong_password_is_raised_at_once(redis_url: str) -> None:
    async with Client(redis_url.replace("://", "://nobody:wrong@")) as client:
        for call in (seqs(client, "a"), client.result("a"), client.submit(HELLO), client.cancel("a"), client.ping()):
            with pytest.raises(AuthenticationError):
                await asyncio.wait_for(call, 3)


async def test_a_database_that_the_server_does_not_have_is_raised_at_once(redis_url: str) -> None:
    async with Client(redis_url.removesuffix("/0") + "/16") as client:
        for call in (seqs(client, "a"), client.result("a"), client.submit(HELLO), client.cancel("a"), client.ping()):
            with pytest.raises(ResponseError):
                await asyncio.wait_for(call, 3)
    with SyncClient(redis_url.removesuffix("/0") + "/16") as blocking, pytest.raises(ResponseError):
        await asyncio.wait_for(asyncio.to_thread(blocking.result, "a"), 3)


async def test_a_command_that_the_server_does_not_have_is_raised_at_once() -> None:
    with Server(args=("--rename-command", "EVALSHA", "", "--rename-command", "LRANGE", "")) as server:
        async with Client(server.url) as client:
            for call in (client.submit(HELLO), seqs(client, "a"), client.cancel("a")):
                with pytest.raises(ResponseError):
                    await asyncio.wait_for(call, 3)


@pytest.fixture
async def limited(db: Redis, redis_url: str) -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    """Makes the client of a user who may do all but what is given, as in `-lrange`."""
    clients = []

    async def allow(*rules: str) -> Client:
        await db.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">secret", "~*", "&*", "+@all", *rules)
        clients.append(Client(redis_url.replace("://", "://limited:secret@")))
        return clients[-1]

    yield allow
    for client in clients:
        await client.aclose()
    await db.execute_command("ACL", "DELUSER", "limited")


@pytest.mark.parametrize("rules", [("-lrange",), ("-subscribe",), ("resetchannels",)])
async def test_a_missing_permission_ends_a_stream(limited: Callable[..., Awaitable[Client]], rules: Any) -> None:
    client = await limited(*rules)
    with pytest.raises(NoPermissionError):
        await asyncio.wait_for(seqs(client, "a"), 3)
    with pytest.raises(NoPermissionError):
        await asyncio.wait_for(client.result("a"), 3)


async def test_a_user_who_may_not_ping_streams_through_lost_connections(
    db: Redis, limited: Callable[..., Awaitable[Client]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluice.streaming._QUIET_S", 0.1)
    client = await limited("-ping")
    stream = asyncio.create_task(seqs(client, "a"))
    await subscribed(db, keys.channel("a"))
    await say(db, event(0))
    await asyncio.sleep(0.5)  # the connection was quiet for long enough to be checked
    await db.client_kill_filter(user="limited")
    await say(db, event(1, "cancelled"))
    assert await asyncio.wait_for(stream, 5) == [0, 1]


async def test_a_log_of_another_type_ends_a_stream(db: Redis, client: Client) -> None:
    await db.set(keys.log("a"), "no list")
    with pytest.raises(ResponseError):
        await asyncio.wait_for(seqs(client, "a"), 3)


@pytest.mark.parametrize("after", [-2, 2**53 + 1, 2**63, 2**64, 1.5, True, None, "1"])
async def test_a_number_that_no_event_can_have_is_refused(client: Client, after: Any) -> None:
    with pytest.raises(ValueError, match="after"):
        await asyncio.wait_for(seqs(client, "a", after=after), 3)


async def test_the_largest_number_is_taken(db: Redis, client: Client) -> None:
    await say(db, event(0), event(1, "cancelled"))
    assert await asyncio.wait_for(seqs(client, "a", after=2**53), 3) == []


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionError("refused"), True),
        (RedisTimeoutError("late"), True),
        (OSError(113, "no route"), True),
        (BusyLoadingError("loading"), True),
        (ReadOnlyError("a replica"), True),
        (ClusterDownError("CLUSTERDOWN the cluster is down"), True),
        (ResponseError("BUSY a script runs"), True),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), True),
        (AuthenticationError("wrong"), False),
        (NoPermissionError("no permission"), False),
        (OutOfMemoryError("full"), False),
        (ConnectionError("max number of clients reached"), True),
        (ResponseError("MASTERDOWN Link with MASTER is down"), True),
        (ResponseError("MISCONF the disk is full"), False),
        (ResponseError("WRONGTYPE another type"), False),
        (ResponseError("value is BUSY"), False),
        (ResponseError("Command # 2 (SET a b) of pipeline caused error: ('BUSY a script runs',)"), True),
        (ResponseError("Command # 2 (SET a BUSY) of pipeline caused error: ('WRONGTYPE another',)"), False),
    ],
)
def test_an_outage_passes_and_a_refusal_does_not(error: Exception, passes: bool) -> None:
    assert is_transient(error) is passes


# A full server


async def test_a_cancel_that_a_full_server_does_not_keep_is_told_to_the_workers_and_to_the_caller(
    db: Redis, client: Client
) -> None:
    async with db.pubsub() as control:
        await control.subscribe(keys.CONTROL)
        await control.get_message(timeout=1)
        await db.config_set("maxmemory", 1)
        try:
            with pytest.raises(CancelNotStored) as raised:
                await client.cancel("a")
        finally:
            await db.config_set("maxmemory", 0)
        assert isinstance(raised.value.__cause__, OutOfMemoryError)
        told = await control.get_message(timeout=1)
        assert told is not None
        assert told["data"] == b"a"


async def test_a_submission_to_a_full_server_is_an_error_of_ours_and_of_redis_py_and_queues_nothing(
    db: Redis, client: Client
) -> None:
    letter = {
        "id": "a", "model": "default", "lane": "interactive", "crashes": 3, "parked_at": 1.0, "error": {},
        "body": json.dumps({"a": [{"messages": HELLO}]}),
    }  # fmt: skip
    await db.hset(keys.DEAD, "a", json.dumps(letter))
    long = [{"role": "user", "content": "x" * 100_000}]  # has a round trip of its own
    await db.config_set("maxmemory", 1)
    try:
        for call in (client.submit(HELLO), client.submit(long), client.count_tokens(HELLO), client.retry("a")):
            with pytest.raises(ServerFull) as raised:
                await asyncio.wait_for(call, 5)
            assert isinstance(raised.value, SluiceError)
            assert isinstance(raised.value, OutOfMemoryError)
    finally:
        await db.config_set("maxmemory", 0)
    assert await db.zcard(keys.queue("default", "interactive")) == 0
    assert await db.hkeys(keys.DEAD) == [b"a"]


async def test_a_cancel_without_the_right_to_publish_is_an_error(limited: Callable[..., Awaitable[Client]]) -> None:
    client = await limited("-publish")
    with pytest.raises(ResponseError, match="publish|run this command"):
        await client.cancel("a")


REFUSALS = {
    "MISCONF": ("it cannot write to its disk", ServerFull),
    "OOM": ("it is out of memory", ServerFull),
    "READONLY": ("it is a replica", ServerUnreachable),
    "NOREPLICAS": ("it refuses all writes until it has more replicas", ServerUnreachable),
    "MAXCLIENTS": ("all its connections are taken", ServerUnreachable),
}


@asynccontextmanager
async def refusing(code: str) -> AsyncIterator[str]:
    """Run a server that refuses what a client asks for this reason, and yield its URL."""
    with Server() as server:
        async with Redis.from_url(server.url) as admin:
            await admin.ping()
            match code:
                case "MISCONF":
                    async with disk_full(server):
                        yield server.url
                    return
                case "OOM":
                    await admin.config_set("maxmemory", 1)
                case "READONLY":
                    await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
                case "NOREPLICAS":
                    await admin.config_set("min-replicas-to-write", 1)
                case "MAXCLIENTS":
                    await admin.config_set("maxclients", 1)
            yield server.url


@pytest.mark.parametrize(
    ("code", "wait_worker_s"),
    [
        pytest.param(code, wait_s, marks=[pytest.mark.slow] * (code == "MAXCLIENTS" and wait_s is None))
        for code in REFUSALS
        for wait_s in (None, 0.0)
    ],
)
async def test_a_server_that_takes_no_job_says_why_even_if_its_workers_are_silent_for_that(
    code: str, wait_worker_s: float | None
) -> None:
    reason, kind = REFUSALS[code]
    # A busy server without free connections closes most of them before its reply can be read.
    outage_s = 15.0 if code == "MAXCLIENTS" else 0.5
    async with refusing(code) as url, Client(url, outage_s=outage_s) as client:
        with pytest.raises(kind) as raised:
            await client.submit(HELLO, wait_worker_s=wait_worker_s)
    assert reason in str(raised.value)
    reply = error_reply(raised.value)
    assert reply.status == 503
    assert reply.headers["x-should-retry"] == "true"
    assert reason in reply.body["error"]["message"]


async def test_a_full_disk_lets_a_client_read_and_stores_no_cancel_request() -> None:
    async with refusing("MISCONF") as url, Client(url) as client:
        assert await client.queues() == []
        with pytest.raises(CancelNotStored, match="cannot write to its disk"):
            await client.cancel("a")
        with pytest.raises(ServerFull, match="cannot write to its disk"):
            await client.ping()


async def test_an_offline_run_waits_until_the_disk_has_room() -> None:
    with Server() as server:
        async with disk_full(server) as disk:
            retries = endless_retries(disk.admin)
            write = asyncio.create_task(retries.run_until_answered(lambda: disk.admin.set("a", 1)))
            await asyncio.sleep(0.3)
            assert not write.done()
            await disk.free()
            assert await asyncio.wait_for(write, 10)
