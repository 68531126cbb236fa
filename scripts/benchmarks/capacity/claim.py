"""The cost of a claim for the server: with jobs that wait, jobs that run, and workers that are known."""

import asyncio
import statistics
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import product

from redis.asyncio import Redis

from scripts.benchmarks.capacity.load import server_name
from scripts.benchmarks.serve.results import Verdict
from sluice import Client
from tests.support.stack import Server
from worker.queue.job.claims import Claims, WorkerRows
from worker.queue.redis_server import redis_from_settings
from worker.settings import Settings

ROWS = 16
WAITING = (1, ROWS)
RUNNING = (0, 2048)
WORKERS = (1, 128)


@dataclass(frozen=True, slots=True)
class ClaimCost:
    """The median time of the server for one call of claim.lua, and its quarters: a quarter of the calls took less than
    the first, a quarter more than the last."""

    server: str  # its kind and version
    waiting: int  # jobs, all of which the call claims
    running: int  # jobs of other workers in the same queue
    workers: int  # that the queue's model has, the one that claims included; the others have no free row
    median_us: float
    quarters_us: tuple[float, float]


class _Queue:
    """The queue of a model of its own, with jobs that run on other workers, and one worker that claims."""

    def __init__(self, url: str, running: int, workers: int) -> None:
        self.running, self.workers = running, workers
        self._url, self._model = url, f"running-{running}-workers-{workers}"

    def _settings(self, worker: int) -> Settings:
        return Settings(
            redis_url=self._url, model="none", model_name=self._model, worker_name=f"worker-{worker}", max_rows=ROWS,
            lease_s=600, queue_limit=1_000_000,
        )  # fmt: skip

    async def fill(self, client: Client, stack: AsyncExitStack) -> None:
        """Queue the jobs that run, and let other workers claim them: one alone if only this worker shall be known."""
        others = max(1, self.workers - 1)
        redis = await stack.enter_async_context(redis_from_settings(self._settings(0)))
        for number in range(self.running):
            await client.submit({"messages": []}, model=self._model, id=f"{self._model}.{number}")
        claimed = 0
        for worker in range(1, others + 1):
            share = self.running * worker // others - claimed
            claims = Claims(redis, self._settings(worker))
            while share and (found := len(await claims.take("interactive", share))):  # a call claims no more than 256
                share, claimed = share - found, claimed + found
            if self.workers > 1:
                full = WorkerRows(ROWS, ROWS, {"interactive": 0, "batch": 0})
                await claims.take("interactive", 0, rows=full)
        assert claimed == self.running
        self._claims = Claims(redis, self._settings(0))

    async def cost_us(self, client: Client, redis: Redis, waiting: int) -> float:
        """Queue jobs, claim them in one call, and return the time that the server needed for it, in microseconds."""
        for number in range(waiting):
            await client.submit({"messages": []}, model=self._model, id=f"{self._model}.{waiting}.{number}")
        before = await _evalsha_us(redis)
        rows = WorkerRows(0, ROWS, {"interactive": ROWS, "batch": ROWS})
        claims = await self._claims.take("interactive", ROWS, rows=rows)
        spent = await _evalsha_us(redis) - before
        assert len(claims) == waiting
        for claim in claims:
            await self._claims.release(claim)
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
        cases = {(queue, waiting): list[float]() for queue in queues for waiting in WAITING}
        for turn in range(calls + 2):  # the first ones load the scripts
            # If running jobs were checked twice a second, each call would pay as much of that as a call can. Their
            # leases end after the run; of leases of 10 s, 2,048 jobs have 205 checks a second, in whatever claims come.
            await asyncio.sleep(0.5)
            for (queue, waiting), spent in cases.items():
                cost = await queue.cost_us(client, redis, waiting)
                if turn >= 2:
                    spent.append(cost)
        name = server_name(await redis.info("server"))
    return [_cost(name, queue, waiting, spent) for (queue, waiting), spent in cases.items()]


def _cost(server: str, queue: _Queue, waiting: int, spent: Sequence[float]) -> ClaimCost:
    first, median, last = statistics.quantiles(spent, n=4)
    return ClaimCost(server, waiting, queue.running, queue.workers, median, (first, last))


def judge(costs: Sequence[ClaimCost]) -> list[Verdict]:
    """Compare one server's costs with their bars."""
    bars_ms = {1: 0.15, ROWS: 1.2}
    by_case = {(cost.waiting, cost.running, cost.workers): cost.median_us for cost in costs}
    verdicts = [
        Verdict.at_most(f"ms for {cost.waiting} waiting, {cost.running:,} running, {cost.workers} workers",
                        bars_ms[cost.waiting], cost.median_us / 1000)
        for cost in costs
    ]  # fmt: skip
    for waiting, workers in product(WAITING, WORKERS):
        ratio = by_case[waiting, RUNNING[-1], workers] / by_case[waiting, RUNNING[0], workers]
        label = f"{RUNNING[-1]:,} running / none, {waiting} waiting, {workers} workers"
        verdicts.append(Verdict.at_most(label, 1.1, ratio))
    return verdicts
