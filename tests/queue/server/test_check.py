import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis as sync_redis
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from tests.fakes import FakeChat
from tests.queue.helpers import (
    ask,
    ended,
    envelope,
    log,
    put,
    queue_worker,
    settings,
    until,
    until_it_has_said,
    words,
    working,
)
from tests.support.stack import Server, free_port
from worker.errors import CannotStart
from worker.queue.redis_server import RedisServer, redis_from_settings, server_problem, warnings

# Answers to INFO and CONFIG GET
INFO = {"redis_version": "7.0.0", "maxmemory_policy": "noeviction"}
CONFIG = {"save": "3600 1", "appendonly": "no"}


# What is made of what a server tells


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"redis_version": "8.2.1"},
        {"redis_version": "7.2.4", "valkey_version": "9.1.2", "server_name": "valkey"},
        {"redis_version": "6.2.0", "valkey_version": "10.0.0"},
        {"redis_version": "255.255.255"},
        {"redis_version": "unstable"},
        {"cluster_enabled": 0, "redis_mode": "standalone"},
    ],
)
def test_a_server_that_will_do_is_not_refused(info: dict[str, Any]) -> None:
    assert server_problem({**INFO, **info}) is None


@pytest.mark.parametrize(
    "info",
    [
        {"redis_version": "6.2.5"},
        {"redis_version": "5.0.14"},
        {"cluster_enabled": 1},
        {"redis_mode": "cluster"},
        {"server_mode": "cluster"},
    ],
)
def test_a_server_on_which_the_scripts_fail_is_refused(info: dict[str, Any]) -> None:
    assert server_problem({**INFO, **info}) is not None


def test_a_server_that_tells_nothing_is_not_refused() -> None:
    assert server_problem(None) is None


def test_a_sound_server_is_not_warned_of() -> None:
    assert warnings(INFO, CONFIG, keyspace_events=True) == []


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random", "volatile-ttl", "volatile-lru"])
def test_a_server_that_evicts_is_warned_of_with_the_line_that_mends_it(policy: str) -> None:
    (by_info,) = warnings({**INFO, "maxmemory_policy": policy}, CONFIG, keyspace_events=True)
    assert policy in by_info
    assert "CONFIG SET maxmemory-policy noeviction" in by_info
    config = {"maxmemory-policy": policy, "save": "", "appendonly": "yes"}
    assert warnings({"redis_version": "7.0.0"}, config, keyspace_events=True) == [by_info]


def test_a_server_without_persistence_is_warned_of_with_the_line_that_mends_it() -> None:
    (warning,) = warnings(INFO, {"save": "", "appendonly": "no"}, keyspace_events=True)
    assert "CONFIG SET appendonly yes" in warning


def test_a_denied_command_is_one_warning_that_says_what_follows() -> None:
    assert len(warnings(None, None, keyspace_events=True)) == 1
    (polled,) = warnings(INFO, None, keyspace_events=True)
    (wanted_so,) = warnings(INFO, None, keyspace_events=False)
    assert ("poll" in polled, "poll" in wanted_so, "INFO" in polled) == (True, False, False)


