"""Shared by the scenarios: paced workers, watched streams, and checks of the results."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import redis.asyncio
from redis.exceptions import RedisError

from scripts.scenarios.paced import expected_text
from scripts.stack import WorkerProcess
from sluice import Client, Delta, Event
from sluice.wire import Lane, queue_key

QUEUE = queue_key("default", "interactive")
FINAL = frozenset({"finished", "failed", "cancelled"})  # the types of final events


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the closing table."""

    what: str
    bar: str
    value: str
    holds: bool


@dataclass(slots=True)
class Seen:
    """One subscriber's view of a stream."""

    job_id: str
    events: list[Event] = field(default_factory=list)
    gap_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(event.content or "" for event in self.events if isinstance(event, Delta))

    def is_right(self, tokens: int) -> bool:
        """Each token once and in order, each seq once and in order, one final event, and no change of mind."""
        in_order = [event.seq for event in self.events] == list(range(len(self.events)))
        endings = [event.final for event in self.events].count(True)
        started_over = any(event.type == "restarted" for event in self.events)
        return in_order and endings == 1 and not started_over and self.text == expected_text(tokens)


def paced(url: str, *, step_ms: float = 20, lease_s: float = 2, **settings: float) -> WorkerProcess:
    return WorkerProcess(
        url,
        model="paced",
        module="scripts.scenarios.paced",
        more_env={"PACED_STEP_MS": str(step_ms)},
        lease_s=lease_s,
        **{"max_rows": 64, **settings},  # type: ignore[arg-type]
    )


@asynccontextmanager
async def running(worker: WorkerProcess) -> AsyncIterator[WorkerProcess]:
    """Started and stopped without holding up the streams that are watched meanwhile."""
    try:
        yield await asyncio.to_thread(worker.start)
    finally:
        await asyncio.to_thread(worker.stop)


def ask(tokens: int, content: str = "go", **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0, **more}


async def submit_all(
    client: Client, count: int, request: dict[str, object], *, lane: Lane = "interactive", prefix: str = "job"
) -> list[str]:
    ids = [f"{prefix}-{i:05}" for i in range(count)]
    for job_id in ids:
        await client.submit(request, id=job_id, lane=lane)
    return ids


async def watch(client: Client, job_id: str) -> Seen:
    seen, last = Seen(job_id), 0.0
    async for event in client.stream(job_id, unknown_s=120):
        now = time.monotonic()
        seen.gap_s = max(seen.gap_s, now - last if last else 0.0)
        last = now
        seen.events.append(event)
    return seen


async def watch_all(client: Client, ids: Sequence[str], *, timeout_s: float = 120) -> list[Seen]:
    return await asyncio.wait_for(asyncio.gather(*(watch(client, job_id) for job_id in ids)), timeout_s)


async def until_decoding(client: Client, ids: Sequence[str], tokens: int = 10) -> None:
    """Until each has so many events."""
    for job_id in ids:
        async for event in client.stream(job_id, unknown_s=60):
            if event.seq >= tokens or event.final:
                break


async def corrupt_logs(db: redis.asyncio.Redis, ids: Sequence[str]) -> int:
    """Logs whose seq is not their index, or whose attempt goes back."""
    bad = 0
    for job_id in ids:
        said: list[bytes] = await db.lrange(f"sluice:log:{job_id}", 0, -1)  # type: ignore[misc]
        events = [json.loads(raw) for raw in said]
        attempts = [event["attempt"] for event in events]
        bad += [event["seq"] for event in events] != list(range(len(events))) or attempts != sorted(attempts)
    return bad


async def leaks(db: redis.asyncio.Redis) -> list[str]:
    """Keys that nobody will ever delete, and what finished jobs have left behind."""
    found = []
    async for key in db.scan_iter(count=1000):
        name = key.decode()
        passing = name.startswith(("sluice:log:", "sluice:result:", "sluice:job:", "sluice:worker:", "sluice:model:"))
        if not passing and name != "sluice:dead":
            found.append(f"{name} is left")
        elif name != "sluice:dead" and await db.ttl(key) == -1:
            found.append(f"{name} never expires")
    return found


@asynccontextmanager
async def killing_connections(url: str, every_s: float, kind: str = "normal") -> AsyncIterator[None]:
    """CLIENT KILL TYPE kind, again and again; our own connection is spared."""

    async def kill() -> None:
        async with redis.asyncio.Redis.from_url(url) as db:
            while True:
                await asyncio.sleep(every_s)
                try:
                    await db.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
                except (RedisError, OSError):
                    pass  # the server is away just now

    killer = asyncio.create_task(kill())
    try:
        yield
    finally:
        killer.cancel()


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
