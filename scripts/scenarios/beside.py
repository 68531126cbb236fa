"""Interactive jobs and an offline run on one worker: neither takes from the other what is not its own."""

import asyncio
import random
import re
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

import redis.asyncio

from scripts.batch_run import BatchRun
from scripts.scenarios.harness import Figure, ask, paced, percentile
from scripts.scenarios.pickup import waited
from scripts.stack import WorkerProcess, free_port
from sluice import Client, Delta

_ROWS, _RESERVED = 16, 4
_LINES = 5_000  # more than are done meanwhile


@dataclass(frozen=True, slots=True)
class Watched:
    """A worker whose metrics are read. `budget_ms` is its SLUICE_STEP_MS."""

    worker: WorkerProcess
    port: int
    budget_ms: float

    def tokens(self) -> dict[str, float]:
        """That it has made, by lane."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as page:
            text = page.read().decode()
        found = re.findall(r'^vllm:generation_tokens_total\{.*lane="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return {lane: float(number) for lane, number in found}

    async def rates(self, seconds: float) -> dict[str, float]:
        """Tokens a second."""
        began, before = time.perf_counter(), await asyncio.to_thread(self.tokens)
        await asyncio.sleep(seconds)
        after, took_s = await asyncio.to_thread(self.tokens), time.perf_counter() - began
        return {lane: (after[lane] - before[lane]) / took_s for lane in after}


def tiny(url: str) -> Watched:
    port = free_port()
    return Watched(WorkerProcess(url, max_rows=_ROWS, reserved_rows=_RESERVED, step_ms=50, metrics_port=port), port, 50)


def clockwork(url: str) -> Watched:
    port = free_port()
    return Watched(paced(url, step_ms=20, max_rows=_ROWS, reserved_rows=_RESERVED, metrics_port=port), port, 100)


@dataclass(slots=True)
class Visitors:
    """Interactive streams, one after the other, each by itself in time."""

    coming: bool = True  # False: those that are here come to their end
    gaps_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    async def visit(self, client: Client, db: redis.asyncio.Redis, dice: random.Random) -> None:
        while self.coming:
            job, last = await client.submit(ask(40, f"Count to {dice.randrange(20, 40)}.")), 0.0
            async for event in client.stream(job.id):
                if isinstance(event, Delta):
                    if last:
                        self.gaps_s.append(event.ts - last)
                    last = event.ts
            self.waits_s.append(await waited(db, job.id))
            await asyncio.sleep(dice.uniform(0, 0.2))


async def beside_a_run(url: str, watched: Watched, *, rounds: int, phase_s: float, streams: int) -> list[Figure]:
    """The run by itself and beside so many streams, in turn. Of more than are reserved for, those that come at once
    would wait for an offline row to end."""
    rounds_seen, shares, dice = list[Visitors](), list[float](), random.Random(5)
    lines = [ask(dice.randrange(50, 150), "Count to 40.", logit_bias={"2": -100}) for _ in range(_LINES)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-batch-")))
        stack.callback(watched.worker.stop)
        await asyncio.to_thread(watched.worker.start)
        run = BatchRun(url, folder / "run", lines)
        stack.callback(run.kill)
        await asyncio.to_thread(run.start().wait_for, _ROWS)
        async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
            for _ in range(rounds):
                visitors, alone = Visitors(), await watched.rates(phase_s)
                visits = [asyncio.create_task(visitors.visit(client, db, dice)) for _ in range(streams)]
                await asyncio.sleep(1)
                both = await watched.rates(phase_s)
                visitors.coming = False
                await asyncio.gather(*visits)
                rounds_seen.append(visitors)
                shares.append(both["batch"] / (alone["batch"] - both["interactive"]))
    return judge(rounds_seen, shares, watched.budget_ms, f"{streams} streams beside an offline run, {rounds} rounds")


def judge(rounds: list[Visitors], shares: list[float], budget_ms: float, what: str) -> list[Figure]:
    """By the rounds' medians: what else the machine does in one of them is not ours."""

    def of_rounds(times_s: list[list[float]], share: float) -> float:
        return 1000 * statistics.median(percentile(each, share) for each in times_s)

    gaps_s, waits_s = [each.gaps_s for each in rounds], [each.waits_s for each in rounds]
    step_ms, gap_ms, pickup_ms = of_rounds(gaps_s, 0.5), of_rounds(gaps_s, 0.99), of_rounds(waits_s, 0.99)
    share = statistics.median(shares)
    return [
        Figure(f"{what}: pickup p99 of {sum(map(len, waits_s))}, step {step_ms:.0f} ms", f"≤ {step_ms + 10:.0f} ms",
               f"{pickup_ms:.0f} ms", pickup_ms <= step_ms + 10),
        Figure(f"{what}: between two tokens, p99", f"≤ {budget_ms:.0f} ms", f"{gap_ms:.0f} ms", gap_ms <= budget_ms),
        Figure(f"{what}: offline tokens, of what the streams leave", "≥ 80 %", f"{share:.0%}", share >= 0.8),
    ]  # fmt: skip