# Servers


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One of our own: its passwords would be in the way of other tests."""
    with Server() as server, sync_redis.Redis.from_url(server.url) as admin:
        admin.config_set("save", "3600 1")
        admin.execute_command("ACL", "SETUSER", "bob", "on", ">pw", "~*", "&*", "+@all", "-config", "-info")
        yield server


@pytest.fixture
async def admin(server: Server) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as admin:
        await admin.flushall()
        yield admin


def with_user(url: str, user: str) -> str:
    return url.replace("//", f"//{user}@")


async def check(url: str) -> float:
    given = settings(url)
    async with redis_from_settings(given) as redis:
        return await RedisServer(redis, given).connect()


async def why_not(url: str) -> str:
    with pytest.raises(CannotStart) as refused:
        await check(url)
    return str(refused.value)


@pytest.mark.parametrize(
    ("user", "way_out"),
    [("bob:wrong", "correct or remove them."), (":wrong", "remove it from the URL."), ("eve:pw", "remove them.")],
)
async def test_a_wrong_password_is_a_reason_not_to_start(server: Server, user: str, way_out: str) -> None:
    said = await why_not(with_user(server.url, user))
    assert said.startswith(f"SLUICE_REDIS_URL={with_user(server.url, '***')}: it ")
    assert said.endswith(way_out)


async def test_a_missing_password_is_a_reason_not_to_start() -> None:
    with Server() as server:
        async with Redis.from_url(server.url) as admin:
            await admin.config_set("requirepass", "pw")
        assert "it requires a password; put it into the URL" in await why_not(server.url)
        assert (await why_not(with_user(server.url, ":no"))).endswith("it refuses the user or the password in the URL; "
                                                                      "correct them.")  # fmt: skip


async def test_a_server_in_cluster_mode_is_a_reason_not_to_start() -> None:
    with Server(args=("--cluster-enabled", "yes", "--cluster-port", str(free_port()))) as server:
        assert "cluster mode" in await why_not(server.url)


async def test_commands_that_are_denied_are_a_reason_not_to_start(server: Server, admin: Redis) -> None:
    await admin.execute_command("ACL", "SETUSER", "ann", "on", ">pw", "~*", "&*", "+@all", "-evalsha", "-zrem")
    said = await why_not(with_user(server.url, "ann:pw"))
    assert "may not use EVALSHA; ZREM on sluice:queue:x. Run ACL SETUSER ann " in said
    assert "+evalsha +zrem" in said
    await admin.execute_command("ACL", "SETUSER", "ann", "+evalsha", "+zrem")
    await check(with_user(server.url, "ann:pw"))


@pytest.mark.parametrize("database", ["16", "99999999999999999999"])
async def test_a_database_that_the_server_does_not_have_is_a_reason_not_to_start(server: Server, database: str) -> None:
    said = await why_not(server.url.removesuffix("0") + database)
    assert "it refuses the connection" in said
    assert "The number behind the last / must be that of a database that it has" in said


async def test_a_worker_that_is_given_such_a_database_ends_at_once(server: Server) -> None:
    given = settings(server.url.removesuffix("0") + "16")
    async with redis_from_settings(given) as redis:
        worker = queue_worker(redis, given, FakeChat().chat)
        with pytest.raises(CannotStart):
            await asyncio.wait_for(worker.main(), 60)


async def test_commands_that_the_server_does_not_have_are_a_reason_not_to_start() -> None:
    renamed = ("--rename-command", "EVALSHA", "", "--rename-command", "ZRANK", "other")
    with Server(args=renamed) as server:
        said = await why_not(server.url)
    assert "it has no EVALSHA, ZRANK; remove the rename-command lines" in said


async def test_a_server_that_is_busy_with_a_script_is_waited_for(server: Server, admin: Redis) -> None:
    """Commands are refused with an error code meanwhile, among them the one that selects a database."""
    await admin.config_set("busy-reply-threshold", 50)
    async with Redis.from_url(server.url) as blocking:
        script = asyncio.ensure_future(blocking.eval("while true do end", 0))
        try:
            await until(lambda: is_busy(admin))
            with pytest.raises(ResponseError, match="BUSY"):
                await check(server.url.removesuffix("0") + "1")
        finally:
            await admin.script_kill()
            await asyncio.gather(script, return_exceptions=True)
    await check(server.url.removesuffix("0") + "1")


async def is_busy(admin: Redis) -> bool:
    try:
        await admin.get("x")
    except ResponseError as error:
        return "BUSY" in str(error)
    return False


async def test_a_server_that_is_away_is_no_reason_not_to_start() -> None:
    given = settings(f"redis://127.0.0.1:{free_port()}/0")
    async with redis_from_settings(given) as redis:
        await RedisServer(redis, given).check_early()


async def test_denied_info_and_config_are_one_warning_and_the_poll(
    server: Server, admin: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(settings(with_user(server.url, "bob:pw"), poll_s=0.05), FakeChat().chat):
        await put(admin, "a", envelope({"say": ["Hello"]}))
        assert words(await ended(admin, "a")) == "Hello"
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


async def test_where_an_operator_has_set_keyspace_events_they_wake_though_config_is_denied(
    server: Server, admin: Redis
) -> None:
    await admin.config_set("notify-keyspace-events", "Kz")
    async with working(settings(with_user(server.url, "bob:pw"), poll_s=60, lease_s=1200), FakeChat().chat):
        await until(lambda: True)
        await subscribed(admin)
        await put(admin, "a", envelope({"say": ["Hello"]}))
        assert words(await ended(admin, "a", within_s=30)) == "Hello"
    await admin.config_set("notify-keyspace-events", "")


async def test_a_channel_that_is_denied_keeps_nobody_from_the_others(server: Server, admin: Redis) -> None:
    allowed = ("on", ">pw", "+@all", "~*", "resetchannels", "&sluice:*")
    await admin.execute_command("ACL", "SETUSER", "cid", *allowed)
    async with working(settings(with_user(server.url, "cid:pw"), poll_s=60, lease_s=1200), FakeChat().chat):
        await subscribed(admin)
        await ask(admin, "a", {"say": ["Hello"]})
        assert words(await ended(admin, "a", within_s=30)) == "Hello"


async def subscribed(db: Redis) -> None:
    """Wait until the worker listens, to all channels that it may use at once."""

    async def is_heard() -> bool:
        return bool(await db.publish("sluice:control", ""))

    await until(is_heard)


async def test_a_server_that_denies_info_may_have_come_up_just_now(server: Server) -> None:
    assert await check(with_user(server.url, "bob:pw")) == 0.0

    async def is_older() -> bool:
        return bool(await check(server.url))

    await until(is_older)  # in whole seconds


# Later than the start


@asynccontextmanager
async def another_password(admin: Redis) -> AsyncIterator[None]:
    await admin.execute_command("ACL", "SETUSER", "dan", "resetpass", ">new")
    await admin.client_kill_filter(user="dan")
    yield
    await admin.execute_command("ACL", "SETUSER", "dan", ">pw")


async def test_a_change_of_password_kills_no_running_job(
    server: Server, admin: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    await admin.execute_command("ACL", "SETUSER", "dan", "on", ">pw", "~*", "&*", "+@all")
    said = [f" {k}" for k in range(30)]
    async with working(settings(with_user(server.url, "dan:pw"), lease_s=1), FakeChat().chat):
        await ask(admin, "a", {"say": said, "pace_s": 0.05})
        await until_it_has_said(admin, "a", 3)
        async with another_password(admin):
            await until(lambda: "waiting for redis" in caplog.text)
            before = len(await log(admin, "a"))
            await asyncio.sleep(1)
            assert len(await log(admin, "a")) == before
        assert words(await ended(admin, "a")) == "".join(said)
        assert {event["attempt"] for event in await log(admin, "a")} == {1}
    waits = [record.getMessage() for record in caplog.records if "waiting for redis" in record.getMessage()]
    assert len(waits) == 1


async def test_a_worker_that_never_met_its_server_stops_when_it_is_told() -> None:
    given = settings(f"redis://127.0.0.1:{free_port()}/0")
    async with redis_from_settings(given) as redis:
        worker = queue_worker(redis, given, FakeChat().chat)
        asyncio.get_running_loop().call_later(0.1, worker.stop)
        assert not await asyncio.wait_for(worker.connect(), 60)
