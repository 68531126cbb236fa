"""Runs with a real server, and a worker in this process that answers the lines."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import NoPermissionError

from sluice import Batch, BatchRefused, BatchTaken, Client, UnknownBatch
from sluice.batch import dispatcher, files, run
from sluice.batch.endpoints import CHAT
from sluice.batch.files import StateFile
from sluice.batch.registry import BatchRegistry, JobStore
from sluice.batch.source import FileScan, Source, prefix_key
from sluice.contract import keys
from sluice.contract.batch import NO_LINES
from tests.batch.helpers import ANY, Chat, holds, ids, leave, left, line, read, says, started, write
from tests.line import Line
from tests.queue.helpers import BATCH, settings, until, working


def errors_of(out: Path) -> dict[str, str]:
    return {said["custom_id"]: said["error"]["code"] for said in read(out.with_name("out.errors.jsonl"))}


def answers_of(out: Path) -> dict[str, str]:
    return {said["custom_id"]: said["response"]["body"]["said"] for said in read(out)}


# A run


async def test_a_run_answers_every_line_once_and_leaves_nothing_on_the_server(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}", f"word {k}", model="gpt-4o-mini") for k in range(100)))
    batch = await client.batch(many, out, models=ANY, window=30, metadata={"why": "test"})
    assert answers_of(out) == {f"r{k}": f"word {k}" for k in range(100)}
    assert len(read(out)) == 100
    assert (batch.status, batch.model, batch.metadata) == ("completed", "default", {"why": "test"})
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (100, 100, 0)
    assert (batch.output_file_id, batch.error_file_id) == (str(out), None)
    assert await left(db) == []
    assert {request["model"] for request in chat.requests} == {"default"}


async def test_a_window_is_never_exceeded(client: Client, db: Redis, tmp_path: Path, out: Path) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(20)))
    task = asyncio.create_task(client.batch(many, out, models=ANY, window=7))
    await until(lambda: _has(db, 7))
    await asyncio.sleep(0.1)
    assert await db.zcard(BATCH) == 7
    await leave(task)


async def _has(db: Redis, jobs: int) -> bool:
    return bool(await db.zcard(BATCH) >= jobs)


async def test_a_model_without_a_worker_keeps_no_other_waiting(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    lines = [says(f"r{k}", f"word {k}", model="nobody" if k < 20 else "default") for k in range(30)]
    task = asyncio.create_task(client.batch(write(tmp_path / "in.jsonl", *lines), out, window=5))
    await until(lambda: out.exists() and len(read(out)) == 10)
    assert sorted(ids(out)) == [f"r{k}" for k in range(20, 30)]
    await leave(task)


async def test_progress_and_events_tell_of_the_run_to_its_end(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(40)))
    heard: list[Batch] = []
    task = asyncio.create_task(client.batch(many, out, models=ANY, window=4, on_progress=heard.append))
    await until(lambda: bool(heard))
    events = [batch async for batch in client.batch_events(heard[0].id)]
    done = await task
    assert events[-1] == done == await client.batch_status(done.id)
    assert await client.batches() == [done]
    counts = [batch.request_counts.completed for batch in heard]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 40)
    assert [batch.status for batch in heard][-1] == "finalizing"


async def test_of_an_unknown_run_there_is_no_status_no_event_and_no_cancel(client: Client, db: Redis) -> None:
    for ask in (client.batch_status("batch_1"), client.cancel_batch("batch_1"), anext(client.batch_events("batch_1"))):
        with pytest.raises(UnknownBatch):
            await ask
    assert await left(db) == []


# Failures


async def test_a_line_that_fails_stops_nothing_and_is_in_the_error_file(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    bad = [
        says("no", "a", fails=9, refuse="invalid_request", retryable=False),
        says("late", "b", fails=9, refuse="deadline"),
    ]
    many = write(tmp_path / "in.jsonl", says("r0", "c"), *bad, says("r1", "d"))
    batch = await client.batch(many, out, models=ANY)
    assert (sorted(ids(out)), errors_of(out)) == (["r0", "r1"], {"no": "invalid_request", "late": "deadline"})
    assert (batch.status, batch.request_counts.failed, batch.sluice.retried) == ("completed", 2, 0)
    assert batch.sluice.failures == {"invalid_request": 1, "deadline": 1}
    assert await left(db) == []


async def test_a_failed_line_has_the_response_that_openai_s_interface_gives(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(
        tmp_path / "in.jsonl",
        says("no", "a", fails=9, refuse="invalid_request", retryable=False),
        says("late", "b", fails=9, refuse="deadline"),
    )
    await client.batch(many, out)
    responses = {said["custom_id"]: said["response"] for said in read(out.with_name("out.errors.jsonl"))}
    assert {id: (each["status_code"], each["body"]["error"]["code"]) for id, each in responses.items()} == {
        "no": (400, "invalid_request"),
        "late": (504, "deadline"),
    }
    assert responses["no"]["body"]["error"] == {
        "message": "No room.", "type": "invalid_request_error", "param": None, "code": "invalid_request",
    }  # fmt: skip
    assert responses["no"]["request_id"].startswith("batch_")


@pytest.mark.parametrize(
    ("more", "cut_off", "failures"),
    [
        ({"say": ["{}"], "ends": "stop"}, 0, {}),
        ({"say": ["a story"], "ends": "length"}, 1, {}),
        ({"say": ["[1, 2]"], "ends": "length", "response_format": {"type": "json_object"}}, 1, {}),
        ({"say": ["[1, 2"], "ends": "length", "response_format": {"type": "json_object"}}, 0, {"answer_not_json": 1}),
        ({"say": [""], "ends": "length", "response_format": {"type": "json_schema"}}, 0, {"answer_not_json": 1}),
        ({"say": ["no"], "ends": "stop", "response_format": {"type": "json_schema"}}, 0, {"answer_not_json": 1}),
        ({"say": ["[1, 2"], "ends": "length", "response_format": {"type": "text"}}, 1, {}),
        ({"say": [""], "ends": "tool_calls", "calls": [{}], "response_format": {"type": "json_object"}}, 0, {}),
        ({"say": ["[" * 99_999], "ends": "stop", "response_format": {"type": "json_object"}}, 0, {}),
    ],
)
async def test_a_cut_answer_is_counted_apart_and_one_that_should_be_json_and_is_not_has_failed(
    client: Client, chat: Chat, tmp_path: Path, out: Path, more: dict[str, Any], cut_off: int, failures: dict[str, int]
) -> None:
    many = write(tmp_path / "in.jsonl", line("a", **more))
    batch = await client.batch(many, out)
    assert (batch.sluice.cut_off, batch.sluice.failures) == (cut_off, failures)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (not failures, len(failures))
    if failures:
        (said,) = read(out.with_name("out.errors.jsonl"))
        assert (said["response"]["status_code"], said["error"]["code"]) == (200, "answer_not_json")
        assert said["response"]["body"]["choices"][0]["message"]["content"] == "".join(more["say"])
        assert ("max_tokens" in said["error"]["message"]) == (more["ends"] == "length")


async def test_a_retryable_failure_is_tried_five_times_in_all(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("good", "a", fails=4), says("bad", "b", fails=5))
    batch = await client.batch(many, out, models=ANY)
    assert (ids(out), errors_of(out), batch.sluice.retried) == (["good"], {"bad": "overloaded"}, 2)
    assert [said["id"] for said in read(out)] == [f"{batch.id}-1-r4"]
    assert len(chat.requests) == 10
    assert await left(db) == []


async def test_a_job_that_somebody_cancels_is_that_line_s_failure(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    task = asyncio.create_task(
        client.batch(write(tmp_path / "in.jsonl", says("a", then="hang"), says("b")), out, models=ANY)
    )
    await until(lambda: len(chat.running) == 1 and len(chat.began) == 2)
    await client.cancel(chat.running[0].claim.job_id)
    assert (await task).status == "completed"
    assert (ids(out), errors_of(out)) == (["b"], {"a": "cancelled"})


async def test_a_bad_file_is_failed_with_its_lines_and_the_corrected_one_runs(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a"), says("a"))
    bad = await client.batch(many, out, models=ANY)
    assert bad.errors is not None
    assert (bad.status, [problem.line for problem in bad.errors.data]) == ("failed", [2])
    assert (chat.began, list(tmp_path.iterdir()), await client.batches()) == ([], [many], [])
    write(many, says("a"), says("b"))
    good = await client.batch(many, out, models=ANY)
    assert (good.status, good.errors, good.id == bad.id) == ("completed", None, False)


# The end, before its time


async def test_a_cancelled_run_ends_lines_for_a_model_that_nobody_serves_at_once(
    client: Client, db: Redis, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "_WORKERS_S", 60.0)
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(150)))
    task = asyncio.create_task(client.batch(many, out))
    await until(lambda: holds(db, "sluice:queue:default:batch", 150))
    (begun,) = await client.batches()
    await client.cancel_batch(begun.id)
    async with asyncio.timeout(50):
        batch = await task
    assert (batch.status, batch.request_counts.failed) == ("cancelled", 150)
    assert set(errors_of(out).values()) == {"batch_cancelled"}
    assert await left(db) == [], "no request to a worker is kept"


async def test_a_cancelled_run_keeps_its_answers_and_names_the_other_lines(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    first, last = sorted(("a", "b"), key=lambda word: prefix_key(asks(word), CHAT.prompt))
    lines = [says(f"r{k}", **(asks(last, then="hang") if k < 12 else asks(first))) for k in range(30)]
    task = await started(client, write(tmp_path / "in.jsonl", *lines), out, window=10)
    await until(lambda: len(chat.running) == 8 and len(read(out)) == 18)
    (waiting,) = await client.batches()
    assert (await client.cancel_batch(waiting.id)).status == "in_progress"
    batch = await task
    assert sorted(ids(out) + list(errors_of(out))) == sorted(f"r{k}" for k in range(30))
    assert set(errors_of(out).values()) == {"batch_cancelled"}
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    assert await left_but_cancel_requests(db) == []
    assert (await client.cancel_batch(batch.id)).status == "cancelled"


def asks(word: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": word * 64}], **more}


async def left_but_cancel_requests(db: Redis) -> list[bytes]:
    """Return the keys that are left, except cancel requests, which expire."""
    return [key for key in await left(db) if not key.startswith(b"sluice:cancel:")]


async def test_what_is_not_done_in_its_window_has_expired(client: Client, db: Redis, tmp_path: Path, out: Path) -> None:
    batch = await client.batch(
        write(tmp_path / "in.jsonl", says("a"), says("b")), out, models=ANY, completion_window="1s"
    )
    assert (batch.status, errors_of(out)) == ("expired", {"a": "batch_expired", "b": "batch_expired"})
    assert await left_but_cancel_requests(db) == []


# Going on


async def test_a_run_that_was_left_goes_on_with_what_its_jobs_did_meanwhile(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(60)))
    await leave(await started(client, many, out, window=5))
    before = ids(out)
    assert 0 < len(before) < 60
    await until(lambda: not chat.running)
    batch = await client.batch(many, out, models=ANY, window=20)
    assert (batch.status, sorted(ids(out)), ids(out)[: len(before)]) == (
        "completed",
        sorted(f"r{k}" for k in range(60)),
        before,
    )
    assert len(chat.began) == 60, "no line was computed twice"
    assert all([await db.ttl(key) > 0 for key in await left(db)]), "what was left between file and server runs out"


async def test_a_run_that_is_left_while_it_writes_leaves_nothing_of_what_it_wrote(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, delete = asyncio.Event(), JobStore.delete

    async def hang_at_first(self: JobStore, jobs: Sequence[tuple[str, str]]) -> None:
        if reached.is_set():
            return await delete(self, jobs)
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(JobStore, "delete", hang_at_first)
    task = await started(client, write(tmp_path / "in.jsonl", says("a")), out)
    await reached.wait()
    await leave(task)
    assert (ids(out), await left(db)) == (["a"], [])


async def test_after_its_end_a_run_only_says_how_it_ended(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a"))
    first = await client.batch(many, out, models=ANY)
    before = out.read_bytes()
    assert await client.batch(many, out, models=ANY) == first
    assert (out.read_bytes(), len(chat.began)) == (before, 1)


async def test_a_cancelled_run_that_was_left_before_its_last_state_was_saved_ends_cancelled(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a"))
    done = await client.batch(many, out, models=ANY)
    with StateFile(out.with_name("out.jsonl.run")) as state:
        saved = state.load()
        assert saved is not None
        state.save(replace(saved, batch=replace(done, status="cancelling", cancelling_at=7, completed_at=None)))
    batch = await client.batch(many, out, models=ANY)
    assert (batch.status, batch.cancelling_at, batch.completed_at) == ("cancelled", 7, None)


async def test_a_run_that_was_left_while_its_file_was_read_goes_on_as_the_same_run(
    client: Client, chat: Chat, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many, started_reading = write(tmp_path / "in.jsonl", says("a", model="gpt-4o-mini")), threading.Event()

    def slow(self: Source) -> FileScan:
        started_reading.set()
        time.sleep(0.1)
        return FileScan()

    with monkeypatch.context() as patched:
        patched.setattr(Source, "scan", slow)
        task = asyncio.create_task(client.batch(many, out, models={"*": "wrong"}))
        await until(started_reading.is_set)
        await leave(task)
    (left_behind,) = await client.batches()
    assert left_behind.status == "validating"
    batch = await client.batch(many, out, models=ANY, metadata={"why": "again"})
    assert (batch.id, batch.status, batch.metadata) == (left_behind.id, "completed", {"why": "again"})
    assert await client.batches() == [batch]


async def test_an_end_of_which_nobody_was_told_is_told_by_the_next(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a"))
    batch = await client.batch(many, out, models=ANY)
    await BatchRegistry(db).announce(replace(batch, status="finalizing", completed_at=None))
    await db.set(keys.batch_cancel(batch.id), "1")
    assert await client.batch(many, out, models=ANY) == batch
    assert [await client.batch_status(batch.id), await client.batches()] == [batch, [batch]]
    assert not await db.exists(keys.batch_cancel(batch.id))


async def test_a_run_whose_files_were_moved_names_them_where_they_are(
    client: Client, chat: Chat, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    many = write(old / "in.jsonl", says("a"), says("b", then="hang"))
    await leave(await started(client, many, old / "out.jsonl"))
    old.rename(new)
    task = asyncio.create_task(client.batch(new / "in.jsonl", new / "out.jsonl"))

    async def told() -> bool:
        (batch,) = await client.batches()
        return (batch.input_file_id, batch.output_file_id) == (str(new / "in.jsonl"), str(new / "out.jsonl"))

    await until(told)
    await leave(task)


async def test_a_flushed_server_costs_a_run_nothing_but_time(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(500)))
    task = await started(client, many, out, window=16)
    for _ in range(3):
        await db.flushall()
        assert not task.done()
        await asyncio.sleep(0.03)
    batch = await asyncio.wait_for(task, 60)
    assert (batch.status, sorted(ids(out))) == ("completed", sorted(f"r{k}" for k in range(500)))
    assert await client.batch_status(batch.id) == batch


async def test_a_server_that_is_away_is_waited_for(
    redis_url: str, chat: Chat, tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(60)))
    async with Line(redis_url) as way, Client(way.url) as client:
        task = await started(client, many, out, window=8)
        way.down()
        await asyncio.sleep(0.5)
        assert not task.done()
        way.up()
        assert (await asyncio.wait_for(task, 60)).status == "completed"
    assert sorted(ids(out)) == sorted(f"r{k}" for k in range(60))
    said = [record.getMessage() for record in caplog.records if record.name == "sluice.batch"]
    said = [words for words in said if not words.startswith("no worker")]  # it may not have been there yet
    assert [words.split(" (")[0].split(",")[0] for words in said] == [
        "the server does not answer",
        "the server answers again",
    ]


async def test_a_run_goes_on_within_seconds_of_a_black_hole(
    redis_url: str, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(60)))
    async with Line(redis_url) as way, Client(way.url) as client:
        task = await started(client, many, out, window=8)
        way.swallow()
        assert (await asyncio.wait_for(task, 10)).status == "completed"
    assert sorted(ids(out)) == sorted(f"r{k}" for k in range(60))


async def test_a_run_ends_with_the_error_of_a_server_that_refuses_it(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(60)))
    task = await started(client, many, out, window=2)
    (batch,) = await client.batches()
    await db.execute_command("ACL", "SETUSER", "default", "-mget")
    try:
        with pytest.raises(NoPermissionError):
            await asyncio.wait_for(task, 60)
    finally:
        await db.execute_command("ACL", "SETUSER", "default", "+mget")
    done = await client.batch(many, out)
    assert (done.id, done.status) == (batch.id, "completed")


async def test_a_run_may_be_given_more_time_when_it_is_gone_on_with(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a"), says("b", then="hang"))
    await leave(await started(client, many, out, completion_window="1h"))
    task = asyncio.create_task(client.batch(many, out, completion_window="2h"))
    await until(lambda: b"2h" in out.with_name("out.jsonl.run").read_bytes())
    await leave(task)
    (batch,) = await client.batches()
    assert (batch.completion_window, batch.expires_at) == ("2h", batch.created_at + 7_200)


async def test_a_full_disk_ends_the_command_and_loses_nothing(
    client: Client, db: Redis, chat: Chat, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(20)))

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        task = await started(client, many, out, window=4)
        patched.setattr(files.os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            await task
    assert (await client.batch(many, out, models=ANY)).status == "completed"
    assert (sorted(ids(out)), await left(db)) == (sorted(f"r{k}" for k in range(20)), [])
    assert len(chat.began) == 20


# What is refused


async def test_a_full_queue_is_waited_for(redis_url: str, client: Client, db: Redis, tmp_path: Path, out: Path) -> None:
    chat = Chat()
    async with working(settings(redis_url, max_rows=2, reserved_rows=0, queue_limit=2), chat.chat):
        many = write(tmp_path / "in.jsonl", *(says(f"r{k}") for k in range(10)))
        batch = await client.batch(many, out, models=ANY)
    assert (batch.status, len(ids(out)), batch.sluice.retried) == ("completed", 10, 0)


async def test_a_full_server_is_left_room_in_which_its_workers_end_what_there_is(
    redis_url: str, client: Client, db: Redis, tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the words of a prompt"
    many = write(tmp_path / "in.jsonl", *(says(f"r{k}", "x" * 30_000, user=secret) for k in range(100)))
    await db.config_set("maxmemory", (await db.info("memory"))["used_memory"] + 2_000_000)
    try:
        task = asyncio.create_task(client.batch(many, out, models=ANY))
        await until(lambda: "out of memory" in caplog.text or task.done())
        chat = Chat()
        async with working(settings(redis_url, reserved_rows=0), chat.chat):
            assert (await asyncio.wait_for(task, 60)).status == "completed"
    finally:
        await db.config_set("maxmemory", 0)
    assert sorted(ids(out)) == sorted(f"r{k}" for k in range(100))
    assert "out of memory" in caplog.text
    assert secret not in caplog.text
    assert all([await db.ttl(key) > 0 for key in await left(db)]), "the lease of a job that was taken back runs out"


async def test_an_output_that_is_not_the_run_s_is_never_touched(client: Client, tmp_path: Path, out: Path) -> None:
    many = write(tmp_path / "in.jsonl", says("a"))
    before = many.read_bytes()
    other = write(tmp_path / "other.jsonl", says("b"))
    for output, errors in ((other, None), (out, other)):
        with pytest.raises(BatchRefused, match="already exists"):
            await client.batch(many, output, errors=errors)
    for output, errors in ((many, None), (out, many), (out, out)):
        with pytest.raises(ValueError, match="must be different files"):
            await client.batch(many, output, errors=errors)
    assert (many.read_bytes(), sorted(tmp_path.iterdir())) == (before, [many, other])
    out.with_name("out.jsonl.run").write_text('{"speed": 5}\n')
    with pytest.raises(BatchRefused, match="was not written by a run"):
        await client.batch(many, out)


async def test_of_a_file_that_cannot_be_read_no_run_is_heard_of(client: Client, tmp_path: Path, out: Path) -> None:
    with pytest.raises(BatchRefused, match="cannot read"):
        await client.batch(tmp_path / "missing.jsonl", out)
    assert await client.batches() == []


async def test_an_input_that_has_changed_is_refused_and_so_are_other_models(
    client: Client, chat: Chat, tmp_path: Path, out: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a"), says("b", then="hang"))
    await leave(await started(client, many, out))
    with pytest.raises(BatchRefused, match="was started with other models .* use the same"):
        await client.batch(many, out, models={"*": "tiny"})
    before = out.read_bytes()
    write(many, says("a"), says("c"))
    with pytest.raises(BatchRefused, match="was started with another input: use the same"):
        await client.batch(many, out, models=ANY)
    assert out.read_bytes() == before


async def test_an_input_that_is_missing_leaves_no_file(client: Client, tmp_path: Path, out: Path) -> None:
    with pytest.raises(BatchRefused, match="cannot read"):
        await client.batch(tmp_path / "missing.jsonl", out)
    assert list(tmp_path.iterdir()) == []


async def test_an_input_that_cannot_be_read_is_refused_at_once_and_is_no_run(
    client: Client, tmp_path: Path, out: Path
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "folder", "pipe"):
        with pytest.raises(BatchRefused, match="cannot read|is not a regular file"):
            await client.batch(tmp_path / name, out)
    assert await client.batches() == []


async def test_a_second_feeder_is_told_who_feeds_the_run(client: Client, chat: Chat, tmp_path: Path, out: Path) -> None:
    many = write(tmp_path / "in.jsonl", says("a"), says("b", then="hang"))
    task = await started(client, many, out)
    with pytest.raises(BatchTaken, match=r"process \d+ on .* is feeding this run"):
        await client.batch(many, out, models=ANY)
    await leave(task)
    with StateFile(out.with_name("out.jsonl.run")) as state:
        assert state.load() is not None


@pytest.mark.parametrize("wrong", [{"completion_window": "soon"}, {"window": 0}])
async def test_a_bad_wish_is_refused_before_anything_is_written(
    client: Client, tmp_path: Path, out: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="completion_window|window must"):
        await client.batch(write(tmp_path / "in.jsonl", says("a")), out, **wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


async def test_the_last_word_does_not_wait_for_ever_for_a_server(
    redis_url: str, chat: Chat, tmp_path: Path, out: Path
) -> None:
    async with Line(redis_url) as way, Client(way.url) as client:
        done = Batch(
            id="batch_1",
            input_file_id="in",
            completion_window="24h",
            status="completed",
            created_at=1,
            request_counts=NO_LINES,
        )
        way.down()
        await run.publish(run.endless_retries(client._redis), client._registry.announce, done, for_s=0.2)


def test_a_line_is_json_whatever_its_custom_id(tmp_path: Path) -> None:
    said = json.loads(files.LineResult("batch_1-1", '"\\\n\u2028é', result=b"{}").as_line())
    assert said["custom_id"] == '"\\\n\u2028é'
