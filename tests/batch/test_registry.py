"""A run without a feeder is paused, and its status has the time since when."""

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice import Batch, Client
from sluice.batch import registry
from sluice.batch.registry import BatchRegistry
from sluice.batch.run import Run
from sluice.batch.source import FileScan, Source
from sluice.contract import keys
from sluice.contract.batch import NO_LINES, BatchState
from tests.batch.helpers import Chat, leave, says, started, write
from tests.queue.helpers import until


async def test_a_run_that_was_left_is_paused_until_it_is_gone_on_with(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(40)), says("last", then="hang"))
    task = await started(client, many, out, window=4)
    (batch,) = await client.batches()
    assert batch.sluice.paused_at is None
    await leave(task)
    (paused,) = await client.batches()
    assert paused == await client.batch_status(batch.id)
    assert paused.sluice.paused_at is not None
    assert (paused.status, abs(paused.sluice.paused_at - time.time()) < 5) == ("in_progress", True)
    assert paused.request_counts.completed > 0
    task = asyncio.create_task(client.batch(many, out))

    async def is_fed() -> bool:
        return (await client.batch_status(batch.id)).sluice.paused_at is None

    await until(is_fed)
    await leave(task)


async def test_a_run_whose_feeder_died_is_paused_since_it_was_heard_of(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "_report_pause", nothing)
    await leave(await started(client, write(tmp_path / "in.jsonl", says("a"), says("b", then="hang")), out))
    (batch,) = await client.batches()
    assert batch.sluice.paused_at is None, "it may have been heard of just now"
    await db.expire(keys.batch(batch.id), 7 * 86_400 - 60)
    (batch,) = await client.batches()
    assert batch.sluice.paused_at is not None
    assert abs(time.time() - 60 - batch.sluice.paused_at) < 3


@pytest.mark.parametrize("value", ["{", "3", "[" * 100_000, '{"id": 1}', b"\xff", None])
async def test_a_value_that_no_feeder_wrote_hides_no_run(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path, value: str | bytes | None
) -> None:
    await leave(await started(client, write(tmp_path / "in.jsonl", says("a"), says("b", then="hang")), out))
    before = await client.batches()
    if value is None:
        await db.hset(keys.batch("foreign"), "a", "b")
    else:
        await db.set(keys.batch("foreign"), value)
    assert [batch.id for batch in await client.batches()] == [batch.id for batch in before]


@pytest.mark.parametrize(
    "changed",
    [
        {"request_counts": {"total": "many"}},
        {"created_at": None},
        {"id": 5},
        {"sluice": {"paused_at": "then"}},
        {"sluice": {"left": ["default"]}},
        {"sluice": {"left": {"default": "many"}}},
        {"sluice": {"priority": "high"}},
    ],
    ids=str,
)
async def test_a_status_with_values_of_other_types_is_not_listed(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path, changed: dict[str, object]
) -> None:
    await leave(await started(client, write(tmp_path / "in.jsonl", says("a"), says("b", then="hang")), out))
    (batch,) = await client.batches()
    await db.set(keys.batch("foreign"), json.dumps({**json.loads(batch.to_json()), **changed}))
    assert [each.id for each in await client.batches()] == [batch.id]


async def nothing(self: Run) -> None:
    """Report nothing, as after a kill."""


async def test_a_run_that_only_reads_its_file_is_heard_of(
    client: Client, db: Redis, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, read_on = threading.Event(), threading.Event()

    def slow(self: Source) -> FileScan:
        reading.set()
        read_on.wait(10)
        return FileScan()

    monkeypatch.setattr(Source, "scan", slow)
    task = asyncio.create_task(client.batch(write(tmp_path / "in.jsonl", says("a")), out))
    await until(reading.is_set)
    (batch,) = await client.batches()
    await db.expire(keys.batch(batch.id), 60)

    async def is_touched() -> bool:
        return bool(await db.ttl(keys.batch(batch.id)) > 60)

    await until(is_touched)
    read_on.set()
    await asyncio.wait([task])


@pytest.mark.parametrize("state", ["validating", "completed", "failed", "expired", "cancelled"])
async def test_a_run_that_waits_in_an_inbox_or_has_ended_is_not_paused(
    client: Client, db: Redis, state: BatchState
) -> None:
    batch = Batch(
        id="batch_1", input_file_id="in", completion_window="24h", status=state, created_at=1, request_counts=NO_LINES
    )
    await BatchRegistry(db).announce(batch)
    await db.expire(keys.batch(batch.id), 1_000)
    assert await client.batches() == [batch]


async def test_many_statuses_are_not_read_on_the_event_loop(
    client: Client, db: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, read_known = set[threading.Thread](), registry._read_known

    def note(raw: object, left_ms: int) -> Batch | None:
        threads.add(threading.current_thread())
        return read_known(raw, left_ms)

    monkeypatch.setattr(registry, "_read_known", note)
    for number in range(250):
        status = {"completion_window": "24h", "status": "validating", "request_counts": NO_LINES}
        run = Batch(id=f"batch_{number:012x}", input_file_id="in", created_at=number, **status)  # type: ignore[arg-type]
        await BatchRegistry(db).put(run)
    assert [run.created_at for run in await client.batches()] == [*range(250)]
    assert threading.main_thread() not in threads
