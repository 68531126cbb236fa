"""The cost of a claim for the server: with jobs that wait, jobs that run, and workers that are known."""

import asyncio
import secrets
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import product

from redis.asyncio import Redis

from scripts.benchmarks.capacity.load import server_name
from scripts.benchmarks.serve.results import Verdict
from sluice import Client
from sluice.contract import keys
from tests.support.stack import Server
from worker.queue.job.claims import Claims, WorkerRows
from worker.queue.redis_server import redis_from_settings
from worker.settings import Settings

ROWS = 16
WAITING = (1, ROWS)
RUNNING = (0, 2048)
WORKERS = (1, 8, 32, 128)
MARKS = 24  # of a job with marks: those of a prompt of 48 to 256 KiB are 12 to 24

# Marks of the jobs, and if workers tell each other what they hold. Without affinity marks are not read.
KINDS = ((0, False), (0, True), (MARKS, True))


@dataclass(frozen=True, slots=True)
class ClaimCost:
    """The median time of the server for one call of claim.lua, and its quarters: a quarter of the calls took less than
    the first, a quarter more than the last."""

    server: str  # its kind and version
    marks: int  # of each job that waits: the first half are common to all, and two other workers hold them
    affinity: bool
    waiting: int  # jobs, all of which the call claims
    running: int  # jobs of other workers in the same queue
    workers: int  # that the queue's model has, the one that claims included; the others have no free row
    median_us: float
    quarters_us: tuple[float, float]


@dataclass(slots=True)
class _Fleet:
    """Stand-in for the record that a worker with an engine gives its claims."""

    ready_ms: int  # until it is done with what it has
    wid: str = field(default_factory=lambda: secrets.token_hex(3))

    def said(self, free_rows: int) -> tuple[str, str, int]:
        """Return the id, a record of a worker with half its rows' prompts under way, and when it is ready."""
        now_ms = round(time.time() * 1000)
        record = f"{now_ms + 600_000} {now_ms} {free_rows} {ROWS} 60000 480 20 250 180 1 900 2 4000 1 9000 1"
        return self.wid, record, now_ms + self.ready_ms

    def claimed(self, *_: object) -> None:
        """Count no job."""

    def counted(self, **_: object) -> None:
        """Count no claim."""


