"""Tables in `sluice batch` as a command, with a real server and the tiny model."""

import csv
import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.batch.helpers import read
from tests.end_to_end.test_batch import until_it_has
from tests.end_to_end.test_cli import Command
from tests.support.stack import ROOT

EXAMPLE = ROOT / "examples" / "reviews"
ASKED = ("--prompt", str(EXAMPLE / "prompt.txt"), "--schema", str(EXAMPLE / "answer.json"), "--param", "temperature=0")


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def countries(folder: Path, *names: str) -> Path:
    (folder / "in.csv").write_text("".join(f"{name}\n" for name in ("country", *names)))
    (folder / "a.txt").write_text("What is the capital of {country}?\n")
    (folder / "b.txt").write_text("Answer in JSON. What is the capital of {country}?")
    return folder / "in.csv"


@pytest.mark.usefixtures("alive")
def test_the_example_becomes_columns(sluice: Command, tmp_path: Path) -> None:
    table = EXAMPLE / "reviews.csv"
    command = ("batch", "run", str(table), "-o", "out.csv", *ASKED, "--key-column", "id")
    code, out, err = sluice.process(*command)
    assert (code, "out.csv: 6 rows" in err) == (0, True), err
    assert ("answers.jsonl" in out, "out.csv" in out) == (False, True), "the report names the table"
    found = rows_of(tmp_path / "out.csv")
    assert [{name: row[name] for name in ("id", "product", "review")} for row in found] == rows_of(table)
    assert list(found[0]) == ["id", "product", "review", "sentiment", "stars", "error"]
    assert {row["sentiment"] for row in found} <= {"positive", "negative", "mixed"}
    assert {row["stars"] for row in found} <= set("12345")
    assert {row["error"] for row in found} == {""}
    before = (tmp_path / "out.csv").read_bytes()
    (tmp_path / "out.csv").unlink()
    code, again, err = sluice(*command)
    assert (code, again, "complete already" in err) == (0, out, True)
    assert (tmp_path / "out.csv").read_bytes() == before
    run_id = err.split()[0].rstrip(":")
    assert sluice("batch", "results", run_id)[1].encode() == before
    assert sluice("batch", "results", run_id, "-o", "out.jsonl")[0] == 0
    assert read(tmp_path / "out.jsonl")[0]["stars"] == int(found[0]["stars"])


