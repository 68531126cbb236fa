"""Lines of an ended run are run again: the best outcome of each is in the same files, once."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from sluice import Batch, BatchRefused, BatchTaken, Client
from sluice.batch.files import ResultFiles, StateFile
from sluice.batch.folder import RunFolder
from tests.batch.helpers import ANY, Chat, feed_folder, ids, leave, left, read, says, write
from tests.batch.test_mending import KilledError, broken, cut, kinds, outcomes
from tests.queue.helpers import until

LINES = [
    says("good", "good", needs=2),
    cut("cut", 5, 3),
    broken("broken", 1),
    says("failed", "failed", fails=1, refuse="internal", retryable=False),
]


@pytest.fixture
async def ended(client: Client, chat: Chat, tmp_path: Path, out: Path) -> Batch:
    batch = await client.batch(write(tmp_path / "in.jsonl", *LINES), out, models=ANY)
    assert kinds(batch) == {"answered": 1, "cut": 1, "invalid": 1, "failed": 1}
    chat.requests.clear()
    return batch


async def test_failed_and_invalid_lines_are_answered_in_the_same_files(
    client: Client, db: Redis, chat: Chat, ended: Batch, out: Path
) -> None:
    good = read(out)
    again = await client.rerun_batch(out)
    assert (again.id, again.status, kinds(again)) == (ended.id, "completed", {"answered": 3, "cut": 1, "replaced": 2})
    assert {request["say"][0] for request in chat.requests} == {"broken", "failed"}
    assert read(out)[:2] == good
    assert (len(read(out)), again.error_file_id, again.request_counts.failed) == (4, None, 0)
    assert not out.with_name("out.errors.jsonl").exists()
    assert again.sluice.rerun_at is not None
    assert (again.in_progress_at, again.created_at) == (ended.in_progress_at, ended.created_at)
    assert ended.sluice.seconds <= again.sluice.seconds < ended.sluice.seconds + 30
    assert (await client.batch_status(ended.id), await left(db)) == (again, [])
    assert await client.batch(again.input_file_id, out, models=ANY) == again, "it is complete"
    assert await client.rerun_batch(ended.id) == again, "there is nothing more to run again"
    assert len(chat.requests) == 2


async def test_the_kinds_are_chosen_and_a_cut_answer_gets_a_higher_limit(
    client: Client, chat: Chat, ended: Batch, out: Path
) -> None:
    again = await client.rerun_batch(ended.id, ["cut"])
    assert [(request["say"], request["max_tokens"]) for request in chat.requests] == [(["cut"], 6)]
    assert kinds(again) == {"answered": 2, "invalid": 1, "failed": 1, "replaced": 1}
    assert sorted(ids(out)) == ["cut", "good"]


async def test_an_outcome_that_is_no_better_is_still_there_once(
    client: Client, chat: Chat, out: Path, tmp_path: Path
) -> None:
    lines = [cut("cut", 99, 3, later="internal"), broken("broken", 9), says("failed", fails=99, retryable=False)]
    first = await client.batch(write(tmp_path / "in.jsonl", *lines), out, models=ANY)
    for runs in range(1, 4):
        again = await client.rerun_batch(out, ["cut", "invalid", "failed"])
        counts = {kind: number for kind, number in kinds(again).items() if kind != "replaced"}
        assert counts == kinds(first) == {"cut": 1, "invalid": 1, "failed": 1}
        assert {custom_id: kind for custom_id, (_, kind) in outcomes(out).items()} == {
            "cut": "cut", "broken": "invalid", "failed": "failed",
        }  # fmt: skip
        assert len(chat.requests) == 3 * (runs + 1)


async def test_a_line_with_a_bad_limit_may_be_run_again(client: Client, chat: Chat, out: Path, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", says("a", max_tokens="many", fails=1, retryable=False))
    await client.batch(many, out, models=ANY)
    assert kinds(await client.rerun_batch(out)) == {"answered": 1, "replaced": 1}


async def test_what_is_run_again_is_retried_as_the_run_says(
    client: Client, chat: Chat, out: Path, tmp_path: Path
) -> None:
    many = write(tmp_path / "in.jsonl", cut("cut", 99, 3))
    await client.batch(many, out, models=ANY, retry={"cut": 1})
    again = await client.rerun_batch(out, ["cut"])
    assert [request["max_tokens"] for request in chat.requests] == [3, 6, 12, 24]
    again = await client.rerun_batch(out, ["cut"], retry={"cut": 2})
    assert [request["max_tokens"] for request in chat.requests[4:]] == [48, 96, 192]
    assert kinds(again) == {"answered": 1, "replaced": 6}


@pytest.mark.parametrize("kinds_again", [["failed"], ["invalid", "failed", "cut"]])
@pytest.mark.parametrize("step", ["keep", "replace", "feed"])
async def test_a_crash_at_any_step_loses_nothing(
    client: Client,
    chat: Chat,
    ended: Batch,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    kinds_again: list[str],
) -> None:
    def killed(*args: Any) -> None:
        raise KilledError

    before = {path: path.read_bytes() for path in (out, out.with_name("out.errors.jsonl"))}
    with monkeypatch.context() as patched:
        if step == "feed":
            patched.setattr("sluice.batch.run.LineDispatcher.step", killed)
        else:
            patched.setattr(*{"keep": (ResultFiles, "keep"), "replace": (Path, "replace")}[step], killed)
        with pytest.raises(KilledError):
            await client.rerun_batch(out, kinds_again)
    if step != "feed":
        assert {path: path.read_bytes() for path in before} == before
    again = await client.batch(ended.input_file_id, out, models=ANY)
    mended = {"failed": 1, "invalid": 1, "cut": 1}
    expected = {kind: count for kind, count in mended.items() if kind not in kinds_again}
    assert kinds(again) == {"answered": 1 + len(kinds_again), **expected, "replaced": len(kinds_again)}
    assert len(chat.requests) == len(kinds_again)
    assert sorted(outcomes(out)) == ["broken", "cut", "failed", "good"]


async def test_an_interrupted_rerun_is_resumed_by_the_same_call(
    client: Client, chat: Chat, out: Path, tmp_path: Path
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", "a", fails=1, retryable=False, then="hang"), says("b"))
    await client.batch(many, out, models=ANY)
    task = asyncio.create_task(client.rerun_batch(out))
    await until(lambda: len(chat.requests) == 3)
    with pytest.raises(BatchTaken):
        await client.rerun_batch(out)
    await leave(task)
    assert ids(out) == ["b"]
    task = asyncio.create_task(client.rerun_batch(out))
    await until(lambda: len(chat.running) == 1)
    (run,) = await client.batches()
    await client.cancel_batch(run.id)
    assert ((await task).status, outcomes(out)["a"]) == ("cancelled", ("out.errors.jsonl", "failed"))
    (failed,) = read(out.with_name("out.errors.jsonl"))
    assert failed["error"]["code"] == "overloaded", "the first failure says more"


@pytest.mark.parametrize("state", ["expired", "cancelled"])
async def test_a_run_that_ended_early_is_run_to_its_end_with_a_new_completion_window(
    client: Client, chat: Chat, out: Path, tmp_path: Path, state: str
) -> None:
    many = write(tmp_path / "in.jsonl", says("a", "a", pace_s=0), says("b", "b", later="hang", then="hang"))
    window = "1s" if state == "expired" else "1h"
    task = asyncio.create_task(client.batch(many, out, models=ANY, completion_window=window))
    await until(lambda: len(chat.began) == 2)
    if state == "cancelled":
        await client.cancel_batch((await client.batches())[0].id)
    early = await task
    assert (early.status, kinds(early)) == (state, {"answered": 1, "failed": 1})
    task = asyncio.create_task(client.rerun_batch(out))
    await until(lambda: len(chat.began) == 3)
    again = await client.batch_status(early.id)
    assert (again.status, again.expired_at, again.cancelled_at, again.cancelling_at) == (
        "in_progress",
        None,
        None,
        None,
    )
    assert again.sluice.rerun_at is not None
    assert again.expires_at == again.sluice.rerun_at + (1 if state == "expired" else 3600)
    await leave(task)


# A folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "runs")
    made.make()
    return made


async def feed(client: Client, folder: RunFolder) -> None:
    await feed_folder(client, folder.root, take=True, models=ANY)


@pytest.mark.parametrize("by", ["id", "output"])
async def test_a_run_of_a_folder_is_handed_back_to_its_workers(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path, by: str
) -> None:
    submitted = await client.submit_batch(write(tmp_path / "in.jsonl", *LINES), folder.root)
    await feed(client, folder)
    done = folder.done / submitted.id
    run = submitted.id if by == "id" else done / "output.jsonl"
    handed = await client.rerun_batch(run, ["failed", "cut"])
    running = folder.running / submitted.id
    assert (handed.status, handed.output_file_id) == ("in_progress", str(running / "output.jsonl"))
    assert (await client.batch_status(submitted.id), done.exists()) == (handed, False)
    assert await client.rerun_batch(running / "output.jsonl") == handed, "it is handed back already"
    await feed(client, folder)
    again = await client.batch_status(submitted.id)
    assert (again.status, kinds(again)) == ("completed", {"answered": 3, "invalid": 1, "replaced": 2})
    assert again.output_file_id == str(done / "output.jsonl")
    assert sorted(ids(done / "output.jsonl")) == ["cut", "failed", "good"]


async def test_a_run_that_was_moved_back_before_it_was_noted_has_still_ended(
    client: Client, chat: Chat, folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = await client.submit_batch(write(tmp_path / "in.jsonl", *LINES), folder.root)
    await feed(client, folder)
    ended = await client.batch_status(submitted.id)
    with monkeypatch.context() as patched:
        patched.setattr(StateFile, "save", _killed)
        with pytest.raises(KilledError):
            await client.rerun_batch(submitted.id)
    assert (folder.running / submitted.id).exists()
    await feed(client, folder)
    assert await client.batch_status(submitted.id) == ended
    assert (folder.done / submitted.id).exists()


def _killed(*_: Any) -> None:
    raise KilledError


@pytest.mark.parametrize("in_folder", [True, False])
async def test_a_cancel_that_came_in_the_moment_after_the_end_does_not_cancel_the_rerun(
    client: Client, chat: Chat, folder: RunFolder, out: Path, tmp_path: Path, *, in_folder: bool
) -> None:
    file = write(tmp_path / "in.jsonl", *LINES)
    if in_folder:
        ended = await client.submit_batch(file, folder.root)
        await feed(client, folder)
    else:
        ended = await client.batch(file, out, models=ANY)
    await client._registry.request_cancel(ended.id)
    await client.rerun_batch(ended.id, ["failed", "cut"])
    if in_folder:
        await feed(client, folder)
    again = await client.batch_status(ended.id)
    assert (again.status, kinds(again)) == ("completed", {"answered": 3, "invalid": 1, "replaced": 2})


# What cannot be run again


async def test_what_has_no_lines_to_run_again_is_said(
    client: Client, chat: Chat, folder: RunFolder, out: Path, tmp_path: Path
) -> None:
    with pytest.raises(BatchRefused, match=r"is not the output of a run: there is no .*/out.jsonl.run"):
        await client.rerun_batch(out)
    assert list(tmp_path.glob("out*")) == []
    (tmp_path / "table.csv.run").mkdir()
    with pytest.raises(BatchRefused, match=r"table.csv is a table: .*/table.csv.run/table.answers.jsonl$"):
        await client.rerun_batch(tmp_path / "table.csv")
    with pytest.raises(ValueError, match="'good' is not a kind of line"):
        await client.rerun_batch(out, ["good"])
    many = write(tmp_path / "in.jsonl", says("a", then="hang"))
    task = asyncio.create_task(client.batch(many, out, models=ANY))
    await until(lambda: len(chat.running) == 1)
    await leave(task)
    with pytest.raises(BatchRefused, match="is in_progress: let it end"):
        await client.rerun_batch(out)
    refused = await client.submit_batch(write(tmp_path / "bad.jsonl", {"custom_id": "a"}), folder.root)
    await feed(client, folder)
    with pytest.raises(BatchRefused, match="was refused: correct its file"):
        await client.rerun_batch(folder.failed / refused.id / "output.jsonl")
    await client._registry.put(replace(refused, output_file_id="/nowhere/out.jsonl"))
    with pytest.raises(BatchRefused, match=r"the files of batch_bad_\w+ are on "):
        await client.rerun_batch(refused.id)


@pytest.mark.parametrize("what", ["changed", "missing"])
async def test_nothing_is_touched_if_the_input_is_another(
    client: Client, chat: Chat, ended: Batch, out: Path, tmp_path: Path, what: str
) -> None:
    many = tmp_path / "in.jsonl"
    before = {path: path.read_bytes() for path in tmp_path.glob("out*")}
    if what == "changed":
        write(many, says("other"))
    else:
        many.unlink()
    with pytest.raises(BatchRefused, match=r"in\.jsonl"):
        await client.rerun_batch(out)
    assert {path: path.read_bytes() for path in tmp_path.glob("out*")} == before
    write(many, *LINES)
    assert (await client.rerun_batch(out)).request_counts.failed == 0


async def test_a_run_of_an_earlier_version_is_run_again(client: Client, chat: Chat, ended: Batch, out: Path) -> None:
    state = out.with_name("out.jsonl.run")
    stored = json.loads(state.read_bytes().splitlines()[-1])
    for name in ("kinds", "slowest", "retry", "rerun_at"):
        del stored["batch"]["sluice"][name]
    del stored["rerun"], stored["earlier_s"]
    state.write_text(json.dumps(stored) + "\n")
    for path in (out, out.with_name("out.errors.jsonl")):
        write(path, *({name: value for name, value in said.items() if name != "sluice"} for said in read(path)))
    again = await client.rerun_batch(out, ["failed", "invalid", "cut"])
    assert kinds(again) == {"answered": 4, "replaced": 3}
