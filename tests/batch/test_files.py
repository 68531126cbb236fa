"""The output file is authoritative: cut off at any byte, it is continued, and has each line once."""

import errno
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from sluice.batch.files import LineError, LineResult, ResultFiles, RunState, StateFile
from sluice.batch.lines import custom_id_digest
from sluice.contract.batch import NO_LINES, Batch, is_retry, is_run_id, line_job_id, new_run_id
from sluice.errors import BatchRefused, BatchTaken
from tests.batch.helpers import ids, read

RESULT = {"object": "chat.completion", "said": "Grüße 🚀\n", "usage": {"prompt_tokens": 3, "completion_tokens": 2}}


def answered(custom_id: str, job_id: str = "batch_1-1") -> LineResult:
    return LineResult(job_id, custom_id, result=json.dumps(RESULT, ensure_ascii=False).encode())


def failed(custom_id: str, code: str = "internal", job_id: str = "batch_1-1") -> LineResult:
    return LineResult(job_id, custom_id, error=LineError(code, "It failed.", 500, b'{"error":\n{}}'))


def open_in(folder: Path) -> ResultFiles:
    return ResultFiles(folder / "out.jsonl", folder / "err.jsonl")


ALL = [answered("a"), failed("é"), answered("b", "batch_1-3-r1"), answered("c\n\u2028"), failed("d", "too_large")]


def add_what_is_missing(folder: Path) -> None:
    answers = open_in(folder)
    answers.add([ended for ended in ALL if custom_id_digest(ended.custom_id) not in answers.done])
    answers.close()


def test_an_answer_and_a_failure_are_lines_in_openai_s_form(tmp_path: Path) -> None:
    answers = open_in(tmp_path)
    never_run = LineResult("batch_1-8", "c", error=LineError("batch_expired", "It is late."))
    answers.add([answered("a", "batch_1-7"), failed("b", job_id="batch_1-9-r2"), never_run])
    assert read(tmp_path / "out.jsonl") == [
        {
            "id": "batch_1-7",
            "custom_id": "a",
            "response": {"status_code": 200, "request_id": "batch_1-7", "body": RESULT},
            "error": None,
        }
    ]
    assert read(tmp_path / "err.jsonl") == [
        {
            "id": "batch_1-9-r2",
            "custom_id": "b",
            "response": {"status_code": 500, "request_id": "batch_1-9-r2", "body": {"error": {}}},
            "error": {"code": "internal", "message": "It failed."},
        },
        {
            "id": "batch_1-8",
            "custom_id": "c",
            "response": None,
            "error": {"code": "batch_expired", "message": "It is late."},
        },
    ]


def test_there_is_no_error_file_before_a_line_has_failed(tmp_path: Path) -> None:
    answers = open_in(tmp_path)
    answers.add([answered("a")])
    assert ((tmp_path / "err.jsonl").exists(), answers.errors_path) == (False, None)


@pytest.mark.parametrize("which", ["out.jsonl", "err.jsonl"])
def test_cut_off_at_any_byte_a_run_that_goes_on_has_each_line_once(tmp_path: Path, which: str) -> None:
    add_what_is_missing(tmp_path)
    whole = (tmp_path / which).read_bytes()
    expected = sorted(ended.custom_id for ended in ALL)
    for length in range(len(whole)):
        (tmp_path / which).write_bytes(whole[:length])
        add_what_is_missing(tmp_path)
        assert sorted(ids(tmp_path / "out.jsonl") + ids(tmp_path / "err.jsonl")) == expected, length


