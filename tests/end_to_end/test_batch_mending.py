"""`sluice batch` mends its runs: with a real worker, a model that is made to be cut off or say no JSON, and kills."""

import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.batch.helpers import line, read, write
from tests.end_to_end.test_batch import _TIMEOUT_S, count, counted, texts, until_it_has
from tests.end_to_end.test_cli import Command
from tests.support.stack import Server, WorkerProcess

_DIGIT = {"type": "json_schema", "json_schema": {"name": "digit", "schema": {"enum": [*range(10)]}}}


def broken(k: int) -> dict[str, Any]:
    """Return a line whose answer is empty: the model says 6 at a temperature of 0, and that is its stop sequence."""
    messages = [{"role": "user", "content": "Answer in JSON. What is the capital of Norway?"}]
    asked: dict[str, Any] = {"temperature": 0, "seed": 100 * k, "stop": ["6"], "response_format": _DIGIT}
    return line(f"j{k}", messages=messages, **asked)


def kinds(report: dict[str, Any]) -> dict[str, int]:
    return {kind: sums["lines"] for kind, sums in report["sluice"]["kinds"].items()}


@pytest.mark.usefixtures("alive")
def test_cut_and_invalid_answers_are_mended_within_the_run_or_after_it(sluice: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", count(0), count(1, max_tokens=3), broken(0), line("bad", temperature=9))
    command = ("batch", "run", str(many), "--model", "default")
    code, said, err = sluice(*command, "-o", "out.jsonl", "--retry", "invalid, cut,failed", "--retries", "5")
    assert code == 1, err
    assert "4: 3 answered, 1 failed" in said
    assert "replaced" in said
    assert texts(tmp_path / "out.jsonl").items() >= {"r0": counted(0), "r1": counted(1)}.items()
    assert int(texts(tmp_path / "out.jsonl")["j0"]) != 6

    assert sluice(*command, "-o", "later.jsonl")[0] == 1
    report = json.loads(
        sluice("batch", "rerun", "later.jsonl", "--json", "--cut", "--retry", "cut", "--retries", "9")[1]
    )
    assert kinds(report) == {"answered": 2, "invalid": 1, "failed": 1, "replaced": 2}
    code, said, err = sluice("batch", "rerun", report["id"], "--retry", "invalid", "--retries", "5")
    assert (code, "4: 3 answered, 1 failed" in said) == (1, True), err
    assert texts(tmp_path / "later.jsonl").keys() == {"r0", "r1", "j0"}
    code, said, err = sluice("batch", "rerun", "later.jsonl", "--invalid")
    assert (code, "there was nothing to do" in err) == (1, True)


@pytest.mark.usefixtures("alive")
def test_a_run_of_a_folder_is_handed_back_by_its_id(sluice: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", count(0), count(1, max_tokens=3))
    (tmp_path / "runs").mkdir()
    feed = ("batch", "feed", "runs", "--take", "--models", "*=default")
    run_id = sluice("batch", "submit", str(many), "--dir", "runs")[1].strip()
    assert sluice(*feed)[0] == 0
    code, said, err = sluice("batch", "rerun", run_id, "--cut", "--retry", "cut", "--retries", "3")
    assert (code, said, err.startswith(f"{run_id} waits for the workers of its folder.")) == (0, "", True)
    assert json.loads(sluice("batch", "rerun", run_id, "--json")[1])["status"] == "in_progress"
    assert sluice(*feed)[0] == 0
    assert texts(tmp_path / "runs" / "done" / run_id / "output.jsonl") == {"r0": counted(0), "r1": counted(1)}


@pytest.mark.usefixtures("alive")
def test_a_submitted_run_is_mended_as_its_submit_says(sluice: Command, tmp_path: Path) -> None:
    many = write(tmp_path / "in.jsonl", count(0), count(1, max_tokens=3))
    (tmp_path / "runs").mkdir()
    submit = ("batch", "submit", str(many), "--dir", "runs", "--model", "default", "--retry", "cut", "--retries", "4")
    run_id = sluice(*submit)[1].strip()
    assert sluice("batch", "feed", "runs", "--take")[0] == 0
    report = json.loads(sluice("batch", "status", run_id, "--json")[1])
    assert (kinds(report)["answered"], report["sluice"]["retry"]) == (2, {"cut": 4})


@pytest.mark.usefixtures("alive")
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["run", "in.jsonl", "-o", "out.jsonl", "--retry", "slow"], "give some of invalid, cut, failed, refused"),
        (["run", "in.jsonl", "-o", "out.jsonl", "--retry", "cut", "--retries", "11"], "again 1 to 10 times"),
        (["run", "in.jsonl", "-o", "out.jsonl", "--retries", "3"], "give --retry"),
        (["rerun", "in.jsonl"], "is not the output of a run"),
        (["rerun", "batch_0123456789abcdef"], "there is no offline run"),
    ],
)
def test_what_cannot_be_run_again_is_a_sentence(
    sluice: Command, tmp_path: Path, args: list[str], sentence: str
) -> None:
    write(tmp_path / "in.jsonl", line("a"))
    code, out, err = sluice("batch", *args)
    assert (code, out, sentence in " ".join(err.split()), "Traceback" in err) == (2, "", True, False), err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.slow  # tests/batch/test_mending.py has each step by itself