@pytest.mark.usefixtures("alive")
def test_a_dry_run_shows_prompts_and_the_tokens_that_the_run_has(sluice: Command, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("id,word\n1,one\n2,two\n3,three\n4\n5,five\n")
    (tmp_path / "p.txt").write_text("Repeat after me: {word}")
    command = ("batch", "run", "in.csv", "-o", "out.csv", "--prompt", "p.txt", "--param", "max_tokens=3")
    code, out, err = sluice(*command, "--dry-run")
    assert code == 0, err
    shown = [line for line in out.splitlines() if line.startswith(("──", "Repeat"))]
    assert shown == [line for k, word in ((1, "one"), (2, "two"), (3, "three"))
                     for line in (f"── row {k}", f"Repeat after me: {word}")]  # fmt: skip
    assert "row 4: 1 cell, and the header has 2;" in err
    assert {path.name for path in tmp_path.iterdir()} == {"in.csv", "p.txt"}
    code, report, _ = sluice(*command, "--json")
    assert (code, json.loads(report)["request_counts"]["completed"]) == (1, 4)  # a row was not asked
    assert f"4 rows, {json.loads(report)['usage']['input_tokens']} prompt tokens." in out


def test_a_dry_run_without_a_worker_counts_characters(sluice: Command, tmp_path: Path) -> None:
    countries(tmp_path, "Ghana", "Peru")
    asked = ("batch", "run", "in.csv", "-o", "o.csv", "--prompt", "a.txt", "--dry-run")
    for more in (("--model", "nobody"), ("--redis-url", "redis://localhost:1/0")):
        code, out, _ = sluice(*asked, *more)
        assert (code, "2 rows, 57 characters. Their tokens were not counted: no " in out) == (0, True)


@pytest.mark.usefixtures("alive")
def test_a_dry_run_tells_a_parameter_that_workers_refuse(sluice: Command, tmp_path: Path) -> None:
    countries(tmp_path, "Ghana")
    code, _, err = sluice("batch", "run", "in.csv", "-o", "o.csv", "--prompt", "a.txt", "--param", "temperature=9",
                          "--dry-run")  # fmt: skip
    assert (code, "a worker refuses the request: temperature:" in err) == (2, True), err


@pytest.mark.usefixtures("alive")
def test_two_prompts_are_compared_on_a_sample(sluice: Command, tmp_path: Path) -> None:
    countries(tmp_path, "Norway", "Ghana", "Egypt", "France", "Spain")
    both = ("batch", "compare", "in.csv", "--prompt", "a.txt", "--prompt", "b.txt", "--param", "temperature=0")
    code, out, err = sluice(*both, "--sample", "3", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert "a sample of 3 rows (--sample-seed 0)" in err
    assert (found["both"], found["same"], len(found["different"])) == (3, {"answer": 0}, 3)
    first, second = found["different"][0]["values"]["answer"]
    assert (first.startswith("The capital of"), "capital" in json.loads(second)) == (True, True)
    assert [score["answered"] for score in found["scores"]] == [3, 3]
    schema = {"type": "object", "properties": {"country": {"type": "string"}, "capital": {"type": "string"}},
              "required": ["country", "capital"], "additionalProperties": False}  # fmt: skip
    (tmp_path / "s.json").write_text(json.dumps(schema))
    code, out, err = sluice(*both, "--schema", "s.json", "-o", "kept")
    assert code == 0, err
    assert "capital │ 5 of 5 │ 100 %" in out
    assert "Rows that differ" not in out
    assert sluice(*both, "--schema", "s.json", "-o", "kept")[2].count("complete already") == 2


@pytest.mark.usefixtures("alive")
def test_ctrl_c_leaves_a_table_that_the_same_command_goes_on_with(sluice: Command, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("n\n" + "".join(f"{3 + k % 10}\n" for k in range(60)))
    (tmp_path / "p.txt").write_text("Count to {n}.")
    command = ("batch", "run", "in.csv", "-o", "out.csv", "--prompt", "p.txt", "--param", "temperature=0",
               "--window", "12")  # fmt: skip
    with sluice.running(*command) as process:
        until_it_has(tmp_path / "out.csv.run" / "out.answers.jsonl", 1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert (process.returncode, (tmp_path / "out.csv").exists()) == (3, False)
    code, _, err = sluice(*command)
    assert (code, "done earlier" in err) == (0, True), err
    assert [row["answer"] for row in rows_of(tmp_path / "out.csv")] == [
        " ".join(map(str, range(1, 4 + k % 10))) for k in range(60)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("alive")
def test_a_command_that_is_killed_anywhere_ends_with_the_table_of_an_unbroken_run(
    sluice: Command, tmp_path: Path
) -> None:
    (tmp_path / "in.csv").write_text("n,note\n" + "".join(f'{3 + k % 10},"a\n{k}"\n' for k in range(300)))
    (tmp_path / "p.txt").write_text("Count to {n}.")
    command = ("batch", "run", "in.csv", "--prompt", "p.txt", "--param", "temperature=0", "--window", "8", "-o")
    assert sluice(*command, "whole.csv")[0] == 0
    kills = 0
    for wait_s in (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0):
        with sluice.running(*command, "out.csv") as process:
            try:
                process.wait(wait_s)
            except subprocess.TimeoutExpired:
                kills += 1
    assert kills >= 3
    assert sluice(*command, "out.csv")[0] == 0
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    ended = [line["custom_id"] for line in read(tmp_path / "out.csv.run" / "out.answers.jsonl")]
    assert sorted(ended, key=int) == [str(k) for k in range(1, 301)]


@pytest.mark.usefixtures("alive")
def test_lines_that_are_run_again_are_in_the_table(sluice: Command, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("n\n3\n9\n")
    (tmp_path / "p.txt").write_text("Count to {n}.")
    (tmp_path / "s.json").write_text('{"type": "object", "properties": {"x": {"enum": [4, 7]}}, "required": ["x"]}')
    asked = ("--prompt", "p.txt", "--schema", "s.json", "--param", "max_tokens=1")
    code, out, err = sluice("batch", "run", "in.csv", "-o", "out.csv", *asked, "--json")
    assert (code, "2 of them with an error" in err) == (1, True), err
    assert rows_of(tmp_path / "out.csv")[0]["error"].startswith("answer_not_json: ")
    code, _, err = sluice(
        "batch", "rerun", json.loads(out)["id"], "--cut", "--invalid", "--retry", "cut,invalid", "--retries", "6"
    )
    assert (code, "out.csv: 2 rows" in err) == (0, True), err
    assert all(row["x"] in "47" and not row["error"] for row in rows_of(tmp_path / "out.csv"))


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["in.csv", "-o", "out.csv"], "is a table: give the prompt of a row with --prompt FILE"),
        (["in.jsonl", "-o", "out.jsonl", "--key-column", "id"], "--key-column is for tables"),
        (["in.csv", "-o", "out.csv", "--prompt", "gone.txt"], "cannot read gone.txt"),
        (["gone.csv", "-o", "out.csv", "--prompt", "a.txt"], "cannot read"),
        (["in.csv", "-o", "no/out.csv", "--prompt", "a.txt"], "No such file"),
        (["in.csv", "-o", "out.xls", "--prompt", "a.txt"], "ends in .csv, .tsv, .jsonl or .parquet"),
        (["in.csv", "-o", "out.csv", "--prompt", "a.txt", "--schema", "a.txt"], "a.txt is not JSON"),
        (["in.csv", "-o", "out.csv", "--prompt", "a.txt", "--param", "stop=END"], "a text stands in quotes"),
        (["in.csv", "-o", "out.csv", "--prompt", "a.txt", "--param", "stop"], "write NAME=VALUE"),
        (["in.csv", "-o", "out.csv", "--prompt", "a.txt", "--rows", "9-3"], "the first row is behind the last"),
        (["in.csv", "-o", "out.csv", "--prompt", "a.txt", "--rows", "x"], "write FROM-TO"),
        (["in.csv", "-o", "out.csv", "--prompt", "a.txt", "--delimiter", ";;"], "must be one character"),
        (["in.csv", "-o", "out.csv", "--prompt", "a.txt", "--errors", "e"], "has its errors in a column"),
        (["in.csv", "-o", "out.csv", "--prompt", "bad.txt"], "did you mean 'country'?"),
    ],
)
def test_what_cannot_be_done_is_a_sentence_and_leaves_no_file(
    sluice: Command, tmp_path: Path, args: list[str], sentence: str
) -> None:
    countries(tmp_path, "Ghana")
    (tmp_path / "bad.txt").write_text("{contry}")
    before = set(tmp_path.iterdir())
    code, out, err = sluice("batch", "run", *args)
    assert (code, out, sentence in err, "Traceback" in err) == (2, "", True, False), err
    assert set(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("alive")
def test_a_refused_run_of_a_table_leaves_no_folder(sluice: Command, tmp_path: Path) -> None:
    countries(tmp_path, "Ghana")
    code, _, err = sluice("batch", "run", "in.csv", "-o", "out.csv", "--prompt", "a.txt", "--model", "nobody")
    assert (code, "unserved_model" in err, "in.csv was refused" in err) == (2, True, True), err
    assert not list(tmp_path.glob("out*"))
