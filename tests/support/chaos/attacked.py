"""Measures a worker under attack: gaps in its streams, memory, and how each job ended."""

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

from tests.support.chaos.harness import FINAL, QUEUE
from tests.support.stack import WorkerProcess

_ENDED_S = 180.0  # limit for all requests to end


@dataclass(slots=True)
class Phase:
    """Measurements over a period of the server's clock, taken from the jobs' logs."""

    began: float = 0.0
    ended: float = 0.0
    pickups_s: list[float] = field(default_factory=list)  # of ordinary jobs: until `started`
    gaps_s: list[float] = field(default_factory=list)  # between two tokens of a stream

    def merged_with(self, other: "Phase") -> "Phase":
        """Return the measurements of both phases."""
        return Phase(self.began, other.ended, self.pickups_s + other.pickups_s, self.gaps_s + other.gaps_s)


async def queue_bodies(db: redis.asyncio.Redis, prefix: str, bodies: Sequence[bytes]) -> None:
    """Queue raw bodies as a plain producer does: `Client` would refuse some of them."""
    for number, body in enumerate(bodies):
        await db.set(f"arq:job:{prefix}-{number}", body, ex=600)
    seconds, micros = await db.time()
    now_ms = seconds * 1000 + micros // 1000
    await db.zadd(QUEUE, {f"{prefix}-{number}": now_ms for number in range(len(bodies))})
    await db.publish("sluice:wake:default", "")


async def wait_for_endings(db: redis.asyncio.Redis, prefix: str, count: int) -> tuple[Counter[str], float]:
    """Return the number of jobs by outcome ("none": not within three minutes), and the seconds until all had ended."""
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
    """Return the server's time in Unix seconds."""
    seconds, micros = await db.time()
    return float(seconds + micros / 1e6)


async def gaps(db: redis.asyncio.Redis, job_id: str, phase: Phase) -> list[float]:
    """Return the seconds between two deltas of a job, for those that end within the phase."""
    moments = [ts for ts, type in await event_times(db, job_id) if type == "delta"]
    return [after - before for before, after in itertools.pairwise(moments) if phase.began < after <= phase.ended]


async def event_times(db: redis.asyncio.Redis, job_id: str) -> list[tuple[float, str]]:
    """Return the time and the type of each event of a job."""
    events: list[bytes] = await db.lrange(f"sluice:log:{job_id}", 0, -1)  # type: ignore[misc]
    return [(event["ts"], event["type"]) for event in map(json.loads, events)]


class Memory:
    """Measures the resident memory of a worker and its children; `grown_mb` is the largest growth in the context."""

    def __init__(self, worker: WorkerProcess) -> None:
        assert worker.process is not None
        self._pid, self.grown_mb = worker.process.pid, 0.0

    async def now_mb(self) -> float:
        """Return the resident memory in MB."""
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
    """Return the resident memory of a process and its children, in MB."""
    output = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=True).stdout
    rows = [[int(number) for number in line.split()] for line in output.splitlines()]
    return sum(kilobytes for process, parent, kilobytes in rows if pid in (process, parent)) / 1000
