"""Helpers of the scenarios: paced workers, recorded streams, and checks of the results."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import redis.asyncio
from redis.exceptions import RedisError

from sluice import Client, Delta, Event
from sluice.contract import keys
from sluice.contract.keys import Lane
from tests.support.chaos.paced import expected_text
from tests.support.stack import WorkerProcess

QUEUE = keys.queue("default", "interactive")
FINAL = frozenset({"finished", "failed", "cancelled"})  # the types of final events
_PASSING = (
    "sluice:log:", "sluice:result:", "sluice:job:", "sluice:worker:", "sluice:model:", "sluice:serve:",
    "sluice:fleet:", "sluice:ready:", "sluice:px:",
)  # fmt: skip
_LASTING = "sluice:dead", "sluice:serve:models"  # bounded by their own rules


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table of results: a measured value, its limit, and if the value is within the limit."""

    label: str
    limit: str
    value: str
    holds: bool


@dataclass(slots=True)
class Recording:
    """The events that one subscriber received, and the longest time between two of them."""

    job_id: str
    events: list[Event] = field(default_factory=list)
    gap_s: float = 0.0

    @property
    def text(self) -> str:
        """The content of all deltas."""
        return "".join(event.content or "" for event in self.events if isinstance(event, Delta))

    def is_right(self, tokens: int) -> bool:
        """Return True if the stream has each of `tokens` tokens and each seq once and in order, one final event, and no
        restart."""
        numbers = [event.seq for event in self.events if event.stored]
        in_order = numbers == list(range(len(numbers)))
        endings = [event.final for event in self.events].count(True)
        started_over = any(event.type == "restarted" for event in self.events)
        return in_order and endings == 1 and not started_over and self.text == expected_text(tokens)


def paced_worker(url: str, *, step_ms: float = 20, lease_s: float = 2, **settings: float) -> WorkerProcess:
    """Return a worker without a model, which makes a token every `step_ms` milliseconds."""
    return WorkerProcess(
        url,
        model="paced",
        module="tests.support.chaos.paced",
        more_env={"PACED_STEP_MS": str(step_ms)},
        lease_s=lease_s,
        **{"max_rows": 64, **settings},  # type: ignore[arg-type]
    )


@asynccontextmanager
async def running(worker: WorkerProcess) -> AsyncIterator[WorkerProcess]:
    """Start the worker and stop it at the end, in threads, so that the event loop keeps reading streams."""
    try:
        yield await asyncio.to_thread(worker.start)
    finally:
        await asyncio.to_thread(worker.stop)


def chat_request(tokens: int, content: str = "go", **more: object) -> dict[str, object]:
    """Return a request for at most `tokens` tokens, sampled greedily."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "temperature": 0, **more}


async def submit_all(
    client: Client, count: int, request: dict[str, object], *, lane: Lane = "interactive", prefix: str = "job"
) -> list[str]:
    """Submit `count` copies of a request, and return their ids."""
    ids = [f"{prefix}-{i:05}" for i in range(count)]
    for job_id in ids:
        await client.submit(request, id=job_id, lane=lane)
    return ids


async def record(client: Client, job_id: str) -> Recording:
    """Record the stream of a job up to its final event."""
    recording, last = Recording(job_id), 0.0
    async for event in client.stream(job_id, unknown_s=120):
        now = time.monotonic()
        recording.gap_s = max(recording.gap_s, now - last if last else 0.0)
        last = now
        recording.events.append(event)
    return recording


async def record_all(client: Client, ids: Sequence[str], *, timeout_s: float = 120) -> list[Recording]:
    """Record the streams of several jobs at once. Raises TimeoutError."""
    return await asyncio.wait_for(asyncio.gather(*(record(client, job_id) for job_id in ids)), timeout_s)


async def until_decoding(client: Client, ids: Sequence[str], tokens: int = 10) -> None:
    """Wait until each job has at least `tokens` events, or has ended."""
    for job_id in ids:
        async for event in client.stream(job_id, unknown_s=60):
            if event.seq >= tokens or event.final:
                break


async def until_taken_over(db: redis.asyncio.Redis, ids: Sequence[str], *, timeout_s: float = 60) -> None:
    """Wait until each job has had a second attempt, or has ended. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        for job_id in ids:
            while True:
                state, attempt = await db.hmget(f"sluice:job:{job_id}", ["state", "attempt"])  # type: ignore[misc]
                if int(attempt or 0) > 1 or (state or b"").decode() in FINAL:
                    break
                await asyncio.sleep(0.02)


