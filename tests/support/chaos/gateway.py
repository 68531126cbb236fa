"""`kill -9` of a worker, of one of two gateways, or of the server, in the middle of streams over HTTP."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import redis.asyncio

from tests.support.chaos.gateway_clients import INTERFACES, Answer
from tests.support.chaos.harness import Figure, at_each, count_running, leaks, paced_worker, running
from tests.support.chaos.outages import DURABLE
from tests.support.stack import GatewayProcess, Server, WorkerProcess

_LEASE_S = 2.0
_GRACE_S = 2.0  # after which a worker cancels a job without a reader; every answer takes longer
_BEGUN = 10  # frames of each stream before the fault
_LIMIT_S = 120.0  # for the answers to end
_SETTLE_S = 20.0  # for jobs without a reader to be cancelled after that


@dataclass(frozen=True, slots=True)
class _Load:
    """Streams that run, and clients whose jobs are queued behind them."""

    http: httpx.AsyncClient
    answers: Sequence[Answer]
    readers: Sequence[asyncio.Task[None]]
    running: Sequence[str]  # ids of the jobs of `answers`
    leavers: Sequence[asyncio.Task[None]]
    queued: Sequence[str]  # ids of the jobs of `leavers`

    async def leave(self) -> None:
        """Close the connections of the clients whose jobs are queued."""
        for leaver in self.leavers:
            leaver.cancel()
        await asyncio.gather(*self.leavers, return_exceptions=True)

    async def read_all(self) -> None:
        """Read all streams to their ends. Raises TimeoutError."""
        async with asyncio.timeout(_LIMIT_S):
            await asyncio.gather(*self.readers)


def _worker(url: str, rows: int) -> WorkerProcess:
    return paced_worker(url, lease_s=_LEASE_S, max_rows=rows, reserved_rows=0, disconnect_grace_s=_GRACE_S)


def _gateway_of(index: int, gateways: int) -> int:
    """Return the gateway of a stream: each has all interfaces, with and without a key."""
    return index // (2 * len(INTERFACES)) % gateways


@asynccontextmanager
async def _loaded(
    gateways: Sequence[GatewayProcess], db: redis.asyncio.Redis, *, streams: int, tokens: int, leavers: int
) -> AsyncIterator[_Load]:
    """Yield when all streams have begun and the jobs of the leavers are queued behind them."""
    kinds = len(INTERFACES)
    keys = [f"key-{index}" if index // kinds % 2 else None for index in range(streams)]
    answers = [Answer(INTERFACES[index % kinds], tokens, key) for index, key in enumerate(keys)]
    urls = [gateways[_gateway_of(index, len(gateways))].url for index in range(streams)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    tasks = list[asyncio.Task[None]]()
    try:
        async with httpx.AsyncClient(limits=limits, timeout=60, trust_env=False) as http:
            async with asyncio.timeout(_LIMIT_S):
                tasks += [asyncio.create_task(each.read(http, url)) for each, url in zip(answers, urls, strict=True)]
                await _until_begun(answers)
                left = [Answer(INTERFACES[index % kinds], tokens) for index in range(leavers)]
                tasks += [
                    asyncio.create_task(each.read(http, gateways[index % len(gateways)].url))
                    for index, each in enumerate(left)
                ]
                queued = await _until_queued(db, leavers)
            yield _Load(http, answers, tasks[:streams], [each.id for each in answers], tasks[streams:], queued)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_begun(answers: Sequence[Answer]) -> None:
    """Wait until each stream is under way, or has ended."""
    while True:
        if all(len(each.frames) >= _BEGUN or each.ending for each in answers):
            return
        await asyncio.sleep(0.02)


async def _until_queued(db: redis.asyncio.Redis, jobs: int) -> list[str]:
    """Return the ids of the queued jobs when there are as many."""
    while True:
        queued = await _ids(db, b"queued")
        if len(queued) >= jobs:
            return queued
        await asyncio.sleep(0.02)


async def _ids(db: redis.asyncio.Redis, state: bytes) -> list[str]:
    """Return the ids of the jobs in this state."""
    keys = [key.decode() async for key in db.scan_iter("sluice:job:*", count=1000)]
    return [key.removeprefix("sluice:job:") for key in keys if await db.hget(key, "state") == state]  # type: ignore[misc]


async def worker_killed(url: str, *, streams: int, tokens: int, leavers: int = 6) -> list[Figure]:
    """Kill the worker; another one takes its jobs over."""
    label = f"gateway, {streams} streams, worker killed"
    async with redis.asyncio.Redis.from_url(url) as db:
        with _worker(url, streams) as first, GatewayProcess(url) as gateway:
            async with _loaded([gateway], db, streams=streams, tokens=tokens, leavers=leavers) as load:
                at_kill = await count_running(db, load.running)
                first.signal(signal.SIGKILL)
                await load.leave()
                async with running(_worker(url, streams)) as second:
                    await load.read_all()
                    settled = await _settled(db, label, load, second)
    return [at_each(label, [at_kill], streams), _whole_or_error(label, load.answers), *settled]


async def server_killed(*, streams: int, tokens: int, away_s: float, leavers: int = 6) -> list[Figure]:
    """Kill the server, and start it again with its append-only file."""
    label = f"gateway, {streams} streams, server killed"
    with Server(args=DURABLE) as server:
        async with redis.asyncio.Redis.from_url(server.url) as db:
            with _worker(server.url, streams) as worker, GatewayProcess(server.url) as gateway:
                async with _loaded([gateway], db, streams=streams, tokens=tokens, leavers=leavers) as load:
                    at_kill = await count_running(db, load.running)
                    server.kill()
                    await load.leave()
                    await asyncio.sleep(away_s)
                    await asyncio.to_thread(server.start)
                    await load.read_all()
                    settled = await _settled(db, label, load, worker)
    return [at_each(label, [at_kill], streams), _whole_or_error(label, load.answers), *settled]


async def gateway_killed(url: str, *, streams: int, tokens: int, leavers: int = 6) -> list[Figure]:
    """Kill one of two gateways; its clients read on, or try again, at the other."""
    label = f"gateway, {streams} streams, one of two killed"
    async with redis.asyncio.Redis.from_url(url) as db:
        with _worker(url, streams) as worker, GatewayProcess(url) as killed, GatewayProcess(url) as other:
            async with _loaded([killed, other], db, streams=streams, tokens=tokens, leavers=leavers) as load:
                at_kill = await count_running(db, load.running)
                cut = [each for index, each in enumerate(load.answers) if _gateway_of(index, 2) == 0]
                killed.kill()
                await asyncio.gather(*(load.readers[load.answers.index(each)] for each in cut))
                endings = [each.ending for each in cut]
                returning = [each for each in cut if each.can_continue]
                await asyncio.gather(load.leave(), *(each.read_on(load.http, other.url) for each in returning))
                await load.read_all()
                lost = [each.id for each in cut if not each.can_continue]
                settled = await _settled(db, label, load, worker, also_cancelled=lost)
    broken = endings.count("broken off")
    stayed = [each for each in load.answers if each not in cut]
    return [
        at_each(label, [at_kill], streams),
        Figure(f"{label}: its bodies that broke off", f"{len(cut)}", str(broken), broken == len(cut)),
        _all_whole(f"{label}: continued by Last-Event-ID, starting_after or key", returning),
        _all_whole(f"{label}: streams of the other", stayed),
        *settled,
    ]


def _whole_or_error(label: str, answers: Sequence[Answer]) -> Figure:
    whole = sum(each.is_whole for each in answers)
    errors = sum(each.ending == "error" for each in answers)
    value = f"{whole} whole, {errors} with an error"
    return Figure(
        f"{label}: whole, or ended by an error event", f"{len(answers)}", value, whole + errors == len(answers)
    )


def _all_whole(label: str, answers: Sequence[Answer]) -> Figure:
    whole = sum(each.is_whole for each in answers)
    return Figure(f"{label}: every token once", f"{len(answers)}", str(whole), whole == len(answers))


async def _settled(
    db: redis.asyncio.Redis, label: str, load: _Load, worker: WorkerProcess, also_cancelled: Sequence[str] = ()
) -> list[Figure]:
    """Wait until the jobs without a client have ended, and return what is left of them."""
    gone = [*load.queued, *also_cancelled]
    until = time.monotonic() + _SETTLE_S
    while True:
        cancelled = len(set(gone) & set(await _ids(db, b"cancelled")))
        left = await leaks(db)
        rows = int(await db.hget(f"sluice:worker:{worker.name}", "rows") or 0)  # type: ignore[misc]
        if (cancelled == len(gone) and not left and not rows) or time.monotonic() > until:
            break
        await asyncio.sleep(0.1)
    jobs = len([key async for key in db.scan_iter("sluice:job:*", count=1000)])
    expected = len(load.answers) + len(load.queued)
    return [
        Figure(f"{label}: jobs without a client, cancelled", f"{len(gone)}", str(cancelled), cancelled == len(gone)),
        Figure(f"{label}: rows and keys that are left", "0, 0", f"{rows}, {len(left)}", not (rows or left)),
        Figure(f"{label}: jobs in all", f"{expected}", str(jobs), jobs == expected),
    ]


async def all_killed(url: str, *, streams: int, tokens: int) -> list[Figure]:
    """Kill a worker, a gateway and the server, each in the middle of new streams."""
    figures = await worker_killed(url, streams=streams, tokens=tokens)
    async with redis.asyncio.Redis.from_url(url) as db:
        await db.flushdb()
    figures += await gateway_killed(url, streams=streams, tokens=tokens)
    return figures + await server_killed(streams=streams, tokens=tokens, away_s=2)
