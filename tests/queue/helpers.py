"""Helpers that queue jobs, run a worker in this process, and read the results."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from arq.connections import RedisSettings, create_pool
from arq.worker import func
from redis.asyncio import Redis

from sluice.contract import keys
from sluice.contract.events import FINAL
from sluice.contract.keys import Lane
from tests.waiting import until
from worker.host.watch import HostWatch
from worker.json_bytes import dumps
from worker.monitoring.metrics import Metrics
from worker.queue.cron import Cron
from worker.queue.job.claims import Claim, lease_key
from worker.queue.job.runner import JobFunctions, JobRunner
from worker.queue.presence import Abilities
from worker.queue.redis_server import RedisServer, ServerClock, redis_from_settings
from worker.queue.scripts import script
from worker.queue.worker import QueueWorker, ServedModel
from worker.settings import Settings

QUEUE = keys.queue("default", "interactive")
BATCH = keys.queue("default", "batch")


def settings(url: str, *, lease_s: float = 10.0, **given: Any) -> Settings:
    """Return settings of a worker. The lease may be shorter than a deployed worker's."""
    valid = Settings(
        **{
            "redis_url": url or "redis://nobody",
            "model": "none",
            "worker_name": "ada",
            "max_rows": 8,
            "poll_s": 0.5,
            **given,
        }
    )
    return valid.model_copy(update={"lease_s": lease_s})


def envelope(*args: Any, function: str = "chat", **kwargs: Any) -> bytes:
    """Return a job in arq's form, as JSON."""
    return json.dumps({"t": None, "f": function, "a": args, "k": kwargs, "et": 1}).encode()


async def enqueue(url: str, queue: str, job_id: str | None = None, request: Any = None) -> None:
    """Queue a chat as plain arq does, with a JSON serializer."""
    pool = await create_pool(RedisSettings.from_dsn(url), job_serializer=dumps)
    await pool.enqueue_job("chat", request or {}, _job_id=job_id, _queue_name=queue)
    await pool.aclose()


def as_bytes(job_id: str | bytes) -> bytes:
    return job_id.encode("utf-8", "surrogateescape") if isinstance(job_id, str) else job_id


async def put(
    db: Redis, job_id: str | bytes, body: bytes | None, *, lane: Lane = "interactive", at_ms: int = 1
) -> None:
    """A job as any producer could queue it; `None` for a body that has expired."""
    name = as_bytes(job_id)
    async with db.pipeline() as pipe:
        if body is not None:
            pipe.set(b"arq:job:" + name, body, ex=60)
        pipe.zadd(keys.queue("default", lane), {name: at_ms})
        await pipe.execute()


async def ask(db: Redis, job_id: str, request: Any, *, lane: Lane = "interactive", at_ms: int = 1) -> None:
    await put(db, job_id, envelope(request), lane=lane, at_ms=at_ms)
    await db.publish(keys.wake("default"), "")


async def log(db: Redis, job_id: str | bytes) -> list[dict[str, Any]]:
    """Return the events of a job, without their times."""
    said = [json.loads(raw) for raw in await db.lrange(b"sluice:log:" + as_bytes(job_id), 0, -1)]
    assert all(abs(event.pop("ts") - time.time()) < 60 for event in said)
    return said


async def ended(db: Redis, job_id: str | bytes, *, within_s: float = 30) -> list[dict[str, Any]]:
    """The log of a job once it has ended."""

    async def has_ended() -> bool:
        said = await log(db, job_id)
        return bool(said) and said[-1]["type"] in FINAL

    await until(has_ended, within_s=within_s)
    return await log(db, job_id)


async def until_it_has_said(db: Redis, job_id: str, events: int) -> None:
    async def enough() -> bool:
        return bool(await db.llen(keys.log(job_id)) >= events)

    await until(enough)


async def listening(db: Redis, *, workers: int = 1) -> None:
    """Until so many workers hear what is published."""

    async def all_hear() -> bool:
        return bool((await db.pubsub_numsub(keys.CONTROL))[0][1] == workers)

    await until(all_hear)


async def field(db: Redis, job_id: str, name: str) -> str | None:
    """Return fields of the job's hash."""
    value = await db.hget(keys.job(job_id), name)
    return None if value is None else value.decode()


async def renew(redis: Redis, claim: Claim, *, lease_ms: int = 60_000) -> bool:
    """True where somebody else owns the job by now."""
    names = [keys.job(claim.job_id), lease_key(claim.job_id), keys.log(claim.job_id)]
    return bool(await script(redis, "renew")(keys=names, args=[lease_ms, 86_400_000, "ada", claim.attempt]))


async def lapse(db: Redis, *job_ids: str) -> None:
    """Their leases run out, and the time to look at them again has come."""
    await db.delete(*map(lease_key, job_ids))
    for lane in keys.LANES:
        await db.zadd(f"{keys.index('default', lane)}:leases", dict.fromkeys(job_ids, 0), xx=True)


def types(said: list[dict[str, Any]]) -> list[str]:
    return [event["type"] for event in said]


def words(said: list[dict[str, Any]]) -> str:
    return "".join(event.get("content", "") for event in said)


def queue_worker(
    redis: Redis,
    given: Settings,
    chat: Callable[..., Awaitable[Any]],
    *,
    count: Callable[..., Awaitable[Any]] | None = None,
    embed: Callable[..., Awaitable[Any]] | None = None,
    crons: Sequence[Cron] = (),
    clock: ServerClock | None = None,
    abilities: Abilities | None = None,
    host: HostWatch | None = None,
    **ctx: Any,
) -> QueueWorker:
    given_too = {"count": count, "embed": embed}
    functions = [func(chat, name="chat"), *(func(each, name=name) for name, each in given_too.items() if each)]
    return QueueWorker(
        JobFunctions(functions, ctx),
        server=RedisServer(redis, given, clock),
        settings=given,
        metrics=ctx["context"].metrics if "context" in ctx else Metrics(given.model_name),
        crons=crons,
        model=ServedModel(host=host, **({"abilities": abilities} if abilities else {})),  # type: ignore[arg-type]
    )


@asynccontextmanager
async def working(
    given: Settings,
    chat: Callable[..., Awaitable[Any]],
    *,
    count: Callable[..., Awaitable[Any]] | None = None,
    embed: Callable[..., Awaitable[Any]] | None = None,
    crons: Sequence[Cron] = (),
    clock: ServerClock | None = None,
    **ctx: Any,
) -> AsyncIterator[QueueWorker]:
    """A worker until the end of the block; then it drains, and what is left is handed back at once."""
    async with redis_from_settings(given) as redis:
        worker = queue_worker(redis, given, chat, count=count, embed=embed, crons=crons, clock=clock, **ctx)
        main = asyncio.create_task(worker.main())
        try:
            yield worker
        finally:
            if not main.done():
                worker.stop()
                worker.stop()
            await asyncio.wait_for(main, 60)
            assert [task for task in asyncio.all_tasks() if _runs_a_job_of(worker, task)] == [], "it forgot a job"


def _runs_a_job_of(worker: QueueWorker, task: asyncio.Task[Any]) -> bool:
    frame = getattr(task.get_coro(), "cr_frame", None)
    is_run = frame is not None and frame.f_code is JobRunner.run.__code__
    return is_run and frame.f_locals["self"]._stopping is worker.stopping
