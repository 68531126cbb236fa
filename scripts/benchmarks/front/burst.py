"""Bursts of streamed chats by both ways in turn, with the CPU time of every process."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from scripts.benchmarks.front import ways
from scripts.benchmarks.front.processes import cpu_s
from scripts.benchmarks.front.ways import Arrivals, Body, Way
from scripts.benchmarks.serve.figures import percentile
from scripts.scenarios.harness import paced_worker
from scripts.stack import FrontProcess, Server, WorkerProcess
from sluice import Client

STREAMS = 32
STEP_MS = 30.0
_WARM_TOKENS = 4
_SETTLE_S = 0.5  # between two bursts
_TINY_BODY: Body = {"logit_bias": {"2": -100}}  # so that no answer of the tiny model ends early


@dataclass(frozen=True, slots=True)
class Burst:
    """The figures of one burst. CPU microseconds are for each token."""

    first_s: float  # median of the streams
    last_first_s: float
    tokens_per_s: float
    client_us: float
    front_us: float
    worker_us: float
    server_us: float

    @classmethod
    def median(cls, bursts: Sequence["Burst"]) -> "Burst":
        """Return the median of each figure."""
        return cls(*(statistics.median(getattr(each, name.name) for each in bursts) for name in fields(cls)))


@dataclass(frozen=True, slots=True)
class Case:
    """Chats that arrive `gap_s` after one another."""

    name: str
    gap_s: float
    is_paced: bool  # with the paced engine, else with the tiny model
    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The bursts of a case by each way: the first of one with the first of the other, and so on."""

    case: Case
    queue: Sequence[Burst]
    front: Sequence[Burst]

    @property
    def later_s(self) -> float:
        """How much later the first token comes through the gateway: the median of the pairs."""
        return statistics.median(f.first_s - q.first_s for q, f in zip(self.queue, self.front, strict=True))

    @property
    def rate(self) -> float:
        """Tokens per second through the gateway, as a share of those through the queue: the median of the pairs."""
        return statistics.median(f.tokens_per_s / q.tokens_per_s for q, f in zip(self.queue, self.front, strict=True))


class Stack:
    """A server, a worker and a gateway, and both ways to them."""

    def __init__(self, server: Server, worker: WorkerProcess, front: FrontProcess, client: Client) -> None:
        self._processes = {"front": front.process, "worker": worker.process, "server": server.process}
        self.queue, self.front = ways.queue(client), ways.front(front.url)

    def cpu_s(self) -> Mapping[str, float]:
        """Return the CPU seconds of each process so far; `client` is this one."""
        others = {name: cpu_s(each.pid) for name, each in self._processes.items() if each is not None}
        return {"client": time.process_time(), **others}


@contextmanager
def _processes(*, is_paced: bool) -> Iterator[tuple[Server, WorkerProcess, FrontProcess]]:
    with Server() as server:
        settings: dict[str, float] = {"max_rows": STREAMS, "reserved_rows": 0}
        paced = paced_worker(server.url, step_ms=STEP_MS, lease_s=10, **settings)
        worker = paced if is_paced else WorkerProcess(server.url, **settings)  # type: ignore[arg-type]
        with worker, FrontProcess(server.url) as front:
            yield server, worker, front


def measure(cases: Sequence[Case], runs: int) -> list[Measured]:
    """Measure cases of the same engine, each `runs` times by both ways in turn, on one stack."""
    with _processes(is_paced=cases[0].is_paced) as (server, worker, front):
        return asyncio.run(_measure(server, worker, front, cases, runs))


async def _measure(
    server: Server, worker: WorkerProcess, front: FrontProcess, cases: Sequence[Case], runs: int
) -> list[Measured]:
    async with Client(server.url) as client:
        stack = Stack(server, worker, front, client)
        for way in (stack.queue, stack.front):
            for _ in range(2):  # connections are opened, and modules loaded, with the first requests
                await _send(way, Case("warm-up", 0.0, cases[0].is_paced, _WARM_TOKENS))
        return [await _alternate(stack, case, runs) for case in cases]


async def _alternate(stack: Stack, case: Case, runs: int) -> Measured:
    bursts: dict[str, list[Burst]] = {"queue": [], "front": []}
    for run in range(runs):
        for name in ("queue", "front") if run % 2 == 0 else ("front", "queue"):
            await asyncio.sleep(_SETTLE_S)
            bursts[name].append(await _burst(stack, stack.queue if name == "queue" else stack.front, case))
    return Measured(case, bursts["queue"], bursts["front"])


async def _burst(stack: Stack, way: Way, case: Case) -> Burst:
    before = stack.cpu_s()
    answers = await _send(way, case)
    after = stack.cpu_s()
    tokens = sum(each.tokens for each in answers)
    firsts = [each.pieces[0] - each.sent for each in answers]
    seconds = max(each.pieces[-1] for each in answers) - min(each.sent for each in answers)
    used_us = {f"{name}_us": 1e6 * (after[name] - before[name]) / tokens for name in before}
    return Burst(percentile(firsts, 0.5), max(firsts), tokens / seconds, **used_us)


async def _send(way: Way, case: Case) -> list[Arrivals]:
    body: dict[str, Any] = {"max_tokens": case.tokens, "temperature": 0, **({} if case.is_paced else _TINY_BODY)}
    messages = [[{"role": "user", "content": f"Hello, I am number {number}."}] for number in range(STREAMS)]

    async def one(number: int) -> Arrivals:
        await asyncio.sleep(number * case.gap_s)
        return await way({**body, "messages": messages[number]})

    return list(await asyncio.gather(*map(one, range(STREAMS))))
