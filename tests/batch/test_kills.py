"""Runs whose feeder was killed: what the next one finds of their jobs, and what it leaves."""

import asyncio
import fcntl
import time
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.batch import files
from sluice.batch import folder as folder_module
from sluice.batch.files import RunState, StateFile, read_state
from sluice.batch.folder import RunFolder, find_run, run_paths
from sluice.batch.run import new_batch
from sluice.batch.source import RunOptions
from sluice.batch.store import FileStore, result_ids
from sluice.contract.batch import RequestCounts, new_run_id
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


def test_a_run_that_moves_back_to_be_run_again_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, store = RunFolder(tmp_path), FileStore(tmp_path)
    folder.make()
    store.make()
    run_dir = folder.done / new_run_id()
    run_dir.mkdir()
    batch = replace(new_batch(run_paths(run_dir), RunOptions(id=run_dir.name)), request_counts=RequestCounts(1, 1, 0))
    batch = batch.enter("completed", time.time())
    with StateFile(run_paths(run_dir).state) as state:
        state.save(RunState(batch, "", {}))
    (run_dir / "output.jsonl").write_text("{}\n")
    store.keep_results(batch, run_dir)
    is_there, moved = Path.exists, folder.running / run_dir.name

    def move_back(path: Path) -> RunState | None:
        try:
            return read_state(path)
        finally:
            if path == run_paths(moved).state and is_there(run_dir):
                run_dir.rename(moved)

    monkeypatch.setattr(folder_module, "read_state", move_back)
    assert find_run(folder, run_dir.name) is not None
    moved.rename(run_dir)

    def exists_and_move_back(path: Path) -> bool:
        found = is_there(path)
        if path == moved and is_there(run_dir):
            run_dir.rename(moved)
        return found

    monkeypatch.setattr(Path, "exists", exists_and_move_back)
    store.sweep()
    assert store.find(None, result_ids(batch)[0] or "") is not None, "its answers are no orphan"


def test_a_state_is_read_also_if_its_run_has_just_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "running").mkdir()
    write(tmp_path / "running" / "run", {"feeder": "x"})
    lock = fcntl.flock

    def lock_and_move(*args: int) -> None:
        lock(*args)
        (tmp_path / "running").rename(tmp_path / "done")

    monkeypatch.setattr(files.fcntl, "flock", lock_and_move)
    StateFile(tmp_path / "running" / "run")._file.close()
    monkeypatch.undo()
    StateFile(tmp_path / "done" / "run")._file.close()  # no lock was left behind


def test_what_a_deletion_left_that_was_killed_is_removed(tmp_path: Path) -> None:
    gone = tmp_path / "done" / f".{new_run_id()}.gone"
    gone.mkdir(parents=True)
    (gone / "output.jsonl").write_text("{}\n")
    FileStore(tmp_path).make()
    assert not gone.exists()
