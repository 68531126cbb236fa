"""Sends thousands of nearly valid bodies to a worker, and measures the streams that run at the same time."""

import asyncio
import statistics
from collections import Counter
from dataclasses import dataclass, field

import redis.asyncio

from sluice import Client
from tests.support.chaos.attacked import Memory, Phase, event_times, gaps, queue_bodies, server_now, wait_for_endings
from tests.support.chaos.from_schema import bodies as make_bodies
from tests.support.chaos.harness import FINAL, Figure, chat_request, until_decoding
from tests.support.stack import WorkerProcess

_AT_ONCE = 20
_STREAM_TOKENS = 400


@dataclass(slots=True)
class Fuzzed:
    """The outcomes of the bodies, and the growth of the worker's memory."""

    verdicts: Counter[str] = field(default_factory=Counter)
    not_once: list[str] = field(default_factory=list)  # jobs whose log lacks a single final event at its end
    warm_mb: float = 0.0  # growth over the first quarter of the bodies
    grown_mb: float = 0.0  # growth after that


async def fuzzed(url: str, *, bodies: int, streams: int, alone_s: float) -> list[Figure]:
    """Send `bodies` bodies while `streams` streams run. Before and after, these run alone for `alone_s` seconds."""
    made = await asyncio.to_thread(make_bodies, bodies)
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        # Valid bodies get few tokens: their prompt and end are tested, not their middle. Without a prefix cache the
        # growth of memory shows leaks.
        worker = WorkerProcess(
            url, max_rows=streams + _AT_ONCE, reserved_rows=0, step_ms=50, prefix_cache_gb=0,
            default_max_tokens=2, max_output_tokens=_STREAM_TOKENS, disconnect_grace_s=0.5,
        )  # fmt: skip
        with worker:
            async with Streams(client, streams) as running:
                alone = await _pause(db, alone_s)
                found, during = await _attack(db, worker, made)
                after = await _pause(db, alone_s)
            for phase in (alone, during, after):
                phase.gaps_s = [gap for job_id in running.ids for gap in await gaps(db, job_id, phase)]
            tracebacks = worker.log().count("Traceback")
    return figures(len(made), found, alone.merged_with(after), during, tracebacks)


class Streams:
    """Keeps `count` streams running. Each is short, so the memory that they take stays the same."""

    def __init__(self, client: Client, count: int) -> None:
        self._client, self._count = client, count
        self.ids: list[str] = []

    async def __aenter__(self) -> "Streams":
        first = [await self._submit(number) for number in range(self._count)]
        self._running = [asyncio.create_task(self._keep_running(number, job_id)) for number, job_id in enumerate(first)]
        await until_decoding(self._client, first, 10)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()

    async def _submit(self, number: int) -> str:
        tokens = _STREAM_TOKENS - 20 * number  # different lengths, so that they do not all restart at once
        job = await self._client.submit(chat_request(tokens, f"Count to {30 + number}.", logit_bias={"2": -100}))
        self.ids.append(job.id)
        return job.id

    async def _keep_running(self, number: int, job_id: str) -> None:
        while True:
            await self._client.result(job_id)
            job_id = await self._submit(number)


def figures(count: int, found: Fuzzed, alone: Phase, during: Phase, tracebacks: int) -> list[Figure]:
    """Return the results with their limits."""
    label = f"{count:,} fuzzed bodies"
    step_ms, alone_ms = 1000 * statistics.median(alone.gaps_s), 1000 * max(alone.gaps_s)
    gap_ms = 1000 * max(during.gaps_s, default=0.0)
    outcomes = ", ".join(f"{number} {type}" for type, number in found.verdicts.most_common())
    ours = found.verdicts["internal"] + found.verdicts["none"]
    return [
        Figure(f"{label}: without exactly one final event", "0", str(len(found.not_once)), not found.not_once),
        Figure(f"{label}: internal errors, or never ended ({outcomes})", "0", str(ours), ours == 0),
        Figure(f"{label}: tracebacks in the log", "0", str(tracebacks), tracebacks == 0),
        Figure(f"{label}: longest gap of a stream meanwhile (alone {alone_ms:.0f} ms, step {step_ms:.0f} ms)",
               f"≤ {alone_ms + step_ms + 100:.0f} ms", f"{gap_ms:.0f} ms", gap_ms <= alone_ms + step_ms + 100),
        Figure(f"{label}: memory after the first quarter ({found.warm_mb:,.0f} MB until then)", "≤ 64 MB more",
               f"{found.grown_mb:,.0f} MB", found.grown_mb <= 64),
    ]  # fmt: skip


async def _pause(db: redis.asyncio.Redis, seconds: float) -> Phase:
    phase = Phase(began=await server_now(db))
    await asyncio.sleep(seconds)
    phase.ended = await server_now(db)
    return phase


async def _attack(db: redis.asyncio.Redis, worker: WorkerProcess, made: list[bytes]) -> tuple[Fuzzed, Phase]:
    found = Fuzzed()
    phase = Phase(began=await server_now(db))
    memory = Memory(worker)
    start_mb, quarter = await memory.now_mb(), len(made) // 4
    for number, chunk in enumerate(made[start : start + _AT_ONCE] for start in range(0, len(made), _AT_ONCE)):
        await queue_bodies(db, f"fuzz-{number}", chunk)
        verdicts, _ = await wait_for_endings(db, f"fuzz-{number}", len(chunk))
        found.verdicts += verdicts
        found.not_once += [job_id for i in range(len(chunk)) if not await _once(db, job_id := f"fuzz-{number}-{i}")]
        if number * _AT_ONCE <= quarter:
            found.warm_mb = await memory.now_mb() - start_mb
    phase.ended = await server_now(db)
    found.grown_mb = await memory.now_mb() - start_mb - found.warm_mb
    return found, phase


async def _once(db: redis.asyncio.Redis, job_id: str) -> bool:
    types = [type for _, type in await event_times(db, job_id)]
    return bool(types) and types[-1] in FINAL and sum(type in FINAL for type in types) == 1
