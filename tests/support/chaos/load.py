"""Many small jobs, and hostile bodies."""

import asyncio
import json
import pickle
import random
import signal
from contextlib import ExitStack

import redis.asyncio

from sluice import Client
from tests.support.chaos.harness import QUEUE, Figure, at_some, chat_request, count_leases, leaks, paced_worker, record


async def many_small_jobs(url: str, *, jobs: int, kill_every_s: float) -> list[Figure]:
    """Run many small jobs on two workers, one of which is killed and restarted at random."""
    dice = random.Random(2)
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        settings: dict[str, float] = {"lease_s": 1, "max_rows": 256, "step_ms": 1, "reserved_rows": 0}
        at_kills = list[int]()
        with ExitStack() as stack:
            workers = [paced_worker(url, queue_limit=10**6, **settings) for _ in range(2)]
            for worker in workers:
                stack.callback(worker.stop)
                await asyncio.to_thread(worker.start)
            submitting = asyncio.create_task(_submit(client, jobs))
            while not submitting.done() or await client.queued("default", "interactive"):
                await asyncio.sleep(dice.uniform(0.5, 1.5) * kill_every_s)
                victim = dice.choice(workers)
                at_kills.append(await count_leases(db, victim.name))
                victim.signal(signal.SIGKILL)
                await asyncio.to_thread(victim.wait)
                await asyncio.to_thread(victim.start)
        endings = [await _endings(db, job_id) for job_id in _ids(jobs)]
        left = await leaks(db)
    wrong = sum(len(ending) != 1 for ending in endings)
    blamed = sum(ending == ["failed"] for ending in endings)
    label = f"{jobs:,} small jobs, two workers, {len(at_kills)} kills"
    return [
        at_some(label, at_kills),
        Figure(f"{label}: jobs without exactly one final event", "0", str(wrong), wrong == 0),
        Figure(f"{label}: jobs failed because of the kills", "0", str(blamed), blamed == 0),
        Figure(f"{label}: leaked keys", "0", str(len(left)), not left),
    ]


def _ids(jobs: int) -> list[str]:
    return [f"small-{i:06}" for i in range(jobs)]


async def _submit(client: Client, jobs: int) -> None:
    for job_id in _ids(jobs):
        await client.submit(chat_request(1), id=job_id)


async def _endings(db: redis.asyncio.Redis, job_id: str) -> list[str]:
    log: list[bytes] = await db.lrange(f"sluice:log:{job_id}", 0, -1)  # type: ignore[misc]
    types = [json.loads(raw)["type"] for raw in log]
    return [type for type in types if type in ("finished", "failed", "cancelled")]


class Bomb:
    """An object that creates a file if it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def _arq(request: object) -> bytes:
    return json.dumps({"t": None, "f": "chat", "a": [request], "k": {}, "et": 1}).encode()


def hostile_bodies(bomb_path: str, *, megabytes: int) -> dict[bytes, bytes]:
    """Return bodies by job id, of which the body, the id or both are invalid."""
    deep = b'{"f":"chat","a":[' + b"[" * 200_000 + b"]" * 200_000 + b"]}"
    return {
        b"pickle": pickle.dumps({"f": "chat", "a": (Bomb(bomb_path),), "k": {}, "t": None, "et": 1}),
        b"huge": _arq({"messages": [{"role": "user", "content": "x" * (megabytes << 20)}]}),
        b"deep": deep,
        b"..": _arq({"messages": []}),
        b"new\nline": _arq(chat_request(1)),
        b"\xff\xfe not utf-8": _arq(chat_request(1)),
        b"4kB" * 1365: _arq(chat_request(1)),
        b"wrong-function": b'{"t":null,"f":"os.system","a":["true"],"k":{},"et":1}',
        b"spaces and : colons*": _arq(chat_request(1)),
    }


async def hostile(url: str, bomb_path: str, *, megabytes: int) -> list[Figure]:
    """Queue hostile bodies: each must end as `failed` with a message, nothing may run, and the worker must survive."""
    bodies, ended = hostile_bodies(bomb_path, megabytes=megabytes), 0
    async with Client(url) as client, redis.asyncio.Redis.from_url(url) as db:
        for job_id, body in bodies.items():
            await db.set(b"arq:job:" + job_id, body, ex=600)
            await db.zadd(QUEUE, {job_id: 1})
        with paced_worker(url):
            for job_id in bodies:
                ended += await _fails(db, job_id)
            alive = (await asyncio.wait_for(record(client, (await client.submit(chat_request(3))).id), 20)).is_right(3)
        left = await db.zcard(QUEUE)
    return [
        Figure("hostile payloads: failed by name, left in the queue", f"{len(bodies)}, 0", f"{ended}, {left}",
               (ended, left) == (len(bodies), 0)),
        Figure("hostile payloads: worker alive afterwards", "yes", "yes" if alive else "no", alive),
    ]  # fmt: skip


async def _fails(db: redis.asyncio.Redis, job_id: bytes) -> bool:
    for _ in range(200):
        last: bytes | None = await db.lindex(b"sluice:log:" + job_id, -1)  # type: ignore[misc, arg-type]
        if last is not None:
            event = json.loads(last)
            return event["type"] == "failed" and bool(event["error"]["message"])
        await asyncio.sleep(0.05)
    return False