async def corrupt_logs(db: redis.asyncio.Redis, ids: Sequence[str]) -> int:
    """Return the number of jobs with an event whose seq is not its index, or whose attempt is lower than before."""
    bad = 0
    for job_id in ids:
        log: list[bytes] = await db.lrange(f"sluice:log:{job_id}", 0, -1)  # type: ignore[misc]
        events = [json.loads(raw) for raw in log]
        attempts = [event["attempt"] for event in events]
        bad += [event["seq"] for event in events] != list(range(len(events))) or attempts != sorted(attempts)
    return bad


async def leaks(db: redis.asyncio.Redis) -> list[str]:
    """Return the keys that never expire, and those of ended jobs that should be gone, each with the reason."""
    found = []
    async for key in db.scan_iter(count=1000):
        name = key.decode()
        if not name.startswith(_PASSING) and name not in _LASTING:
            found.append(f"{name} is left")
        elif name not in _LASTING and await db.ttl(key) == -1:
            found.append(f"{name} never expires")
    return found


async def count_running(db: redis.asyncio.Redis, ids: Sequence[str]) -> int:
    """Return how many of these jobs are claimed and have not ended."""
    async with db.pipeline(transaction=False) as pipe:
        for job_id in ids:
            pipe.hget(f"sluice:job:{job_id}", "state")
        states: list[bytes | None] = await pipe.execute()
    return states.count(b"running")


async def count_leases(db: redis.asyncio.Redis, worker: str) -> int:
    """Return how many jobs run on this worker."""
    claims: list[bytes] = await db.keys("arq:in-progress:*")
    owners: list[bytes | None] = await db.mget(claims) if claims else []
    return sum(owner is not None and owner.startswith(f"{worker}:".encode()) for owner in owners)


def at_each(what: str, counts: Sequence[int], streams: int) -> Figure:
    """Return the figure for signals that all have to come while streams run: otherwise they test nothing. `counts`:
    the streams that ran at each signal."""
    shown = ", then ".join(str(count) for count in counts)
    return Figure(
        f"{what}: streams running then", "≥ 1", f"{shown or 0} of {streams}", bool(counts) and min(counts) > 0
    )


def at_some(what: str, counts: Sequence[int]) -> Figure:
    """Return the figure for signals at random moments, of which some have to come while jobs run."""
    busy = sum(count > 0 for count in counts)
    value = f"{busy} of {len(counts)}, up to {max(counts, default=0)} jobs"
    return Figure(f"{what}: while jobs ran", "≥ 1", value, busy > 0)


@asynccontextmanager
async def killing_connections(url: str, every_s: float, kind: str, ids: Sequence[str]) -> AsyncIterator[list[int]]:
    """Kill all connections of this kind but our own, every `every_s` seconds while the context is open. Yields a list
    that receives, at each kill, how many of the jobs run."""
    counts = list[int]()

    async def kill() -> None:
        async with redis.asyncio.Redis.from_url(url) as db:
            while True:
                await asyncio.sleep(every_s)
                try:
                    counts.append(await count_running(db, ids))
                    await db.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
                except (RedisError, OSError):
                    pass  # the server is down at the moment

    killer = asyncio.create_task(kill())
    try:
        yield counts
    finally:
        killer.cancel()


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