class _Queue:
    """The queue of a model of its own, with jobs that run on other workers, and one worker that claims."""

    def __init__(self, url: str, running: int, workers: int) -> None:
        self.running, self.workers = running, workers
        self._url, self._model = url, f"running-{running}-workers-{workers}"
        self._common = [secrets.token_hex(6) for _ in range(MARKS // 2)]

    def _settings(self, worker: int, *, affinity: bool = True) -> Settings:
        return Settings(
            redis_url=self._url, model="none", model_name=self._model, worker_name=f"worker-{worker}", max_rows=ROWS,
            lease_s=600, queue_limit=1_000_000, affinity=affinity,
        )  # fmt: skip

    async def fill(self, client: Client, stack: AsyncExitStack) -> None:
        """Queue the jobs that run, and let other workers claim them: one alone if only this worker shall be known."""
        others = max(1, self.workers - 1)
        redis = await stack.enter_async_context(redis_from_settings(self._settings(0)))
        for number in range(self.running):
            await client.submit({"messages": []}, model=self._model, id=f"{self._model}.{number}")
        claimed, wids = 0, list[str]()
        for worker in range(1, others + 1):
            share = self.running * worker // others - claimed
            fleet = _Fleet(ready_ms=60_000 + worker)
            claims = Claims(redis, self._settings(worker), fleet if self.workers > 1 else None)
            while share and (found := len(await claims.take("interactive", share))):  # a call claims no more than 256
                share, claimed = share - found, claimed + found
            if self.workers > 1:
                full = WorkerRows(ROWS, ROWS, {"interactive": 0, "batch": 0})
                await claims.take("interactive", 0, rows=full)
                wids.append(fleet.wid)
        assert claimed == self.running
        for mark in self._common:
            await redis.set(keys.prefix_mark(self._model, mark), f" {' '.join(wids[:2])} ")
        self._claims = {
            affinity: Claims(redis, self._settings(0, affinity=affinity), _Fleet(ready_ms=0) if affinity else None)
            for affinity in (False, True)
        }

    async def cost_us(self, client: Client, redis: Redis, marks: int, affinity: bool, waiting: int) -> float:
        """Queue jobs, claim them in one call, and return the time that the server needed for it, in microseconds."""
        for number in range(waiting):
            job_id = f"{self._model}.{waiting}.{number}"
            await client.submit({"messages": []}, model=self._model, id=job_id)
            names = [*self._common, *(secrets.token_hex(6) for _ in range(marks // 2))] if marks else []
            told = " ".join(f"{name} {1024 * at}" for at, name in enumerate(names, 1))
            await redis.hset(keys.job(job_id), mapping={"marks": told, "bytes": 1024 * marks + 100})  # type: ignore[misc]
        before = await _evalsha_us(redis)
        rows = WorkerRows(0, ROWS, {"interactive": ROWS, "batch": ROWS})
        claims = await self._claims[affinity].take("interactive", ROWS, rows=rows)
        spent = await _evalsha_us(redis) - before
        assert len(claims) == waiting
        for claim in claims:
            await self._claims[affinity].release(claim)
            await client.cancel(claim.job_id)
            await redis.delete(f"sluice:job:{claim.job_id}")  # so that the next call may use the id
        return spent


async def _evalsha_us(redis: Redis) -> int:
    return int((await redis.info("commandstats")).get("cmdstat_evalsha", {"usec": 0})["usec"])


def measure(binary: str, calls: int) -> list[ClaimCost]:
    """Measure all cases in turn on a server of their own, that many calls each."""
    with Server(binary) as server:
        return asyncio.run(_measure(server.url, calls))


async def _measure(url: str, calls: int) -> list[ClaimCost]:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(url))
        redis = await stack.enter_async_context(Redis.from_url(url))
        queues = [_Queue(url, running, workers) for running, workers in product(RUNNING, WORKERS)]
        for queue in queues:
            await queue.fill(client, stack)
        cases = {
            (queue, marks, affinity, waiting): list[float]()
            for queue, (marks, affinity), waiting in product(queues, KINDS, WAITING)
        }
        for turn in range(calls + 2):  # the first ones load the scripts
            # If running jobs were checked twice a second, each call would pay as much of that as a call can. Their
            # leases end after the run; of leases of 10 s, 2,048 jobs have 205 checks a second, in whatever claims come.
            await asyncio.sleep(0.5)
            for (queue, marks, affinity, waiting), spent in cases.items():
                cost = await queue.cost_us(client, redis, marks, affinity, waiting)
                if turn >= 2:
                    spent.append(cost)
        name = server_name(await redis.info("server"))
    return [_cost(name, *case, spent) for case, spent in cases.items()]


def _cost(server: str, queue: _Queue, marks: int, affinity: bool, waiting: int, spent: Sequence[float]) -> ClaimCost:
    first, median, last = statistics.quantiles(spent, n=4)
    return ClaimCost(server, marks, affinity, waiting, queue.running, queue.workers, median, (first, last))


def judge(costs: Sequence[ClaimCost]) -> list[Verdict]:
    """Compare one server's costs with their bars."""
    bars_ms = {1: 0.15, ROWS: 1.2}
    by_case = {(name_of(cost), cost.running): cost.median_us for cost in costs}
    verdicts = [
        Verdict.at_most(
            f"ms for {name_of(cost)}, {cost.running:,} running", bars_ms[cost.waiting], cost.median_us / 1000
        )
        for cost in costs
    ]
    for name in dict.fromkeys(map(name_of, costs)):
        ratio = by_case[name, RUNNING[-1]] / by_case[name, RUNNING[0]]
        verdicts.append(Verdict.at_most(f"{RUNNING[-1]:,} running / none, {name}", 1.1, ratio))
    return verdicts


def name_of(cost: ClaimCost) -> str:
    """Return what a case is called, but for the jobs that run."""
    affinity = f"{cost.marks} marks" if cost.affinity else "no affinity"
    return f"{cost.waiting} waiting, {affinity}, {cost.workers} workers"
