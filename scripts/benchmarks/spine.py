"""Cost of the path through Redis: tokens per second against the bare engine, and the publisher's own time; and of the
log as JSON with traces."""

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from models.random_checkpoints import random_checkpoint
from sluice import Client, Finished
from tests.support.stack import Server, WorkerProcess
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.options import EngineOptions
from worker.outcomes import Sampled
from worker.queue.job.claims import Claim, Claims
from worker.queue.job.publisher import Publisher
from worker.queue.redis_server import ServerClock
from worker.request import GenerationRequest, Sampling
from worker.settings import Settings

ROWS = 8
TOKENS = 120
RUNS = 5
PAIRS = 15
NO_END = ((2, -100.0),)


def main(console: Console) -> bool:
    """Run the benchmark, print its table, and return True if every value is within its limit."""
    table = Table("measured", "bar", "figure", "holds", title="The spine", title_justify="left")
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        checkpoint = random_checkpoint(Path(folder))
        rates, step_s = asyncio.run(compare_throughput(server.url, checkpoint, console))
        ratio = statistics.median(rates)
        cost_us = asyncio.run(publishing_cost(server.url)) * 1e6
        traced = statistics.median(asyncio.run(compare_traced(server.url, checkpoint, console)))
    rows = [
        (
            f"tokens/s through Redis / bare engine, {ROWS} rows, step {step_s * 1000:.0f} ms, median of {RUNS}",
            "≥ 0.95", f"{ratio:.3f}", ratio >= 0.95,
        ),
        (
            f"tokens/s with JSON log and traces / without, median of {PAIRS} pairs",
            "≥ 0.99", f"{traced:.3f}", traced >= 0.99,
        ),
        ("worker time to encode and publish one token, 32 rows a step", "≤ 10 µs", f"{cost_us:.1f} µs", cost_us <= 10),
    ]  # fmt: skip
    for measured, limit, figure, holds in rows:
        table.add_row(measured, limit, figure, "[green]yes[/]" if holds else "[red]no[/]")
    console.print(table)
    return all(row[-1] for row in rows)


async def compare_throughput(url: str, checkpoint: Path, console: Console) -> tuple[list[float], float]:
    """Time the bare engine and a worker in turn after a warm-up. Return the ratios, and the seconds of a step."""
    model = open_model(str(checkpoint))
    rates, step_s = [], 0.0
    for run in range(RUNS + 1):
        bare_s, step_s = bare(model)
        # The bare engine verifies no drafts either, of which answers of a random model have many.
        with WorkerProcess(url, model=checkpoint, max_rows=ROWS, step_ms=1000, speculation="off"):
            queued_s = await through_redis(url)
        console.print(
            f"[dim]run {run}: bare {ROWS * TOKENS / bare_s:.1f}/s, queued {ROWS * TOKENS / queued_s:.1f}/s[/]"
        )
        rates.append(bare_s / queued_s)
    return rates[1:], step_s


async def compare_traced(url: str, checkpoint: Path, console: Console) -> list[float]:
    """Time two workers in turn, of which one logs as JSON and sends traces. Return the ratios of their rates, each of
    neighbours in time, of which either is the first in turn."""
    from tests.support.collector import collecting  # needs OpenTelemetry, which other benchmarks do not

    ratios = list[float]()
    with (
        collecting() as collector,
        WorkerProcess(url, model=checkpoint, max_rows=ROWS, step_ms=1000, model_name="plain"),
        WorkerProcess(
            url, model=checkpoint, max_rows=ROWS, step_ms=1000, model_name="traced", log_format="json",
            more_env={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.variables["OTEL_EXPORTER_OTLP_ENDPOINT"]},
        ),
    ):  # fmt: skip
        for run in range(PAIRS + 1):
            order = ("plain", "traced") if run % 2 else ("traced", "plain")
            seconds = {name: await through_redis(url, name) for name in order}
            ratios.append(seconds["plain"] / seconds["traced"])
            console.print(f"[dim]pair {run}: {ratios[-1]:.3f}[/]")
        jobs = (PAIRS + 1) * (ROWS + 1)
        collector.wait_for(lambda spans: sum(span.name == "chat traced" for span in spans) == jobs)
    return ratios[1:]


def bare(model: Model) -> tuple[float, float]:
    """Return the seconds from the first token to the last in the bare engine, and the seconds of a step."""
    engine = Engine(model, EngineOptions(1.0))
    first = 0.0
    last = 0.0
    steps = 0
    for i in range(ROWS):
        engine.add(GenerationRequest(str(i), (5, 6, 7, 8 + i), TOKENS, Sampling(logit_bias=NO_END)))
    while len(engine):
        outcomes = engine.step().outcomes
        if any(isinstance(outcome, Sampled) for outcome in outcomes):
            last, steps = time.perf_counter(), steps + 1
            first = first or last
    return last - first, (last - first) / max(steps - 1, 1)


async def through_redis(url: str, model: str = "default") -> float:
    """Return the seconds from the first token to the last of all jobs, by the worker's clock."""
    async with Client(url) as client:
        await finish(client, 4, model)  # warm
        jobs = await asyncio.gather(*(finish(client, TOKENS, model) for _ in range(ROWS)))
    return max(end for _, end in jobs) - min(begin for begin, _ in jobs)


async def finish(client: Client, tokens: int, model: str) -> tuple[float, float]:
    """Run a job, and return the times of its first delta and of its end."""
    request = {
        "messages": [{"role": "user", "content": "a"}], "max_tokens": tokens, "temperature": 0,
        "logit_bias": {"2": -100},
    }  # fmt: skip
    job, begin = await client.submit(request, model=model), 0.0
    async for event in client.stream(job.id):
        if event.type == "delta":
            begin = begin or event.ts
        if isinstance(event, Finished):
            return begin, event.ts
    raise RuntimeError("the job did not finish")


async def publishing_cost(url: str, *, rows: int = 32, steps: int = 300) -> float:
    """Return the CPU seconds of this process for one token: its event is created, encoded, sent and acknowledged."""
    async with Client(url) as client, client._redis as redis:
        settings = Settings(model="bench", model_name="bench", lease_s=60)
        clock = ServerClock()
        claims, publisher = Claims(redis, settings), Publisher(redis, clock, settings)
        for i in range(rows):
            await client.submit({"messages": []}, model="bench", id=f"bench-{i}")
        logs = [publisher.open(claim, on_lost=_lost) for claim in await _all(claims, rows)]
        running = asyncio.create_task(publisher.run())
        began = time.process_time()
        for step in range(steps):
            for log in logs:
                log.emit("delta", token_ids=[step], content=" word")
            await publisher.until_written(logs[-1])  # one call for all rows of a step
        spent = time.process_time() - began
        running.cancel()
    return spent / (rows * steps)


async def _all(claims: Claims, rows: int) -> list[Claim]:
    return await claims.take("interactive", rows)


def _lost() -> None:
    raise RuntimeError("the bench owns its jobs")