def test_thirty_cut_and_ten_invalid_answers_of_200_are_mended_whatever_is_killed(tmp_path: Path) -> None:
    """Kill the command three times and the worker twice, at random, and compare with an unbroken run."""
    lines = [count(k) for k in range(160)] + [count(1000 + k, max_tokens=1 + k % 3) for k in range(30)]
    many = write(tmp_path / "in.jsonl", *lines, *(broken(k) for k in range(10)))
    dice = random.Random(40)
    with Server() as server, WorkerProcess(server.url, lease_s=1, reserved_rows=0) as worker:
        sluice = Command(server.url, tmp_path)

        def command(out: str) -> list[str]:
            retry = ["--retry", "cut,invalid", "--retries", "5", "--window", "40", "--json"]
            return ["batch", "run", str(many), "-o", out, "--model", "default", *retry]

        plain = ("batch", "run", str(many), "-o", "plain.jsonl", "--model", "default", "--json")
        assert kinds(json.loads(sluice(*plain)[1])) == {"answered": 160, "cut": 30, "invalid": 10}
        unbroken = json.loads(sluice(*command("unbroken.jsonl"))[1])
        for kill, lines_before in enumerate(sorted(dice.sample(range(5, 190), 3))):
            with sluice.running(*command("out.jsonl")) as process:
                until_it_has(tmp_path / "out.jsonl", lines_before)
                if kill < 2:
                    worker.signal(signal.SIGKILL)
                    worker.wait()
                    worker.start(wait=False)
                process.kill()
                process.communicate()
        with sluice.running(*command("out.jsonl")) as process:
            said, err = process.communicate(timeout=_TIMEOUT_S)
        again = ["batch", "rerun", "plain.jsonl", "--cut", "--invalid", "--retry", "cut,invalid", "--retries", "4"]
        for lines_before in (160, 175):
            with sluice.running(*again) as rerunning:
                until_it_has(tmp_path / "plain.jsonl.retries", 40)
                until_it_has(tmp_path / "plain.jsonl", lines_before)
                rerunning.kill()
                rerunning.communicate()
        code, _, rerun_err = sluice(*again)
        sluice.db.close()
    assert code == 0, rerun_err
    assert texts(tmp_path / "plain.jsonl") == texts(tmp_path / "unbroken.jsonl")
    assert len(read(tmp_path / "plain.jsonl")) == 200
    assert process.returncode == 0, err
    found, tries = texts(tmp_path / "out.jsonl"), Counter[str]()
    assert len(read(tmp_path / "out.jsonl")) == 200
    assert found == texts(tmp_path / "unbroken.jsonl")
    assert found.items() >= {f"r{k}": counted(k) for k in [*range(160), *range(1000, 1030)]}.items()
    report = json.loads(said)
    assert kinds(report) == kinds(unbroken) == {"answered": 200, "replaced": kinds(unbroken)["replaced"]}
    for name in ("cut_off", "retried", "failures"):
        assert report["sluice"][name] == unbroken["sluice"][name]
    for record in read(tmp_path / "out.jsonl.retries"):
        tries[record["line"]["custom_id"]] += 1
        assert record["mends"] == record["retry"] == tries[record["line"]["custom_id"]] <= 5, "no retry is repeated"
    assert len(tries) == 40
