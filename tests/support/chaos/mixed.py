"""Interactive jobs and an offline run on one worker: measures how much each slows the other."""

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

from sluice import Client, Delta
from tests.support.chaos.batch_run import BatchRun
from tests.support.chaos.harness import Figure, chat_request, percentile
from tests.support.chaos.pickup import queue_wait_s
from tests.support.stack import WorkerProcess, free_port

_ROWS, _RESERVED = 16, 4
_LINES = 5_000  # more than are processed in that time


@dataclass(frozen=True, slots=True)
class MeteredWorker:
    """A worker and the port of its metrics. `budget_ms` is its SLUICE_STEP_MS."""

    worker: WorkerProcess
    port: int
    budget_ms: float

    def tokens(self) -> dict[str, float]:
        """Return the number of tokens generated so far, by lane."""
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as page:
            text = page.read().decode()
        found = re.findall(r'^vllm:generation_tokens_total\{.*lane="(\w+)".*\} (\S+)$', text, re.MULTILINE)
        return {lane: float(number) for lane, number in found}

    async def rates(self, seconds: float) -> dict[str, float]:
        """Return tokens per second by lane, measured over `seconds`."""
        began, before = time.perf_counter(), await asyncio.to_thread(self.tokens)
        await asyncio.sleep(seconds)
        after = await asyncio.to_thread(self.tokens)
        took_s = time.perf_counter() - began
        return {lane: (after[lane] - before[lane]) / took_s for lane in after}


def tiny(url: str) -> MeteredWorker:
    """Return a worker with the tiny model."""
    port = free_port()
    worker = WorkerProcess(url, max_rows=_ROWS, reserved_rows=_RESERVED, step_ms=50, metrics_port=port)
    return MeteredWorker(worker, port, 50)


@dataclass(slots=True)
class InteractiveStreams:
    """Runs interactive jobs one after the other, and records their times."""

    continues: bool = True  # False: the running jobs are the last ones
    gaps_s: list[float] = field(default_factory=list)
    waits_s: list[float] = field(default_factory=list)

    async def run_streams(self, client: Client, db: redis.asyncio.Redis, dice: random.Random) -> None:
        """Submit a job, read its stream, pause, and repeat until `continues` is False."""
        while self.continues:
            job = await client.submit(chat_request(40, f"Count to {dice.randrange(20, 40)}."))
            last = 0.0
            async for event in client.stream(job.id):
                if isinstance(event, Delta):
                    if last:
                        self.gaps_s.append(event.ts - last)
                    last = event.ts
            self.waits_s.append(await queue_wait_s(db, job.id))
            await asyncio.sleep(dice.uniform(0, 0.2))


async def mixed_lanes(url: str, metered: MeteredWorker, *, rounds: int, phase_s: float, streams: int) -> list[Figure]:
    """Measure the run alone and with `streams` interactive streams, in turn. With more streams than reserved rows, a
    new one would wait for an offline row to end."""
    interactive_by_round = list[InteractiveStreams]()
    shares = list[float]()
    dice = random.Random(5)
    lines = [chat_request(dice.randrange(50, 150), "Count to 40.", logit_bias={"2": -100}) for _ in range(_LINES)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sluice-batch-")))
        stack.callback(metered.worker.stop)
        await asyncio.to_thread(metered.worker.start)
        run = BatchRun(url, folder / "run", lines)
        stack.callback(run.kill)
        await asyncio.to_thread(run.start().wait_for, _ROWS)
        async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
            for _ in range(rounds):
                interactive, alone = InteractiveStreams(), await metered.rates(phase_s)
                streaming = [asyncio.create_task(interactive.run_streams(client, db, dice)) for _ in range(streams)]
                await asyncio.sleep(1)
                both = await metered.rates(phase_s)
                interactive.continues = False
                await asyncio.gather(*streaming)
                interactive_by_round.append(interactive)
                shares.append(both["batch"] / (alone["batch"] - both["interactive"]))
    label = f"{streams} streams and an offline run, {rounds} rounds"
    return figures_of(interactive_by_round, shares, metered.budget_ms, label)


def figures_of(rounds: list[InteractiveStreams], shares: list[float], budget_ms: float, label: str) -> list[Figure]:
    """Return medians over the rounds, since other processes may disturb some of them."""

    def of_rounds(times_s: list[list[float]], share: float) -> float:
        return 1000 * statistics.median(percentile(each, share) for each in times_s)

    gaps_s, waits_s = [each.gaps_s for each in rounds], [each.waits_s for each in rounds]
    step_ms = of_rounds(gaps_s, 0.5)
    gap_ms = of_rounds(gaps_s, 0.99)
    pickup_ms = of_rounds(waits_s, 0.99)
    share = statistics.median(shares)
    return [
        Figure(f"{label}: pickup p99 of {sum(map(len, waits_s))}, step {step_ms:.0f} ms", f"≤ {step_ms + 10:.0f} ms",
               f"{pickup_ms:.0f} ms", pickup_ms <= step_ms + 10),
        Figure(f"{label}: between two tokens, p99", f"≤ {budget_ms:.0f} ms", f"{gap_ms:.0f} ms", gap_ms <= budget_ms),
        Figure(f"{label}: offline tokens, of what the streams leave", "≥ 80 %", f"{share:.0%}", share >= 0.8),
    ]  # fmt: skip
