"""Measurements of a worker under attack: gaps in its streams, memory, and how each job ended."""

import asyncio
import itertools
import json
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

from scripts.scenarios.harness import FINAL, QUEUE
from scripts.stack import WorkerProcess

_ENDED_S = 180.0  # until each request has its final event


@dataclass(slots=True)
class Phase:
    """What was measured over a time: by the server's clock, from the jobs' logs."""

    began: float = 0.0
    ended: float = 0.0
    pickups_s: list[float] = field(default_factory=list)  # of ordinary jobs: until their prompts were made
    gaps_s: list[float] = field(default_factory=list)  # between two tokens of a stream

    def and_also(self, other: "Phase") -> "Phase":
        """Return what was measured in both."""
        return Phase(self.began, other.ended, self.pickups_s + other.pickups_s, self.gaps_s + other.gaps_s)


async def put(db: redis.asyncio.Redis, prefix: str, bodies: Sequence[bytes]) -> None:
    """As any producer could: some of these our client would not queue."""
    for number, body in enumerate(bodies):
        await db.set(f"arq:job:{prefix}-{number}", body, ex=600)
    seconds, micros = await db.time()
    now_ms = seconds * 1000 + micros // 1000
    await db.zadd(QUEUE, {f"{prefix}-{number}": now_ms for number in range(len(bodies))})
    await db.publish("sluice:wake:default", "")


async def endings(db: redis.asyncio.Redis, prefix: str, count: int) -> tuple[Counter[str], float]:
    """How each ended, and the seconds until all had. "none": not in time."""
    began, verdicts = time.monotonic(), list[str]()
    for number in range(count):
        while (verdict := await _verdict(db, f"{prefix}-{number}")) == "none":
            if time.monotonic() - began > _ENDED_S:
                break
            await asyncio.sleep(0.05)
        verdicts.append(verdict)
    return Counter(verdicts), time.monotonic() - began


async def _verdict(db: redis.asyncio.Redis, job_id: str) -> str:
    last = await db.lindex(f"sluice:log:{job_id}", -1)  # type: ignore[misc]
    event: dict[str, Any] = json.loads(last) if last else {"type": ""}
    if event["type"] not in FINAL:
        return "none"
    return str(event["error"]["type"] if event["type"] == "failed" else event["type"])


async def server_now(db: redis.asyncio.Redis) -> float:
    seconds, micros = await db.time()
    return float(seconds + micros / 1e6)


async def gaps(db: redis.asyncio.Redis, job_id: str, phase: Phase) -> list[float]:
    """Between the deltas that end within the phase."""
    moments = [ts for ts, type in await told(db, job_id) if type == "delta"]
    return [after - before for before, after in itertools.pairwise(moments) if phase.began < after <= phase.ended]


async def told(db: redis.asyncio.Redis, job_id: str) -> list[tuple[float, str]]:
    said: list[bytes] = await db.lrange(f"sluice:log:{job_id}", 0, -1)  # type: ignore[misc]
    return [(event["ts"], event["type"]) for event in map(json.loads, said)]


class Memory:
    """The worker's resident memory, its children's included."""

    def __init__(self, worker: WorkerProcess) -> None:
        assert worker.process is not None
        self._pid, self.grown_mb = worker.process.pid, 0.0

    async def now_mb(self) -> float:
        return await asyncio.to_thread(resident_mb, self._pid)

    async def __aenter__(self) -> "Memory":
        self._before_mb = await self.now_mb()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            self.grown_mb = max(self.grown_mb, await self.now_mb() - self._before_mb)
            await asyncio.sleep(0.2)


def resident_mb(pid: int) -> float:
    """Return the resident memory of a process and its children."""
    told = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
    rows = [[int(number) for number in line.split()] for line in told.splitlines()]
    return sum(kilobytes for process, parent, kilobytes in rows if pid in (process, parent)) / 1000
