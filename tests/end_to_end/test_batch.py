"""`sluice batch` as a process, with a real server and worker: answers, exit codes, and recovery."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Batch
from openai.types.chat import ChatCompletion

from sluice import Batch as BatchStatus
from sluice import Client
from sluice.contract import keys
from sluice.contract.batch import NO_LINES
from tests.batch.helpers import ids, line, read, write
from tests.end_to_end.test_cli import Command
from tests.support.stack import ROOT, Server, WorkerProcess

_TIMEOUT_S = 60
EXAMPLE = ROOT / "examples" / "batch.jsonl"


def count(k: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Count to {3 + k % 10}."}]
    return line(f"r{k}", messages=messages, temperature=0, model="gpt-4o-mini", **more)


def counted(k: int) -> str:
    return " ".join(str(n) for n in range(1, 4 + k % 10))


def texts(out: Path) -> dict[str, str]:
    return {said["custom_id"]: said["response"]["body"]["choices"][0]["message"]["content"] for said in read(out)}


def until_it_has(out: Path, lines: int) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not out.exists() or len(out.read_bytes().splitlines()) < lines:
        assert time.monotonic() < deadline, f"{out} has no {lines} lines"
        time.sleep(0.01)


# Run


@pytest.mark.usefixtures("alive")
async def test_every_body_is_what_the_same_request_gets_by_itself(
    sluice: Command, client: Client, tmp_path: Path
) -> None:
    code, out, err = sluice.process("batch", "run", str(EXAMPLE), "-o", "out.jsonl", "--json")
    assert code == 0, err
    batch = Batch.model_validate_json(out, strict=True)
    assert batch.request_counts is not None
    assert (batch.status, batch.request_counts.completed) == ("completed", 3)
    asked = {said["custom_id"]: said["body"] for said in read(EXAMPLE)}
    for said in read(tmp_path / "out.jsonl"):
        body = said["response"]["body"]
        alone = await client.result((await client.submit(asked.pop(said["custom_id"]))).id)
        for name in ("object", "model", "system_fingerprint", "choices"):
            assert body[name] == alone[name]
        assert body["usage"]["total_tokens"] == alone["usage"]["total_tokens"]
        assert (said["response"]["status_code"], said["response"]["request_id"]) == (200, body["id"])
        ChatCompletion.model_validate(body, strict=True)
    assert asked == {}


@pytest.mark.usefixtures("alive")
def test_the_report_is_a_table_and_the_progress_goes_to_stderr(sluice: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", count(0), count(1), line("bad", temperature=9))
    code, out, err = sluice("batch", "run", str(many), "-o", "out.jsonl", "--model", "default")
    assert code == 1
    assert "3: 2 answered, 1 failed" in out
    assert "invalid_request × 1" in out
    assert err.startswith("batch_in_")
    (failed,) = read(tmp_path / "out.errors.jsonl")
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("bad", 400)
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert failed["error"]["code"] == "invalid_request"
    code, again, err = sluice("batch", "run", str(many), "-o", "out.jsonl", "--model", "default")
    assert (code, again, "complete already" in err) == (1, out, True)


@pytest.mark.usefixtures("alive")
def test_answers_that_are_cut_off_are_counted_apart_and_a_cut_schema_has_failed(
    sluice: Command, tmp_path: Path
) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    lines = count(9, max_tokens=2), count(8), count(7, max_tokens=1, response_format=schema)
    many = write(tmp_path / "in.jsonl", *lines)
    code, out, err = sluice("batch", "run", str(many), "-o", "out.jsonl", "--model", "default")
    assert code == 1, err
    assert "3: 2 answered (1 cut off), 1 failed" in out
    assert "answer_not_json × 1" in out
    assert ids(tmp_path / "out.errors.jsonl") == ["r7"]


def test_a_bad_file_is_refused_with_every_line_named(sluice: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", line("a"), line("a"), line("b", url="/v1/embeddings"))
    code, out, err = sluice("batch", "run", str(many), "-o", "out.jsonl")
    assert (code, out) == (2, "")
    assert "line 2: duplicate_custom_id: the custom_id is the same as in line 1." in err
    assert "line 3: mixed_urls:" in err
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["missing.jsonl", "-o", "out.jsonl"], "cannot read"),
        (["in.jsonl", "-o", "in.jsonl"], "must be different files"),
        (["in.jsonl", "-o", "nowhere/out.jsonl"], "No such file"),
        (["in.jsonl", "-o", "out.jsonl", "--map", "gpt-4o-mini"], "write NAME=SERVED"),
        (["in.jsonl", "-o", "out.jsonl", "--completion-window", "soon"], "such as 24h"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_exit_code_2(
    sluice: Command, tmp_path: Path, args: list[str], sentence: str
) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    code, out, err = sluice("batch", "run", *args)
    assert (code, out, sentence in err, "Traceback" in err) == (2, "", True, False), err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.usefixtures("alive")
def test_ctrl_c_leaves_a_run_that_the_same_command_goes_on_with(sluice: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", *(count(k) for k in range(60)))
    command = ("batch", "run", str(many), "-o", "out.jsonl", "--map", "gpt-4o-mini=default", "--window", "12")
    with sluice.running(*command) as process:
        until_it_has(tmp_path / "out.jsonl", 1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=_TIMEOUT_S)
    assert (process.returncode, "Run the same command again to resume" in err) == (3, True)
    assert len(read(tmp_path / "out.jsonl")) < 60
    code, _, err = sluice(*command)
    assert (code, "done earlier" in err) == (0, True)
    assert texts(tmp_path / "out.jsonl") == {f"r{k}": counted(k) for k in range(60)}
    assert len(read(tmp_path / "out.jsonl")) == 60


@pytest.mark.slow  # tests/batch has each by itself
def test_whatever_dies_each_line_is_answered_once(tmp_path: Path) -> None:
    """Kill the command three times and the worker once, and flush the server."""
    many = write(tmp_path / "in.jsonl", *(count(k) for k in range(60)))
    out = tmp_path / "out.jsonl"
    with Server() as server, WorkerProcess(server.url, lease_s=1, reserved_rows=0) as worker:
        sluice = Command(server.url, tmp_path)
        command = ("batch", "run", str(many), "-o", "out.jsonl", "--model", "default", "--window", "20")
        for kill_at in (5, 20, 40):
            with sluice.running(*command) as process:
                until_it_has(out, kill_at)
                if kill_at == 20:
                    sluice.db.flushall()
                if kill_at == 40:
                    worker.signal(signal.SIGKILL)
                    worker.wait()
                    worker.start(wait=False)
                process.kill()
                process.communicate()
        with sluice.running(*command, "--json") as process:
            said, err = process.communicate(timeout=_TIMEOUT_S)
        sluice.db.close()
    assert process.returncode == 0, err
    assert sorted(ids(out)) == sorted(f"r{k}" for k in range(60))
    assert texts(out) == {f"r{k}": counted(k) for k in range(60)}
    assert json.loads(said)["request_counts"] == {"total": 60, "completed": 60, "failed": 0}


# The way out of what went wrong


@pytest.mark.usefixtures("alive")
def test_a_file_made_for_another_service_is_refused_with_the_option_that_mends_it(
    sluice: Command, tmp_path: Path
) -> None:
    many = write(tmp_path / "in.jsonl", *(count(k) for k in range(4)))
    command = ("batch", "run", str(many), "-o", "out.jsonl")
    code, out, err = sluice(*command)
    assert (code, out) == (2, "")
    assert "no worker serves gpt-4o-mini (4 lines), and there are workers for default" in err
    assert "--map gpt-4o-mini=default" in err
    code, _, err = sluice(*command, "--map", "gpt-4o-mini=default")
    assert code == 0, err
    assert texts(tmp_path / "out.jsonl") == {f"r{k}": counted(k) for k in range(4)}


@pytest.mark.usefixtures("alive")
def test_lines_that_wait_for_a_model_may_be_mapped_after_all(sluice: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", *(count(k) for k in range(4)))
    command = ("batch", "run", str(many), "-o", "out.jsonl")
    with sluice.running(*command, "--wait") as process:
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(2)]
        assert "--map gpt-4o-mini=default" in said[0], "it is told first"
        run_id = said[1].split(":")[0]
        process.send_signal(signal.SIGINT)
        assert process.wait(_TIMEOUT_S) == 3
    assert "in_progress, paused since" in " ".join(sluice("batch", "status", run_id)[1].split())
    assert "paused for" in " ".join(sluice("batch", "list")[1].split())
    code, _, err = sluice(*command, "--map", "gpt-4o-mini=default")
    assert (code, f"{run_id} has no results" in " ".join(err.split())) == (0, True), err
    assert json.loads(sluice("batch", "status", run_id, "--json")[1])["status"] == "failed"


@pytest.mark.usefixtures("alive")
def test_another_file_for_the_output_of_a_run_that_has_ended_is_refused(sluice: Command, tmp_path: Path) -> None:
    first, other = write(tmp_path / "in.jsonl", line("a")), write(tmp_path / "other.jsonl", line("b"))
    assert sluice("batch", "run", str(first), "-o", "out.jsonl")[0] == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    for many in (other, write(first, line("a"), line("b"))):
        code, out, err = sluice("batch", "run", str(many), "-o", "out.jsonl")
        assert (code, out, "name another output, or remove" in err) == (2, "", True), err
    assert (tmp_path / "out.jsonl").read_bytes() == before


@pytest.mark.usefixtures("alive")
def test_the_exit_code_says_how_the_run_stands_also_when_it_is_reported_again(sluice: Command, tmp_path: Path) -> None:
    good, bad = line("good"), line("bad", temperature=9)
    for name, lines, expected in (("all", [good], 0), ("some", [good, bad], 1), ("none", [bad], 1)):
        many = write(tmp_path / f"{name}.jsonl", *lines)
        codes = [sluice("batch", "run", str(many), "-o", f"{name}.out.jsonl")[0] for _ in range(3)]
        assert codes == [expected] * 3
    refused = write(tmp_path / "refused.jsonl", good, good)
    assert [sluice("batch", "run", str(refused), "-o", "refused.out.jsonl")[0] for _ in range(2)] == [2, 2]


# From elsewhere


@pytest.mark.usefixtures("alive")
def test_a_submitted_file_is_fed_and_can_be_asked_for_from_anywhere(sluice: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", *(count(k) for k in range(4)), line("bad", temperature=9))
    (tmp_path / "runs").mkdir()
    options = ("--completion-window", "90m", "--metadata", "team=search", "--metadata", "for=a=b", "--map", "x=default")
    code, said, _ = sluice("batch", "submit", str(many), "--dir", "runs", *options)
    run_id = said.strip()
    assert (code, json.loads(sluice("batch", "status", run_id, "--json")[1])["status"]) == (0, "validating")
    assert {run_id, "validating", "created"} <= {*sluice("batch", "list")[1].split()}, "it is not started yet"
    code, said, err = sluice.process("batch", "feed", "runs", "--take", "--models", "gpt-4o-mini=default,*=default")
    assert (code, said, f"{run_id} completed: 4 of 5 lines answered" in err) == (0, "", True), err
    assert "5: 4 answered, 1 failed" in sluice("batch", "status", run_id)[1]
    assert run_id in sluice("batch", "list")[1]
    listed = Batch.model_validate_json(sluice("batch", "list", "--json")[1], strict=True)
    assert (listed.id, listed.status, listed.completion_window) == (run_id, "completed", "90m")
    assert listed.metadata == {"team": "search", "for": "a=b"}
    code, answers, _ = sluice("batch", "results", run_id)
    assert (code, len(answers.splitlines())) == (0, 4)
    assert sluice("batch", "results", run_id, "--errors", "-o", "err.jsonl")[0] == 0
    assert ids(tmp_path / "err.jsonl") == ["bad"]
    assert sluice("batch", "cancel", run_id)[:2] == (0, f"{run_id}  already completed\n")


def test_a_run_that_waits_for_its_time_says_so(sluice: Command, tmp_path: Path) -> None:
    file = str(write(tmp_path / "in.jsonl", count(1)))
    (tmp_path / "runs").mkdir()
    _, said, err = sluice(
        "batch", "submit", file, "--dir", "runs", "--not-before", "2099-12-24T22:00", "--priority", "7"
    )
    assert "waits for 2099-12-24 22:00" in " ".join(err.split())
    assert sluice.process("batch", "feed", "runs", "--take", "--hours", "22:00-06:00")[0] == 0
    assert "waits until 2099-12-24 22:00" in " ".join(sluice("batch", "list")[1].split())
    report = " ".join(sluice("batch", "status", said.strip())[1].split())
    assert ("waits until 2099-12-24 22:00" in report, "priority │ 7 │" in report) == (True, True)


@pytest.mark.parametrize(
    "option",
    [
        ("--metadata", "team"), ("--map", "x"), ("--completion-window", "soon"), ("--not-before", "25:00"),
        ("--not-before", "tomorrow"), ("--priority", "101"), ("--priority", "high"),
    ],
)  # fmt: skip
def test_bad_options_of_a_submit_are_named(sluice: Command, tmp_path: Path, option: tuple[str, str]) -> None:
    (tmp_path / "runs").mkdir()
    code, out, err = sluice("batch", "submit", str(write(tmp_path / "in.jsonl", count(1))), "--dir", "runs", *option)
    assert (code, out, option[1] in err, [*(tmp_path / "runs").iterdir()]) == (2, "", True, [])


def test_a_run_is_cancelled_from_elsewhere(sluice: Command, tmp_path: Path) -> None:
    """No worker is needed, since the lines wait for a model without one."""
    many = write(tmp_path / "in.jsonl", *(count(k) for k in range(3)))
    with sluice.running("batch", "run", str(many), "-o", "out.jsonl", "--model", "nobody", "--wait") as process:
        assert process.stderr is not None
        warning, begun = process.stderr.readline(), process.stderr.readline()
        run_id = begun.split(":")[0]
        code, said, _ = sluice("batch", "cancel", run_id)
        out, _ = process.communicate(timeout=_TIMEOUT_S)
    assert (code, "requested" in said, process.returncode) == (0, True, 1)
    assert "no worker serves nobody (3 lines)" in warning
    assert "batch_cancelled × 3" in out


@pytest.mark.parametrize("own", ["in.jsonl", "out.jsonl", "err.jsonl"])
def test_results_are_never_written_over_a_file_of_their_run(sluice: Command, tmp_path: Path, own: str) -> None:
    names = {name: str(tmp_path / f"{name}.jsonl") for name in ("in", "out", "err")}
    for path in names.values():
        Path(path).write_text("precious\n")
    run = ended_run(input_file_id=names["in"], output_file_id=names["out"], error_file_id=names["err"])
    sluice.db.set(keys.batch(run.id), run.to_json())
    for errors in ([], ["--errors"]):
        code, _, err = sluice("batch", "results", run.id, *errors, "-o", own)
        assert (code, err.startswith(f"sluice: {own} is a file of the run itself")) == (2, True)
    assert [Path(path).read_text() for path in names.values()] == ["precious\n"] * 3


def test_who_has_read_enough_of_the_results_hears_no_complaint(sluice: Command, tmp_path: Path) -> None:
    answers = tmp_path / "out.jsonl"
    answers.write_bytes(b"x" * 79 + b"\n" * 100_000)
    run = ended_run(output_file_id=str(answers))
    sluice.db.set(keys.batch(run.id), run.to_json())
    with sluice.running("batch", "results", run.id) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""


def ended_run(**files: str) -> BatchStatus:
    told: dict[str, Any] = {"input_file_id": "in.jsonl", "request_counts": NO_LINES, **files}
    return BatchStatus(id="batch_1", completion_window="24h", status="completed", created_at=1, **told)


@pytest.mark.parametrize("command", ["status", "cancel", "results"])
def test_an_unknown_run_is_a_sentence_and_exit_code_2(sluice: Command, command: str) -> None:
    code, out, err = sluice("batch", command, "batch_nope")
    assert (code, out, err.startswith("sluice: there is no offline run 'batch_nope'")) == (2, "", True)


def test_no_runs_are_a_sentence_and_no_failure(sluice: Command) -> None:
    code, out, err = sluice("batch", "list")
    assert (code, out, err.startswith("no offline runs in the last week")) == (0, "", True)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "the end of stdin"])
def test_a_feeder_that_is_told_to_stop_leaves_its_run_for_the_next(sluice: Command, tmp_path: Path, how: str) -> None:
    (tmp_path / "runs").mkdir()
    sluice("batch", "submit", str(write(tmp_path / "in.jsonl", count(1))), "--dir", "runs")
    command = ["batch", "feed", "runs", "--take", "--models", "*=nobody", "--until-eof"]
    with sluice.running(*command, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        until_it_has(next(wait_for(tmp_path, "runs/running/*/run")), 1)
        if how == "the end of stdin":
            process.stdin.close()
        else:
            process.send_signal(getattr(signal, how))
        assert process.wait(_TIMEOUT_S) == 3
    assert len(list((tmp_path / "runs" / "running").iterdir())) == 1


@pytest.mark.parametrize("name", ["missing", "folder", "pipe"])
def test_what_cannot_be_submitted_is_named(sluice: Command, tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "runs").mkdir()
    os.mkfifo(tmp_path / "pipe")
    code, out, err = sluice("batch", "submit", name, "--dir", "runs")
    assert (code, out, name in err, "None" in err) == (2, "", True, False)
    assert list((tmp_path / "runs" / "inbox").iterdir()) == []
    assert sluice("batch", "list", "--json")[1] == ""


def test_a_folder_that_does_not_exist_is_refused_and_not_made(sluice: Command, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", count(1))
    code, out, err = sluice("batch", "submit", "in.jsonl", "--dir", "rusn")
    assert (code, out) == (2, "")
    assert err.endswith("rusn: there is no such folder; give that of the workers, or make it first.\n")
    assert not (tmp_path / "rusn").exists()


def wait_for(folder: Path, pattern: str) -> Iterator[Path]:
    deadline = time.monotonic() + _TIMEOUT_S
    while not (found := list(folder.glob(pattern))):
        assert time.monotonic() < deadline, f"there is no {pattern}"
        time.sleep(0.01)
    yield from found


@pytest.mark.parametrize("command", ["run", "submit", "status", "list", "cancel", "results", "feed"])
def test_help_teaches_with_an_example_and_needs_no_worker(sluice: Command, command: str) -> None:
    code, out = sluice.help("batch", command)
    assert (code, f"    sluice batch {command}" in out) == (0, True)
