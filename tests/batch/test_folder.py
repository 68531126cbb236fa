"""A folder of runs: which files are started, which runs are resumed, and where they end."""

import asyncio
import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice import Batch, Client
from sluice.batch.files import RunState, StateFile
from sluice.batch.folder import RunFolder, feed_runs, run_paths
from sluice.batch.run import new_batch
from sluice.batch.source import RunOptions
from sluice.batch.store import FileStore, result_ids
from sluice.contract.batch import RequestCounts, new_run_id
from sluice.errors import BatchTaken
from tests.batch.helpers import ANY, Chat, feed_folder, ids, says, write
from tests.queue.helpers import until


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "runs")
    made.make()
    return made


def put(folder: RunFolder, name: str, *custom_ids: str, age_s: float = 60, **more: object) -> Path:
    file = write(folder.inbox / name, *(says(custom_id, **more) for custom_id in custom_ids))
    then = time.time() - age_s
    os.utime(file, (then, then))
    return file


async def feed(client: Client, folder: RunFolder, *, take: bool = True) -> None:
    await feed_folder(client, folder.root, take=take, models=ANY)


def there(folder: RunFolder) -> dict[str, list[str]]:
    """Return the names of runs and files in each subfolder, without the random part of an id."""
    parts = (folder.inbox, folder.running, folder.done, folder.failed)
    return {part.name: sorted(_stem(path.name) for path in part.iterdir()) for part in parts if any(part.iterdir())}


def _stem(name: str) -> str:
    return name.removeprefix("batch_").rpartition("_")[0] or name


async def test_a_file_in_the_inbox_is_taken_fed_and_done(client: Client, chat: Chat, folder: RunFolder) -> None:
    put(folder, "report.jsonl", "a", "b")
    await feed(client, folder, take=False)
    assert there(folder) == {"inbox": ["report.jsonl"]}
    await feed(client, folder)
    assert there(folder) == {"done": ["report"]}
    (home,) = folder.done.iterdir()
    (batch,) = await client.batches()
    assert (batch.id, batch.status) == (home.name, "completed")
    assert (batch.input_file_id, batch.output_file_id) == (str(home / "input.jsonl"), str(home / "output.jsonl"))
    assert sorted(ids(home / "output.jsonl")) == ["a", "b"]


async def test_who_hears_of_the_end_finds_the_answers(client: Client, chat: Chat, folder: RunFolder) -> None:
    submitted = await client.submit_batch(put(folder, "../in.jsonl", "a"), folder.root)
    feeding = asyncio.create_task(feed(client, folder))
    events = [batch async for batch in client.batch_events(submitted.id)]
    assert events[-1].output_file_id is not None
    await feeding
    assert ids(Path(events[-1].output_file_id)) == ["a"]


async def test_a_submitted_file_keeps_the_id_that_its_submit_said(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path
) -> None:
    submitted = await client.submit_batch(write(tmp_path / "my file.jsonl", says("a")), folder.root)
    assert (submitted.status, submitted.id.startswith("batch_my-file_")) == ("validating", True)
    assert await client.batch_status(submitted.id) == submitted
    assert {path.name for path in folder.inbox.iterdir()} == {f"{submitted.id}.jsonl", f"{submitted.id}.run"}
    await feed(client, folder)
    assert (await client.batch_status(submitted.id)).status == "completed"
    assert [path.name for path in folder.done.iterdir()] == [submitted.id]


async def test_a_submitted_run_brings_its_options_along(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path
) -> None:
    file = write(tmp_path / "in.jsonl", says("a", model="gpt-4o", tenant="other"), says("b", model="another"))
    submitted = await client.submit_batch(
        file, folder.root, models={"gpt-4o": "default"}, completion_window="2d", metadata={"team": "x"}, tenant="acme"
    )
    await feed(client, folder)  # whose own mapping has the other name
    batch = await client.batch_status(submitted.id)
    assert (batch.status, batch.completion_window, batch.metadata) == ("completed", "2d", {"team": "x"})
    assert (batch.created_at, batch.sluice.tenant) == (submitted.created_at, "acme")
    assert batch.sluice.models == {"default": 2}
    assert [request["tenant"] for request in chat.requests] == ["acme", "acme"]


async def test_mapping_of_all_names_goes_before_the_workers_mapping(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path
) -> None:
    file = write(tmp_path / "in.jsonl", says("a", model="gpt-4o"))
    submitted = await client.submit_batch(file, folder.root, models={"*": "default"})
    await feed_folder(client, folder.root, take=True, models={"gpt-4o": "unserved", "*": "unserved"})
    assert (await client.batch_status(submitted.id)).sluice.models == {"default": 1}


