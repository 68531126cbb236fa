"""The thread that keeps leases, and that ends a process which hangs."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import redis.asyncio

from sluice import Client
from tests.support.chaos.harness import chat_request, paced_worker, running, until_decoding
from tests.waiting import until
from worker.monitoring.health import Heartbeat
from worker.queue.job.claims import EXIT_STALLED, Claim, Claims, LeaseKeeper
from worker.settings import Settings

LEASE_S = 0.3  # a worker may not have a lease as short as this


def settings(url: str, **more: object) -> Settings:
    given = {"redis_url": url, "model": "none", "worker_name": "keeper", "watchdog_s": 0.2, **more}
    return Settings(_env_file=None, **given).model_copy(update={"lease_s": LEASE_S})  # type: ignore[arg-type]


async def claimed(client: Client, db: redis.asyncio.Redis, given: Settings, job_id: str = "job") -> Claim:
    await client.submit(chat_request(1), id=job_id)
    (claim,) = await Claims(db, given).take("interactive", 1)
    return claim


class Keeping:
    def __init__(self, given: Settings, held: list[Claim] | Callable[[], list[Claim]], pulses: list[Heartbeat]) -> None:
        self.lost: list[Claim] = []
        self.hung = threading.Event()
        ask_held = held if callable(held) else lambda: held
        self._keeper = LeaseKeeper(given, ask_held, self.lost.append, pulses, self.hung.set)

    def __enter__(self) -> "Keeping":
        self._keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper.stop()


def wait_for(true: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


async def until_kept(db: redis.asyncio.Redis, *names: bytes) -> None:
    """Wait until the keeper's worker holds these leases."""

    async def are_kept() -> bool:
        return set(await db.mget(names)) == {b"keeper:1"}

    await until(are_kept)


@pytest.mark.timing
async def test_a_lease_is_renewed_while_the_event_loop_is_blocked(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    given = settings(redis_url)
    claim = await claimed(client, db, given)
    with Keeping(given, [claim], []) as keeping:
        time.sleep(2 * LEASE_S)  # on the loop
        assert await db.exists("arq:in-progress:job")
    assert keeping.lost == []


async def test_a_lease_that_ran_out_unnoticed_is_taken_back(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    given = settings(redis_url)
    claim = await claimed(client, db, given)
    await db.delete("arq:in-progress:job")
    with Keeping(given, [claim], []):
        await until_kept(db, b"arq:in-progress:job")


async def test_a_job_that_another_attempt_owns_is_told_lost(
    redis_url: str, client: Client, db: redis.asyncio.Redis
) -> None:
    given = settings(redis_url)
    claim = await claimed(client, db, given)
    await db.hset("sluice:job:job", "attempt", 2)
    with Keeping(given, [claim], []) as keeping:
        assert wait_for(lambda: keeping.lost != [])
    assert keeping.lost[0] is claim
    assert await db.pttl("arq:in-progress:job") <= 1000 * LEASE_S


@pytest.mark.timing
def test_a_pulse_that_stops_ends_the_process_and_one_at_rest_does_not(redis_url: str) -> None:
    beating, resting, stopped = Heartbeat("beating"), Heartbeat("resting"), Heartbeat("stopped")
    resting.beat()
    resting.pause()
    with Keeping(settings(redis_url), [], [resting]) as calm:
        time.sleep(0.5)
        assert not calm.hung.is_set()
    stopped.beat()
    with Keeping(settings(redis_url), [], [beating, stopped]) as keeping:
        assert wait_for(keeping.hung.is_set)


def test_a_server_that_is_away_does_not_end_the_keeper(client: Client, redis_url: str) -> None:
    away = settings("redis://127.0.0.1:1/0")
    claim = Claim("job", "interactive", 1, 0, False, 0.0, 0, b"", 0)
    with Keeping(away, [claim], []) as keeping:
        time.sleep(LEASE_S)
        assert keeping._keeper._thread.is_alive()
        assert keeping.lost == []


async def test_a_worker_whose_loop_hangs_ends_and_says_why(redis_url: str, client: Client) -> None:
    async with running(paced_worker(redis_url, lease_s=1, watchdog_s=1.5)) as worker:
        job = await client.submit(chat_request(30, "block 30"))
        await until_decoding(client, [job.id], 2)
        assert await asyncio.to_thread(worker.wait) == EXIT_STALLED
        assert "the event loop has hung" in worker.log()


async def test_the_lease_of_an_id_that_is_not_utf_8_is_renewed_with_those_of_others(
    redis_url: str, db: redis.asyncio.Redis
) -> None:
    given = settings(redis_url)
    names = [b"arq:in-progress:\xff\xfe", b"arq:in-progress:good"]
    await db.zadd("sluice:queue:default:interactive", {b"\xff\xfe": 1, "good": 1})
    claims = await Claims(db, given).take("interactive", 2)
    await db.delete(*names)
    with Keeping(given, claims, []) as keeping:
        await until_kept(db, *names)
    assert keeping.lost == []


async def test_a_round_that_fails_is_logged_and_the_next_one_renews(
    redis_url: str, client: Client, db: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    given = settings(redis_url)
    claim = await claimed(client, db, given)
    await db.delete("arq:in-progress:job")
    rounds = [[replace(claim, job_id=None)], [claim]]  # type: ignore[arg-type]
    with Keeping(given, lambda: rounds.pop(0) if len(rounds) > 1 else rounds[0], []) as keeping:
        await until_kept(db, b"arq:in-progress:job")
    assert "leases were not renewed" in caplog.text
    assert not keeping.hung.is_set()


def test_the_end_of_the_thread_ends_the_process(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", ends.append)

    def held() -> list[Claim]:
        raise KeyboardInterrupt

    with Keeping(settings(redis_url), held, []) as keeping:
        assert wait_for(lambda: bool(ends))  # the last thing that the thread does
    assert keeping.hung.is_set()
    assert ends[0].exc_type is KeyboardInterrupt
