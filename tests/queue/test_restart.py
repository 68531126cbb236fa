"""Workers drain and restart when they are asked: one process each, and one worker of a model after the other."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from signal import SIGHUP, SIGTERM

import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.contract import keys
from tests.fakes import FakeChat
from tests.line import Line
from tests.queue.held import claim_of, holding
from tests.queue.helpers import ask, ended, listening, settings, types, until, working
from worker.queue.presence import Presence, RestartTurn
from worker.queue.redis_server import redis_from_settings
from worker.queue.worker import QueueWorker


def states(of: QueueWorker) -> tuple[bool, bool]:
    return of.stopping.is_set(), of.restarts


async def fields(client: Client, name: str = "ada") -> dict[str, str]:
    """Return what the worker publishes, once it does."""
    async with asyncio.timeout(30):
        while True:
            for worker in await client.workers():
                if worker.get("name") == name:
                    return worker
            await asyncio.sleep(0.01)


async def has_left(client: Client) -> bool:
    return not await client.workers()


async def test_a_worker_that_is_asked_to_drain_ends_its_jobs_with_their_leases_and_leaves(
    redis_url: str, db: Redis, client: Client
) -> None:
    chat = FakeChat()
    async with working(settings(redis_url, grace_s=60), chat.chat) as worker:
        await ask(db, "a", {"say": ["Hello"], "then": "hang"})
        await until(lambda: len(chat.began) == 1)
        await listening(db)
        assert await client.ask_worker(await fields(client), "drain")
        await until(lambda: _is_draining(client))  # the message is faster than a third of a lease, 3.3 s
        await ask(db, "b", {"say": ["Hello"]})
        await asyncio.sleep(0.2)
        assert (len(chat.began), await db.exists("arq:in-progress:a")) == (1, 1)
        assert states(worker) == (True, False)
        await client.cancel("a")
        assert types(await ended(db, "a"))[-1] == "cancelled"
        await until(lambda: has_left(client))


async def _is_draining(client: Client) -> bool:
    return (await fields(client))["state"] == "draining"


async def test_what_a_worker_is_asked_while_its_connections_are_down_reaches_it_later(
    redis_url: str, client: Client
) -> None:
    async with Line(redis_url) as line, working(settings(line.url, lease_s=3), FakeChat().chat) as worker:
        shown = await fields(client)
        line.down()
        assert await client.ask_worker(shown, "drain")
        await asyncio.sleep(0.1)
        assert states(worker) == (False, False)
        line.up()
        await until(lambda: states(worker) == (True, False))


@pytest.mark.parametrize("asked", ["drain", "drain 1", "drain 1795305600.5", "leave {}", "restart", "{}", "", b"\xff"])
async def test_what_another_process_is_asked_or_a_foreign_value_drains_no_worker(
    redis_url: str, db: Redis, client: Client, asked: str | bytes
) -> None:
    async with working(settings(redis_url), FakeChat().chat) as worker:
        shown = await fields(client)
        await listening(db)
        text = asked.format(shown["started_at"]) if isinstance(asked, str) else asked
        await db.hset(keys.worker("ada"), mapping={"asked": text, "rows": "unread"})
        await db.publish(keys.CONTROL, "worker ada")
        await until(lambda: _has_published(db))
        assert states(worker) == (False, False)


async def _has_published(db: Redis) -> bool:
    return await db.hget(keys.worker("ada"), "rows") == b"0"


async def test_a_process_that_has_ended_cannot_be_asked(db: Redis, client: Client) -> None:
    assert not await client.ask_worker({"name": "ada", "started_at": "1"}, "drain")
    await db.hset(keys.worker("ada"), "started_at", "2")
    assert not await client.ask_worker({"name": "ada", "started_at": "1"}, "drain")
    assert not await client.ask_worker({"name": "ada"}, "drain")
    assert await db.hgetall(keys.worker("ada")) == {b"started_at": b"2"}
    await db.set(keys.worker("bob"), "foreign")
    assert not await client.ask_worker({"name": "bob", "started_at": "1"}, "drain")


async def test_a_flood_of_messages_publishes_a_worker_a_few_times(
    redis_url: str, db: Redis, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = 0
    publish = Presence.publish

    async def counted(*args: object) -> object:
        nonlocal published
        published += 1
        return await publish(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Presence, "publish", counted)
    async with working(settings(redis_url), FakeChat().chat):
        await fields(client)
        await listening(db)
        async with db.pipeline(transaction=False) as pipe:
            for _ in range(500):
                pipe.publish(keys.CONTROL, "worker ada")
            await pipe.execute()
        await asyncio.sleep(0.3)
        assert published < 15


async def test_sighup_restarts_and_a_signal_after_it_stops(redis_url: str) -> None:
    async with holding(redis_url, grace_s=60) as parts:
        turns = asyncio.create_task(parts.worker._turn.run())
        await parts.held.start(claim_of("a"))
        os.kill(os.getpid(), SIGHUP)
        await until(lambda: states(parts.worker) == (True, True))
        parts.worker.on_signal(SIGTERM)
        assert (*states(parts.worker), parts.worker.force_stop.is_set()) == (True, False, False)
        parts.worker.on_signal(SIGTERM)
        assert parts.worker.force_stop.is_set()
        turns.cancel()


async def test_sighup_of_a_closed_terminal_stops(redis_url: str) -> None:
    async with holding(redis_url) as parts:
        parts.worker._on_terminal = True
        os.kill(os.getpid(), SIGHUP)
        await until(lambda: states(parts.worker) == (True, False))


@asynccontextmanager
async def turn_of(url: str, name: str, begun: list[str]) -> AsyncIterator[RestartTurn]:
    given = settings(url, worker_name=name)
    async with redis_from_settings(given) as redis:
        turn = RestartTurn(redis, given, lambda: begun.append(name))
        running = asyncio.create_task(turn.run())
        yield turn
        running.cancel()


async def test_the_next_restarts_when_the_one_before_is_back(redis_url: str, db: Redis) -> None:
    begun = list[str]()
    async with turn_of(redis_url, "ada", begun) as ada, turn_of(redis_url, "bob", begun) as bob:
        ada.ask()
        await until(lambda: begun == ["ada"])
        bob.ask()
        await asyncio.sleep(1.2)
        assert begun == ["ada"]
        await db.hset(keys.worker("ada"), "state", "running")
        await ada.end()
        await until(lambda: begun == ["ada", "bob"])
        await ada.end()
        assert await db.get(keys.restart("default")) == b"bob", "a turn is ended by the one that has it"
        assert 600_000 < await db.pttl(keys.restart("default")) <= 630_000


async def test_a_worker_that_does_not_come_back_ends_the_series(
    redis_url: str, db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.queue")
    begun = list[str]()
    async with turn_of(redis_url, "bob", begun) as bob:
        await db.set(keys.restart("default"), "ada")
        await db.hset(keys.worker("bob"), "asked", "restart 1")
        bob.ask()
        await until(lambda: "restarts when ada is back" in caplog.text)
        await db.delete(keys.restart("default"))
        await until(lambda: "ada did not come back" in caplog.text)
        await until(lambda: _is_free(db))
        assert (begun, await db.hget(keys.worker("bob"), "asked")) == ([], None)
        bob.ask()
        await until(lambda: begun == ["bob"])


async def _is_free(db: Redis) -> bool:
    return not await db.exists(keys.restart("default"))


async def test_a_foreign_value_is_no_worker_that_restarts(redis_url: str, db: Redis) -> None:
    begun = list[str]()
    async with turn_of(redis_url, "ada", begun) as ada:
        await db.rpush(keys.restart("default"), "x")
        ada.ask()
        await until(lambda: begun == ["ada"])


async def test_a_worker_that_is_back_ends_its_turn(redis_url: str, db: Redis, client: Client) -> None:
    await db.set(keys.restart("default"), "ada")
    async with working(settings(redis_url), FakeChat().chat):
        await fields(client)
        await until(lambda: _is_free(db))