def test_zeros_that_a_power_cut_left_at_the_end_are_dropped(tmp_path: Path) -> None:
    add_what_is_missing(tmp_path)
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(whole + b"\0" * 4096)
    add_what_is_missing(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == whole


def test_the_sums_are_the_same_for_whoever_goes_on(tmp_path: Path) -> None:
    answers = open_in(tmp_path)
    answers.add(ALL)
    again = open_in(tmp_path)
    for each in (answers, again):
        counts = each.counts
        assert (counts.completed, counts.failures.total(), counts.retried) == (3, 2, 1)
        assert counts.failures == {"internal": 1, "too_large": 1}
        assert (counts.usage.input_tokens, counts.usage.output_tokens, counts.usage.total_tokens) == (9, 6, 15)
    assert again.errors_path == tmp_path / "err.jsonl"


@pytest.mark.parametrize(
    "foreign", [b"hello\n", b"{}\n", b'{"custom_id": 7}\n', b'{"custom_id": "a", "id": "b"}\n[]\n']
)
def test_an_output_with_lines_that_no_run_writes_is_refused_and_left_as_it_is(tmp_path: Path, foreign: bytes) -> None:
    (tmp_path / "out.jsonl").write_bytes(foreign)
    with pytest.raises(BatchRefused, match="line [12] of"):
        open_in(tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == foreign


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = open_in(tmp_path)
    answers.add([answered("first")])
    write, left = os.write, [4]

    def fills_up(fd: int, data: Any) -> int:
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data[: left.pop()])

    monkeypatch.setattr(os, "write", fills_up)
    with pytest.raises(OSError, match="No space left"):
        answers.add([answered("second")])
    monkeypatch.undo()
    answers.add([answered("third")])
    assert (ids(tmp_path / "out.jsonl"), answers.counts.completed) == (["first", "third"], 2)


# The state


def saved(status: Any = "in_progress", **changed: Any) -> RunState:
    batch = Batch(
        id="batch_1", input_file_id="in", completion_window="24h", status=status, created_at=1, request_counts=NO_LINES
    )
    return RunState(batch, "abc", {"*": "default"}, **changed)


def test_the_last_whole_line_of_the_state_counts_wherever_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with StateFile(path) as state:
        assert state.load() is None
        state.save(saved("validating"))
        first = path.stat().st_size
        state.save(saved("completed"))
    whole = path.read_bytes()
    for length in (*range(first + 1), *range(first + 1, len(whole), 7), len(whole)):
        path.write_bytes(whole[:length])
        with StateFile(path) as state:
            expected = saved("completed") if length == len(whole) else saved("validating") if length >= first else None
            assert state.load() == expected, length


def _holds(path: Path, ready: Any) -> None:
    with StateFile(path) as state:
        state.save(saved())
        ready.set()
        multiprocessing.Event().wait()


def test_a_run_has_one_feeder_until_that_one_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_holds, args=(tmp_path / "run", ready))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(BatchTaken, match=f"process {holder.pid} on .* is feeding this run"):
        StateFile(tmp_path / "run")
    holder.kill()
    holder.join()
    with StateFile(tmp_path / "run") as state:
        assert state.load() == saved()


# Names


@pytest.mark.parametrize(
    ("stem", "begins"),
    [
        ("report", "batch_report_"),
        ("batch-2026", "batch_2026_"),
        ("batch", "batch_"),
        ("", "batch_"),
        ("Ümläut & co", "batch_ml-ut-co_"),
        ("x" * 99, f"batch_{'x' * 40}_"),
        ("/..", "batch_.._"),
    ],
)
def test_a_run_is_named_after_its_file_and_its_jobs_can_be(stem: str, begins: str) -> None:
    from sluice.contract.keys import check_job_id

    run_id = new_run_id(stem)
    assert run_id.startswith(begins)
    assert not run_id.startswith("batch_batch")
    assert is_run_id(run_id)
    check_job_id(line_job_id(run_id, 50_000, 99))
    assert new_run_id(stem) != run_id


@pytest.mark.parametrize(
    "name", ["report", "batch_", "batch_report", "batch_../x_0123456789ab", "batch_a b_0123456789ab"]
)
def test_another_name_is_no_run_s(name: str) -> None:
    assert not is_run_id(name)


def test_a_retry_is_told_from_a_first_try() -> None:
    run_id = new_run_id("a-1-r1")
    assert not is_retry(line_job_id(run_id, 1))
    assert is_retry(line_job_id(run_id, 1, 1))
