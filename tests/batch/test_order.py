"""When the runs of a folder start, in which order their lines are queued, and when they are expected to end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Batch, Client
from sluice.batch.folder import RunFolder, feed_runs
from sluice.batch.times import Hours
from sluice.contract import keys
from tests.batch.helpers import ANY, Chat, says, write
from tests.queue.helpers import settings, until, working

HOUR_S = 3600.0


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "runs")
    made.make()
    return made


async def submit(client: Client, folder: RunFolder, word: str, lines: int = 1, **options: Any) -> Batch:
    model = {"model": options.pop("model")} if "model" in options else {}
    file = write(folder.root / f"{word}.jsonl", *(says(f"{word}{k}", f"{word}{k}", **model) for k in range(lines)))
    return await client.submit_batch(file, folder.root, **options)


@asynccontextmanager
async def feeding(redis: Redis, folder: RunFolder, **more: Any) -> AsyncIterator[asyncio.Event]:
    """A feeder that has taken the inbox in, until the end of the block."""
    takes = asyncio.Event()
    task = asyncio.create_task(feed_runs(redis, folder, take=True, models=ANY, takes=takes, **more))
    try:
        yield takes
    finally:
        task.cancel()
        await asyncio.wait([task])


# Not before


async def test_a_run_waits_for_its_time_whenever_the_inbox_is_taken_in(
    client: Client, db: Redis, chat: Chat, folder: RunFolder
) -> None:
    at = time.time() + HOUR_S
    batch = await submit(client, folder, "a", not_before=at, completion_window="30m")
    for now in at - HOUR_S, at - 1:
        await feed_runs(db, folder, take=True, models=ANY, clock=lambda now=now: now)  # type: ignore[misc]
        waiting = await client.batch_status(batch.id)
        assert (waiting.status, waiting.sluice.not_before) == ("validating", int(at))
    await feed_runs(db, folder, take=True, models=ANY, clock=lambda: at)
    done = await client.batch_status(batch.id)
    assert (done.status, done.expires_at and done.expires_at > time.time() + 1700) == ("completed", True)


@pytest.mark.parametrize("not_before", [HOUR_S, None])
async def test_a_run_that_is_cancelled_in_the_inbox_ends_in_a_pass_that_takes_no_files(
    client: Client, db: Redis, chat: Chat, folder: RunFolder, not_before: float | None
) -> None:
    batch = await submit(client, folder, "a", not_before=not_before and time.time() + not_before)
    other = await submit(client, folder, "b")
    await client.cancel_batch(batch.id)
    await feed_runs(db, folder, take=False, models=ANY)
    assert ((await client.batch_status(batch.id)).status, chat.requests) == ("cancelled", [])
    assert [file.name for file in folder.inbox.glob("*.jsonl")] == [f"{other.id}.jsonl"]


async def test_a_run_that_is_cancelled_while_others_have_all_places_ends_before_them(
    client: Client, db: Redis, folder: RunFolder
) -> None:
    long = await submit(client, folder, "long", priority=1)
    taken, waiting, later = [await submit(client, folder, word) for word in ("a", "b", "c")]
    async with feeding(db, folder, at_once=1, look_s=0.1):
        await until(lambda: queued_is(db, long, 1))
        arrived = await submit(client, folder, "d")
        for run in taken, waiting, arrived:
            await client.cancel_batch(run.id)
        for run in taken, waiting, arrived:
            await until(lambda run=run: is_in(client, run, "cancelled"))  # type: ignore[misc]
        assert await is_in(client, long, "in_progress")
        assert await is_in(client, later, "validating")


async def test_a_status_is_kept_for_as_long_as_its_run_waits(client: Client, db: Redis, folder: RunFolder) -> None:
    batch = await submit(client, folder, "a", not_before=time.time() + 30 * 24 * HOUR_S)
    await db.expire(keys.batch(batch.id), 60)
    await feed_runs(db, folder, take=True, models=ANY)
    assert await db.ttl(keys.batch(batch.id)) > HOUR_S


# Priority


async def test_runs_start_by_priority_and_then_the_oldest_first(
    client: Client, db: Redis, chat: Chat, folder: RunFolder
) -> None:
    for word, priority in ("a", 0), ("b", -1), ("c", 5), ("d", 0), ("e", 5):
        await submit(client, folder, word, priority=priority)
        await asyncio.sleep(0.02)
    await feed_runs(db, folder, take=True, models=ANY, at_once=1)
    assert [request["say"] for request in chat.requests] == [["c0"], ["e0"], ["a0"], ["d0"], ["b0"]]


async def queued(db: Redis, run: Batch) -> int:
    waiting = await db.zrange(keys.queue("default", "batch"), 0, -1)
    return sum(id.decode().startswith(run.id) for id in waiting)


@pytest.mark.parametrize(("tenant", "goes_first"), [(None, True), ("other", False)])
async def test_lines_of_a_higher_priority_are_queued_before_more_of_a_run_that_has_begun(
    client: Client, redis_url: str, db: Redis, folder: RunFolder, tenant: str | None, goes_first: bool
) -> None:
    low = await submit(client, folder, "low", 600)
    async with feeding(db, folder) as takes:
        await until(lambda: queued_is(db, low, 256), within_s=60)
        high = await submit(client, folder, "high", 600, priority=1, tenant=tenant)
        takes.set()
        await until(lambda: queued_is(db, high, 256), within_s=60)
        await asyncio.sleep(2.5)  # a feeder looks for others every two seconds
        chat = Chat()
        async with working(settings(redis_url, max_rows=8, reserved_rows=0), chat.chat):
            await until(lambda: len(chat.requests) == 1200, within_s=60)
    are_high = [request["say"][0].startswith("high") for request in chat.requests]
    nth = [index for index, is_high in enumerate(are_high) if is_high][343]  # then its window takes all that are left
    assert (nth - 343 <= 256 + 8) == goes_first


async def queued_is(db: Redis, run: Batch, count: int) -> bool:
    return await queued(db, run) == count


async def test_a_run_for_another_model_waits_for_no_priority(
    client: Client, db: Redis, chat: Chat, folder: RunFolder
) -> None:
    await submit(client, folder, "high", 600, priority=1, models={"*": "unserved"})
    low = await submit(client, folder, "low", 300)
    async with feeding(db, folder):
        await until(lambda: is_in(client, low, "completed"), within_s=60)


async def test_lines_for_a_model_that_nobody_serves_hold_no_run_for_another(
    client: Client, db: Redis, chat: Chat, folder: RunFolder
) -> None:
    lines = (says(f"high{k}", "high", model="unserved" if k < 300 else "default") for k in range(310))
    file, models = write(folder.root / "high.jsonl", *lines), {"unserved": "unserved"}
    high = await client.submit_batch(file, folder.root, priority=1, models=models)
    low = await submit(client, folder, "low", 300)
    async with feeding(db, folder):
        await until(lambda: is_in(client, low, "completed"), within_s=60)
        await until(lambda: has_left(client, high, {"unserved": 300}), within_s=60)


async def test_runs_for_models_that_nobody_serves_give_their_places_to_others(
    client: Client, db: Redis, redis_url: str, folder: RunFolder
) -> None:
    unserved = [await submit(client, folder, f"no{n}", models={"*": "unserved"}, priority=1) for n in range(3)]
    runs = [await submit(client, folder, f"a{n}") for n in range(3)]
    late = Chat()
    async with feeding(db, folder, at_once=2, look_s=0.1):
        async with working(settings(redis_url, max_rows=8, reserved_rows=0), late.chat):
            for run in runs:
                await until(lambda run=run: is_in(client, run, "completed"), within_s=60)  # type: ignore[misc]
        given = settings(redis_url, max_rows=8, reserved_rows=0, model_name="unserved")
        async with working(given, late.chat):
            for run in unserved:
                await until(lambda run=run: is_in(client, run, "completed"), within_s=60)  # type: ignore[misc]
    assert len(late.requests) == 6


async def has_left(client: Client, run: Batch, left: dict[str, int]) -> bool:
    return (await client.batch_status(run.id)).sluice.left == left


async def is_in(client: Client, run: Batch, status: str) -> bool:
    return (await client.batch_status(run.id)).status == status


# While others run


async def test_a_file_is_started_while_the_feeder_has_another_run(
    client: Client, db: Redis, chat: Chat, folder: RunFolder
) -> None:
    await submit(client, folder, "long", models={"*": "unserved"})
    async with feeding(db, folder) as takes:
        await asyncio.sleep(0.3)
        batch = await submit(client, folder, "a")
        await asyncio.sleep(0.3)
        assert (await client.batch_status(batch.id)).status == "validating"
        takes.set()
        await until(lambda: is_in(client, batch, "completed"), within_s=60)


# The end


async def test_a_run_says_when_it_will_end_until_it_has(client: Client, chat: Chat, tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", *(says(f"a{k}", "hi", pace_s=0.2) for k in range(160)))
    seen = list[tuple[float, Batch]]()
    done = await client.batch(file, tmp_path / "out.jsonl", on_progress=lambda batch: seen.append((time.time(), batch)))
    ended_at = time.time()
    estimates = [batch.sluice.estimated_end_at for _, batch in seen if batch.request_counts.completed > 80]
    assert all(at is not None and abs(at - ended_at) < 10 for at in estimates[:3])
    assert (done.sluice.estimated_end_at, (await client.batch_status(done.id)).sluice.estimated_end_at) == (None, None)


async def test_hours_in_which_no_offline_job_runs_are_in_the_estimate(
    client: Client, db: Redis, redis_url: str, folder: RunFolder
) -> None:
    batch, chat = await submit(client, folder, "a", 5000), Chat()
    minute = int(time.time() // 60)
    hours = Hours((minute - 1) % 1440, (minute + 2) % 1440)  # the work takes longer: it ends tomorrow
    async with (
        feeding(db, folder, hours=hours),
        working(settings(redis_url, max_rows=1, reserved_rows=0), slowly(chat)),
    ):
        await until(lambda: has_estimate(client, batch), within_s=60)
        at = (await client.batch_status(batch.id)).sluice.estimated_end_at
        assert at is not None
        assert at - time.time() > 20 * HOUR_S
    paused = (await client.batch_status(batch.id)).sluice
    assert (paused.estimated_end_at, paused.paused_at is not None) == (None, True)


def slowly(chat: Chat) -> Any:
    async def answer(ctx: dict[Any, Any], request: dict[str, Any]) -> Any:
        await asyncio.sleep(0.1)
        return await chat.chat(ctx, request)

    return answer


async def has_estimate(client: Client, run: Batch) -> bool:
    return (await client.batch_status(run.id)).sluice.estimated_end_at is not None
