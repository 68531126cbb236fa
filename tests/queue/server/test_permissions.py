import asyncio
import gc
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from importlib.resources import files

import pytest
from redis.asyncio import Connection, Redis

from sluice.batch.times import Crontab
from sluice.contract import keys
from tests.fakes import FakeChat
from tests.queue.helpers import QUEUE, ask, ended, listening, put, settings, types, until, working
from tests.support.stack import ROOT, Server
from worker.queue.cron import Cron
from worker.queue.redis_server import EXEC, MULTI, NEEDED, Need, acl_command, forbidden, names_of, redis_from_settings

ALL = ("+@all", "~*", "&*")
_OPTIONAL = (
    "info",
    "config",
    "scan",
    "client",
    "command",
    "__keyspace",
)  # without which less is checked, or jobs are polled


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One of our own: its users would be in the way of other tests."""
    with Server() as server:
        yield server


@pytest.fixture
async def admin(server: Server) -> AsyncIterator[Redis]:
    async with Redis.from_url(server.url) as admin:
        await admin.flushall()
        yield admin
        await admin.execute_command("ACL", "DELUSER", "bob")


async def denied(server: Server, admin: Redis, *allowed: str) -> list[Need]:
    await admin.execute_command("ACL", "SETUSER", "bob", "reset", "on", ">pw", "resetchannels", *allowed)
    async with redis_from_settings(settings(server.url.replace("//", "//bob:pw@"))) as redis:
        return await forbidden(redis, NEEDED)


def test_every_command_of_a_script_is_on_the_list() -> None:
    folders = (files("worker.queue") / "lua", files("sluice.contract") / "lua")
    scripts = [script.read_text() for folder in folders for script in folder.iterdir()]
    called = {name for script in scripts for name in re.findall(r"redis\.p?call\('([A-Z]+)'", script)}
    assert called
    assert called <= {need.command for need in NEEDED}


async def test_a_user_who_may_do_anything_lacks_nothing(server: Server, admin: Redis) -> None:
    assert await denied(server, admin, *ALL) == []


async def test_all_that_a_user_may_not_use_is_found_at_once(server: Server, admin: Redis) -> None:
    found = await denied(server, admin, *ALL, "-evalsha", "-exec", "-zrem", "-script|load", "-subscribe")
    assert {need.command for need in found} == {"EVALSHA", "EXEC", "ZREM", "SCRIPT LOAD", "SUBSCRIBE"}


@pytest.mark.parametrize(
    ("allowed", "lacking"),
    [
        (("+@all", "~sluice:*", "&*"), {"arq:job:x"}),
        (("+@all", "~arq:*", "&*"), {"sluice:job:x", "sluice:log:x", "sluice:result:x", "sluice:queue:x"}),
        (("+@all", "~*"), {"sluice:ch:x"}),
    ],
)
async def test_a_key_or_channel_that_a_user_may_not_touch_is_found(
    server: Server, admin: Redis, allowed: tuple[str, ...], lacking: set[str]
) -> None:
    assert {need.name for need in await denied(server, admin, *allowed)} == lacking


async def test_nothing_is_executed(server: Server, admin: Redis) -> None:
    await admin.set("arq:job:x", "a")
    await admin.zadd("sluice:queue:x", {"m": 1})
    for allowed in (ALL, (*ALL, "-multi"), (*ALL, "-exec"), ("-@all", "+multi", "~*"), ("-@all",)):
        await denied(server, admin, *allowed)
        assert sorted(await admin.keys()) == [b"arq:job:x", b"sluice:queue:x"]
        assert (await admin.get("arq:job:x"), await admin.zcard("sluice:queue:x")) == (b"a", 1)


async def test_without_multi_the_line_that_mends_it_allows_all(server: Server, admin: Redis) -> None:
    found = await denied(server, admin, "-@all")
    assert set(found) == {MULTI, EXEC}
    assert acl_command("bob", found) == acl_command("bob", NEEDED)


async def test_another_database_needs_select(server: Server, admin: Redis) -> None:
    await admin.execute_command("ACL", "SETUSER", "bob", "on", ">pw", *ALL, "-select")
    async with redis_from_settings(settings(server.url.replace("//", "//bob:pw@").replace("/0", "/1"))) as redis:
        assert [need.command for need in await forbidden(redis, NEEDED)] == ["SELECT"]


async def test_a_check_that_is_cancelled_while_its_connection_closes_leaves_no_client_open(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing = asyncio.Event()

    async def close_slowly(_: Connection) -> None:
        closing.set()
        await asyncio.Event().wait()

    async with redis_from_settings(settings(server.url)) as redis:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "disconnect", close_slowly)
            check = asyncio.create_task(forbidden(redis, NEEDED))
            await closing.wait()
            check.cancel()
            with pytest.raises(asyncio.CancelledError):
                await check
        del check
        gc.collect()  # redis-py reports a client with an open connection when it is deleted: see conftest.py


def test_what_is_denied_is_named_with_its_key() -> None:
    found = [Need("EVALSHA"), Need("GET", ("arq:job:x",), "arq:job:x"), Need("SET", ("arq:job:x", "v"), "arq:job:x")]
    assert names_of(found) == "EVALSHA; GET, SET on arq:job:x"
    assert acl_command("bob", found) == "ACL SETUSER bob ~sluice:* ~arq:* &sluice:* +evalsha +get +set"


def test_the_page_on_operations_has_the_rules_of_a_user_for_workers() -> None:
    assert (
        acl_command("worker", NEEDED).removeprefix("ACL SETUSER worker ")
        in (ROOT / "docs" / "operations.md").read_text()
    )


async def test_the_rules_are_enough_for_all_that_a_worker_does(server: Server, admin: Redis) -> None:
    await admin.execute_command("ACL", "SETUSER", "bob", "reset", "on", ">pw", "resetchannels", "-@all")
    await admin.execute_command(*acl_command("bob", NEEDED).split())
    await admin.execute_command("ACL", "LOG", "RESET")
    chat = FakeChat()
    given = settings(server.url.replace("//", "//bob:pw@"), lease_s=1, disconnect_grace_s=0.1)
    async with working(given, chat.chat):
        await ask(admin, "good", {"say": ["Hello"]})
        await ended(admin, "good")
        await listening(admin)
        await ask(admin, "hangs", {"then": "hang"}, lane="batch")
        await until(lambda: bool(chat.running))
        await cancel(admin, "hangs")
        assert types(await ended(admin, "hangs"))[-1] == "cancelled"
        await put(admin, "queued", None, at_ms=9_999_999_999_999)
        await cancel(admin, "queued")
        assert types(await ended(admin, "queued")) == ["cancelled"]
        for lapses in (1, 2):  # a job whose worker died, and one that took three down with it
            await admin.hset(
                keys.job(f"lapsed-{lapses}"),
                mapping={"state": "running", "attempt": lapses, "crashes": lapses, "probation": 1, "lapses": lapses},
            )
            await ask(admin, f"lapsed-{lapses}", {"say": ["a"]})
            await ended(admin, f"lapsed-{lapses}")
        assert await admin.hlen(keys.DEAD) == 1
        night = Cron("night", lambda: None, Crontab("* * * * *"), free=lambda: True)
        async with redis_from_settings(given) as redis:
            for minute in (0, 5):
                await night.begin_if_due(redis, "ada", datetime(2026, 3, 13, 12, minute, tzinfo=UTC))
        await ask(admin, "left", {"then": "hang"})
        await until(lambda: bool(chat.running))
    assert await admin.hget(keys.job("left"), "state") == b"queued"
    assert await admin.zcard(QUEUE) == 1
    refused = {entry[b"object"].decode() for entry in map(pairs, await admin.execute_command("ACL", "LOG"))}
    assert not {name for name in refused if not name.startswith(_OPTIONAL)}


def pairs(flat: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


async def cancel(db: Redis, job_id: str) -> None:
    await db.set(keys.cancel(job_id), "1", ex=60)
    await db.publish(keys.CONTROL, job_id)
