"""Runs whose feeder was killed: what the next one finds of their jobs, and what it leaves."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.batch.files import StateFile
from tests.batch.helpers import ANY, Chat, feed_folder, holds, ids, leave, left, says, write
from tests.queue.helpers import BATCH, settings, until, working


@pytest.fixture
def many(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(30)))


async def killed(client: Client, db: Redis, many: Path, out: Path) -> str:
    """Return the id of a run whose feeder has queued ten lines, and then died."""
    task = asyncio.create_task(client.batch(many, out, models=ANY, window=10))
    await until(lambda: holds(db, BATCH, 10))
    (run,) = await client.batches()
    await leave(task)
    return run.id


async def test_a_cancelled_run_takes_back_what_a_killed_feeder_had_queued(
    client: Client, db: Redis, many: Path, out: Path
) -> None:
    await client.cancel_batch(await killed(client, db, many, out))
    batch = await client.batch(many, out, models=ANY, window=10)
    assert (batch.status, batch.request_counts.failed) == ("cancelled", 30)
    assert await db.zcard(BATCH) == 0
    assert await left(db) == []


async def test_a_run_that_expired_without_a_feeder_keeps_the_answers_of_meanwhile(
    client: Client, db: Redis, redis_url: str, many: Path, out: Path
) -> None:
    await killed(client, db, many, out)
    chat = Chat()
    async with working(settings(redis_url, max_rows=8, reserved_rows=0), chat.chat):
        await until(lambda: holds(db, BATCH, 0))
    with StateFile(out.with_name("out.jsonl.run")) as state:
        saved = state.load()
        assert saved is not None
        state.save(replace(saved, batch=replace(saved.batch, expires_at=int(time.time()) - 1)))
    batch = await client.batch(many, out, models=ANY, window=10)
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("expired", 10, 20)
    assert len(ids(out)) == 10
    assert await left(db) == []


async def test_a_cancelled_run_takes_back_a_job_that_was_queued_again(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", fails=1, later="hang"))
    task = asyncio.create_task(client.batch(many, out, models=ANY))
    await until(lambda: len(chat.requests) == 2)
    (run,) = await client.batches()
    await leave(task)
    await client.cancel_batch(run.id)
    assert (await client.batch(many, out, models=ANY)).status == "cancelled"
    await until(lambda: not chat.running)
    assert [key for key in await left(db) if not key.startswith(b"sluice:cancel:")] == []


async def test_a_run_that_is_refused_when_it_is_resumed_leaves_no_jobs(
    client: Client, db: Redis, many: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    run = await client.submit_batch(many, folder)
    task = asyncio.create_task(feed_folder(client, folder, take=True, models=ANY))
    await until(lambda: holds(db, BATCH, 30))
    task.cancel()
    await asyncio.wait([task])
    write(folder / "running" / run.id / "input.jsonl", says("other"))
    await feed_folder(client, folder, take=False, models=ANY)
    assert (await client.batch_status(run.id)).status == "failed"
    assert await left(db) == []