async def test_completion_window_of_a_submitted_run_begins_when_it_is_taken(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path
) -> None:
    file = write(tmp_path / "in.jsonl", says("a"))
    submitted = await client.submit_batch(file, folder.root, completion_window="60s")
    await asyncio.sleep(1.2)
    await feed(client, folder)
    batch = await client.batch_status(submitted.id)
    assert (batch.status, batch.created_at) == ("completed", submitted.created_at)
    assert (batch.expires_at or 0) > (submitted.expires_at or 0)


STEPS = ["copied", "state written", "in the inbox", "state taken", "taken"]


@pytest.mark.parametrize("step", STEPS)
async def test_crash_in_a_hand_over_leaves_no_run_or_a_whole_one(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = await client.submit_batch(
        write(tmp_path / "in.jsonl", says("a")), folder.root, metadata={"team": "x"}, tenant="acme"
    )
    waiting, state = folder.inbox / f"{submitted.id}.jsonl", folder.inbox / f"{submitted.id}.run"
    run_dir = folder.running / submitted.id
    if step in STEPS[:2]:
        waiting.rename(folder.inbox / f".{submitted.id}.part")
    if step == STEPS[0]:
        state.write_bytes(state.read_bytes()[:40])
    if step in STEPS[3:]:
        run_dir.mkdir()
        state.rename(run_dir / "run")
    if step == STEPS[4]:
        waiting.rename(run_dir / "input.jsonl")
    await feed(client, folder)
    batch = await client.batch_status(submitted.id)
    if step in STEPS[:2]:
        assert (batch.status, list(folder.running.iterdir()), chat.began) == ("validating", [], [])
        tomorrow = time.time() + 90_000
        monkeypatch.setattr(time, "time", lambda: tomorrow)
        await feed(client, folder)
        assert there(folder) == {}
    else:
        assert (batch.status, batch.metadata, batch.sluice.tenant) == ("completed", {"team": "x"}, "acme")
        assert there(folder) == {"done": ["in"]}


async def test_a_submit_that_fails_leaves_nothing(client: Client, folder: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await client.submit_batch(tmp_path / "missing.jsonl", folder.root)
    file = write(tmp_path / "in.jsonl", says("a"))
    with pytest.raises(ValueError, match="completion_window"):
        await client.submit_batch(file, folder.root, completion_window="never")
    assert there(folder) == {}


async def test_of_many_that_submit_one_id_at_once_one_wins_and_the_others_are_told(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path
) -> None:
    run_id = new_run_id("same")
    files = [write(tmp_path / f"{n}.jsonl", *(says(f"{n}-{k}") for k in range(20))) for n in range(8)]
    submitting = (client.submit_batch(file, folder.root, id=run_id) for file in files)
    submitted = await asyncio.gather(*submitting, return_exceptions=True)
    won = [each for each in submitted if isinstance(each, Batch)]
    told = [each for each in submitted if isinstance(each, BatchTaken)]
    assert (len(won) >= 1, len(won) + len(told)) == (True, 8), submitted
    assert sorted(path.name for path in folder.inbox.iterdir()) == [f"{run_id}.jsonl", f"{run_id}.run"]
    await feed(client, folder)
    answered = ids(folder.done / run_id / "output.jsonl")
    assert sorted(answered) in [sorted(f"{n}-{k}" for k in range(20)) for n in range(8)]
    again = await client.submit_batch(files[0], folder.root, id=run_id)
    assert (again.status, there(folder)) == ("completed", {"done": ["same"]})


async def test_a_submit_does_not_take_the_files_of_another_of_its_id_that_copies(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id, copying, go_on = new_run_id("same"), threading.Event(), threading.Event()
    files = [write(tmp_path / f"{name}.jsonl", says(name)) for name in ("first", "second")]

    def copy_slowly(file: Path, partial: Path) -> None:
        partial.write_bytes(file.read_bytes()[:20])
        copying.set()
        assert go_on.wait(30)
        partial.write_bytes(file.read_bytes())

    monkeypatch.setattr("sluice.batch.folder._copy", copy_slowly)
    first = asyncio.create_task(client.submit_batch(files[0], folder.root, id=run_id))
    await until(copying.is_set)
    with pytest.raises(BatchTaken, match=rf"^{run_id}: another command is submitting it"):
        await client.submit_batch(files[1], folder.root, id=run_id)
    go_on.set()
    assert (await first).status == "validating"
    await feed(client, folder)
    assert ids(folder.done / run_id / "output.jsonl") == ["first"]


async def test_an_id_that_comes_again_gets_another(client: Client, chat: Chat, folder: RunFolder) -> None:
    name = "batch_again_0123456789ab"
    for custom_id in ("a", "b"):
        put(folder, f"{name}.jsonl", custom_id)
        await feed(client, folder)
    assert ids(folder.done / name / "output.jsonl") == ["a"]
    assert len(list(folder.done.iterdir())) == 2


async def test_a_run_that_waits_can_be_cancelled(client: Client, chat: Chat, folder: RunFolder, tmp_path: Path) -> None:
    submitted = await client.submit_batch(write(tmp_path / "in.jsonl", says("a")), folder.root)
    await client.cancel_batch(submitted.id)
    await feed(client, folder)
    assert (await client.batch_status(submitted.id)).status == "cancelled"
    assert (there(folder), chat.began) == ({"failed": ["in"]}, [])


async def test_a_bad_file_ends_in_failed_and_the_next_is_run(client: Client, chat: Chat, folder: RunFolder) -> None:
    put(folder, "bad.jsonl", "a", "a", age_s=100)
    put(folder, "good.jsonl", "a")
    await feed(client, folder)
    assert there(folder) == {"done": ["good"], "failed": ["bad"]}
    assert {batch.status for batch in await client.batches()} == {"completed", "failed"}


async def test_files_are_taken_oldest_first(client: Client, chat: Chat, folder: RunFolder) -> None:
    for k in (2, 3, 1):
        put(folder, f"{k}.jsonl", f"r{k}", age_s=100 - k, words=f"{k}")
    await feed_runs(client.redis, folder, take=True, models=ANY, at_once=1)
    assert [request["say"] for request in chat.requests] == [["1"], ["2"], ["3"]]


async def test_a_run_whose_model_nobody_serves_holds_up_no_other_and_the_log_names_the_setting(
    client: Client, chat: Chat, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    put(folder, "early.jsonl", "a", age_s=100, model="nobody")
    put(folder, "late.jsonl", "b")
    feeding = asyncio.create_task(feed_folder(client, folder.root, take=True, models={}))
    await until(lambda: there(folder) == {"running": ["early"], "done": ["late"]})
    await leave_pass(feeding)
    assert "or set nobody=" in caplog.text
    assert "in the workers' SLUICE_BATCH_MODELS" in caplog.text
    assert "--map" not in caplog.text


async def test_a_run_with_a_file_in_it_that_no_run_wrote_ends_as_failed(
    client: Client, chat: Chat, folder: RunFolder
) -> None:
    for name, file in ("batch_one_0123456789ab", "run"), ("batch_two_0123456789ab", "output.jsonl"):
        home = folder.running / name
        home.mkdir()
        write(home / "input.jsonl", says("a"))
        (home / file).write_text("Somebody's notes.\n")
    await feed(client, folder)
    assert (there(folder), chat.began) == ({"failed": ["one", "two"]}, [])
    for batch in await client.batches():
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data[0].code == "refused"


@pytest.mark.parametrize(
    "changed",
    [
        {"sluice": {"priority": "5"}},
        {"sluice": {"not_before": "22:00"}},
        {"sluice": {"retry": ["cut"]}},
        {"sluice": {"kinds": []}},
        {"sluice": {"kinds": {"cut": {"lines": "x"}}}},
        {"sluice": {"tenant": []}},
        {"sluice": {"output_expires_s": ""}},
        {"sluice": {"allowed_models": "default"}},
        {"metadata": {"team": 5}},
        {"id": "\ud800"},
        {"created_at": float("nan")},
        {"status": "failed", "failed_at": float("inf")},
        {"status": "completed", "completed_at": True},
        {"expires_at": "soon"},
        {"completion_window": "a day"},
        {"status": "waiting"},
    ],
    ids=str,
)
async def test_a_state_with_values_that_no_run_writes_ends_its_run_alone(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path, changed: dict[str, object]
) -> None:
    file = write(tmp_path / "in.jsonl", says("a"))
    submitted = await client.submit_batch(file, folder.root)
    state = folder.inbox / f"{submitted.id}.run"
    stored = json.loads(state.read_text())
    state.write_text(json.dumps({**stored, "batch": {**stored["batch"], **changed}}) + "\n")
    put(folder, "good.jsonl", "b")
    await feed(client, folder)
    assert there(folder)["done"] == ["good"]
    assert [path.name for path in folder.failed.iterdir()] == [submitted.id]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("run", "[" * 100_000),
        ("output.jsonl", "[" * 100_000),
        ("output.jsonl", '{"id": 5, "custom_id": "a"}'),
        ("output.jsonl", '{"id": "b-1", "custom_id": "a", "sluice": {"kind": "answered", "output_tokens": "many"}}'),
        ("errors.jsonl", '{"id": "b-1", "custom_id": ["a"]}'),
        ("output.jsonl.retries", '{"retry": 1, "mends": 0, "changes": {}, "line": {"custom_id": 5, "response": null}}'),
        (
            "output.jsonl.retries",
            '{"retry": "1", "mends": 0, "changes": {}, "line": {"custom_id": "a", "response": 0}}',
        ),
    ],
)
async def test_lines_that_no_run_writes_end_their_run_alone(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path, file: str, content: str
) -> None:
    submitted = await client.submit_batch(write(tmp_path / "bad.jsonl", says("a")), folder.root)
    home = folder.running / submitted.id
    home.mkdir()
    for path in folder.inbox.iterdir():
        path.rename(home / ("run" if path.suffix == ".run" else "input.jsonl"))
    (home / file).write_text(f"{content}\n")
    put(folder, "good.jsonl", "b")
    await feed(client, folder)
    assert there(folder) == {"failed": ["bad"], "done": ["good"]}
    batch = await client.batch_status(home.name)
    assert batch.errors is not None
    assert "not written by a run" in batch.errors.data[0].message


async def test_a_file_that_is_still_written_is_left(client: Client, chat: Chat, folder: RunFolder) -> None:
    for name in (".hidden.jsonl", "half.jsonl.part", "half.tmp", "notes.txt"):
        put(folder, name, "a")
    put(folder, "settled.jsonl", "a", age_s=0)
    growing = put(folder, "growing.jsonl", "a", age_s=0)
    feeding = asyncio.create_task(feed(client, folder))
    await asyncio.sleep(0.1)
    growing.write_bytes(growing.read_bytes() + json.dumps(says("b")).encode())
    await feeding
    assert there(folder)["done"] == ["settled"]
    assert there(folder)["inbox"] == [".hidden.jsonl", "growing.jsonl", "half.jsonl.part", "half.tmp", "notes.txt"]


async def test_a_run_that_nobody_feeds_is_gone_on_with_by_the_models_it_began_with(
    client: Client, chat: Chat, folder: RunFolder
) -> None:
    put(folder, "in.jsonl", *(f"r{k}" for k in range(40)))
    feeding = asyncio.create_task(feed(client, folder))
    await until(lambda: len(chat.began) > 5)
    await leave_pass(feeding)
    assert there(folder) == {"running": ["in"]}
    await feed_folder(client, folder.root, take=False, models={"*": "another"})
    (home,) = folder.done.iterdir()
    assert sorted(ids(home / "output.jsonl")) == sorted(f"r{k}" for k in range(40))
    assert len(chat.began) == 40


async def leave_pass(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait([task])


async def test_a_run_that_somebody_feeds_is_let_be(client: Client, chat: Chat, folder: RunFolder) -> None:
    home = folder.running / "batch_in_0123456789ab"
    home.mkdir()
    write(home / "input.jsonl", says("a"))
    with StateFile(home / "run"):
        await feed(client, folder)
        assert (there(folder), chat.began) == ({"running": ["in"]}, [])
    await feed(client, folder)
    assert there(folder) == {"done": ["in"]}


async def test_of_many_feeders_each_file_is_taken_by_one(client: Client, chat: Chat, folder: RunFolder) -> None:
    for k in range(6):
        put(folder, f"{k}.jsonl", f"r{k}")
    await asyncio.gather(*(feed(client, folder) for _ in range(4)))
    await feed(client, folder, take=False)
    assert there(folder) == {"done": [f"{k}" for k in range(6)]}
    assert len(chat.began) == 6


async def test_an_end_that_nobody_was_told_of_is_made_good_by_the_next_pass(
    client: Client, db: Redis, chat: Chat, folder: RunFolder
) -> None:
    put(folder, "in.jsonl", "a")
    await feed(client, folder)
    (home,) = folder.done.iterdir()
    home.rename(folder.running / home.name)
    await db.flushdb()
    await feed(client, folder, take=False)
    batch: Batch = await client.batch_status(home.name)
    assert (there(folder), batch.status, batch.output_file_id) == (
        {"done": ["in"]},
        "completed",
        str(home / "output.jsonl"),
    )
    assert len(chat.began) == 1


async def test_a_run_whose_end_the_server_refuses_is_archived_by_a_later_pass(
    client: Client, db: Redis, chat: Chat, folder: RunFolder, redis_url: str
) -> None:
    put(folder, "in.jsonl", "a")
    await feed(client, folder)
    (home,) = folder.done.iterdir()
    home.rename(folder.running / home.name)
    await db.acl_setuser("reader", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-set"])
    try:
        async with Client(redis_url.replace("redis://", "redis://reader:any@")) as reader:
            await feed(reader, folder, take=False)
            assert there(folder) == {"running": ["in"]}
    finally:
        await db.acl_deluser("reader")
    await feed(client, folder, take=False)
    assert there(folder) == {"done": ["in"]}


async def test_what_is_no_run_is_let_be(client: Client, folder: RunFolder) -> None:
    (folder.running / "notes.txt").write_text("hello")
    (folder.running / "empty").mkdir()
    await feed(client, folder)
    assert there(folder) == {"running": ["empty", "notes.txt"]}


async def test_an_input_that_changed_while_the_run_lay_ends_it(client: Client, chat: Chat, folder: RunFolder) -> None:
    put(folder, "in.jsonl", "a", then="hang")
    feeding = asyncio.create_task(feed(client, folder))
    await until(lambda: bool(chat.running))
    await leave_pass(feeding)
    (home,) = folder.running.iterdir()
    write(home / "input.jsonl", says("b"))
    await feed(client, folder)
    batch = await client.batch_status(home.name)
    assert batch.errors is not None
    assert (batch.status, batch.errors.data[0].code, there(folder)) == ("failed", "refused", {"failed": ["in"]})


async def test_what_is_no_file_stays_in_the_inbox_and_is_named(
    client: Client, chat: Chat, folder: RunFolder, caplog: pytest.LogCaptureFixture
) -> None:
    (folder.inbox / "folder.jsonl").mkdir()
    os.mkfifo(folder.inbox / "pipe.jsonl")
    write(folder.root / "elsewhere.jsonl", says("a"))
    (folder.inbox / "link.jsonl").symlink_to("../elsewhere.jsonl")
    await feed(client, folder)
    assert sorted(path.name for path in folder.inbox.iterdir()) == ["folder.jsonl", "link.jsonl", "pipe.jsonl"]
    assert list(folder.running.iterdir()) == []
    said = {record.getMessage().split(" stays in the inbox")[0] for record in caplog.records}
    assert said == {"folder.jsonl", "link.jsonl", "pipe.jsonl"}


@pytest.mark.parametrize("kill", ["rename", "rmdir", "unlink"])
def test_a_deletion_that_is_killed_leaves_no_answers_without_their_file(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, kill: str
) -> None:
    run_dir, store = folder.done / new_run_id(), FileStore(folder.root)
    run_dir.mkdir()
    batch = replace(new_batch(run_paths(run_dir), RunOptions(id=run_dir.name)), request_counts=RequestCounts(1, 1, 0))
    ended = batch.enter("completed", time.time())
    (run_dir / "output.jsonl").write_text("answers\n")
    with StateFile(run_paths(run_dir).state) as state:
        state.save(RunState(ended, "", {}))
    store.keep_results(ended, run_dir)
    file = store.find(None, result_ids(ended)[0] or "")
    assert file is not None

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path if kill == "rename" else os, kill, die)
        with pytest.raises(KeyboardInterrupt):
            store.delete(None, file)
    store.sweep()
    assert store.find(None, file.id) or not (run_dir / "output.jsonl").exists()


def test_deleting_the_answers_of_before_a_rerun_leaves_those_of_after_it(folder: RunFolder) -> None:
    run_dir, store = folder.done / new_run_id(), FileStore(folder.root)
    run_dir.mkdir()
    answers = run_dir / "output.jsonl"
    batch = replace(new_batch(run_paths(run_dir), RunOptions(id=run_dir.name)), request_counts=RequestCounts(1, 1, 0))
    ends = [batch.enter("completed", at) for at in (1_000.0, 2_000.0)]
    for ended, text in zip(ends, ("before\n", "after\n"), strict=True):
        answers.unlink(missing_ok=True)
        answers.write_text(text)
        with StateFile(run_paths(run_dir).state) as state:
            state.save(RunState(ended, "", {}))
        store.keep_results(ended, run_dir)
    before, after = (store.find(None, result_ids(ended)[0] or "") for ended in ends)
    assert before is not None
    assert after is not None

    store.delete(None, before)
    assert answers.read_text() == "after\n"
    store.delete(None, after)
    assert not answers.exists()


async def test_a_model_that_cannot_be_served_ends_its_run_alone(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path
) -> None:
    file = write(tmp_path / "bad.jsonl", says("a"))
    await client.submit_batch(file, folder.root, models={"*": "no name"})
    await client.submit_batch(write(tmp_path / "good.jsonl", says("b")), folder.root, models=ANY)
    await feed(client, folder)
    assert there(folder) == {"failed": ["bad"], "done": ["good"]}
