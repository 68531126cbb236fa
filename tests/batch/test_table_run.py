"""Runs of tables against a real server, with a worker that answers by the request."""

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sluice import Batch, Client
from sluice.batch import table_run
from sluice.batch.prompts import Asked
from sluice.batch.table_run import Chosen, Shown, TableRun
from sluice.batch.tables import open_table
from sluice.errors import BatchRefused, BatchTaken
from tests.batch.helpers import ANY, Chat, leave, started

SCHEMA = {"type": "object", "properties": {"label": {"type": "string"}, "stars": {"type": "integer"}, "why": {}}}
ANSWER = {"label": "good, é", "stars": 5, "why": ["a", {"b": None}]}
SAYS = {"say": [json.dumps(ANSWER)], "ends": "stop"}  # `Chat` answers so


def table(folder: Path, rows: int, name: str = "in.csv") -> Path:
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["id", "text"], *([f"k{k}", f'text\n"{k}"'] for k in range(1, rows + 1))])
    return folder / name


def run_of(path: Path, output: str = "out.csv", *, shown: Shown | None = None, **changed: Any) -> TableRun:
    """Return an unprepared run. `changed`: fields of `Asked` or `Chosen`."""
    asked = {name: changed.pop(name) for name in list(changed) if name in Asked.__dataclass_fields__}
    chosen = Chosen(Asked(**{"prompt": "Rate {text}.", "params": SAYS, **asked}), **changed)
    return TableRun(path, path.parent / output, chosen, shown or Shown())


async def answered(client: Client, run: TableRun) -> Batch:
    run.prepare()
    batch = await client.batch(run.requests, run.answers, models=ANY)
    run.write_to(run.output)
    return batch


def read(path: Path) -> list[Mapping[str, Any]]:
    return [row.cells for row in open_table(path).rows()]


def lines_of(run: TableRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.requests.read_bytes().splitlines()]


@pytest.mark.usefixtures("chat")
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
async def test_the_fields_of_the_schema_are_columns_behind_the_input_s(
    client: Client, tmp_path: Path, suffix: str
) -> None:
    run = run_of(table(tmp_path, 5), f"out{suffix}", schema=SCHEMA, key="id", shown=Shown(details=True))
    batch = await answered(client, run)
    assert batch.request_counts.completed == 5
    rows = read(run.output)
    assert [row["id"] for row in rows] == [f"k{k}" for k in range(1, 6)]
    assert list(rows[0]) == [
        "id", "text", "label", "stars", "why", "error", "finish_reason", "prompt_tokens", "completion_tokens"
    ]  # fmt: skip
    assert (rows[2]["text"], rows[2]["label"], rows[2]["finish_reason"]) == ('text\n"3"', "good, é", "stop")
    typed = suffix in (".jsonl", ".parquet")
    assert (rows[0]["stars"], rows[0]["error"] or None) == (5 if typed else "5", None)
    assert rows[0]["why"] == (ANSWER["why"] if suffix == ".jsonl" else '["a", {"b": null}]')


async def test_bad_rows_and_failed_ones_keep_their_place_with_an_error(
    client: Client, chat: Chat, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text(
        '{"id": 1, "picture": "gone.png"}\n{"id": 2}\nno json\n{"id": 3, "picture": "https://x/y.png"}\n'
    )
    run = run_of(tmp_path / "in.jsonl", prompt="{id}", image="picture", params={"fails": 9, "retryable": False,
                 "refuse": "invalid_request", "say": ["x"]})  # fmt: skip
    await answered(client, run)
    first, second, third, last = (row["error"] for row in read(run.output))
    assert first == "image gone.png: there is no such file"
    assert second == "the cell of the image is empty"
    assert third.startswith("not JSON: Expecting value at line 1 column 1")
    assert last.startswith("invalid_request: ")
    assert len(chat.requests) == 1


@pytest.mark.usefixtures("chat")
async def test_an_answer_that_is_no_object_and_a_number_beyond_64_bits_are_errors(
    client: Client, tmp_path: Path
) -> None:
    large = {"say": ['{"label": "a", "stars": 1' + "0" * 30 + "}"], "ends": "stop"}
    run = run_of(table(tmp_path, 1), "out.parquet", schema=SCHEMA, params=large)
    await answered(client, run)
    (row,) = read(run.output)
    assert (row["label"], row["stars"], row["error"]) == ("a", None, "stars: 1" + "0" * 30 + " has more than 64 bits")
    run = run_of(table(tmp_path, 1), "list.csv", schema=SCHEMA, params={"say": ["[1]"], "ends": "stop"})
    await answered(client, run)
    assert read(run.output)[0]["error"] == "answer_not_json: it is no JSON object; the answer is [1]"


@pytest.mark.usefixtures("chat")
async def test_an_interrupted_run_is_resumed_and_has_no_table_before_its_end(client: Client, tmp_path: Path) -> None:
    run = run_of(table(tmp_path, 60), key="id")
    run.prepare()
    task = await started(client, run.requests, run.answers, window=4)
    await leave(task)
    assert not run.output.exists()
    del run
    again = run_of(tmp_path / "in.csv", key="id")
    batch = await answered(client, again)
    assert batch.request_counts.completed == 60
    assert [row["id"] for row in read(again.output)] == [f"k{k}" for k in range(1, 61)]
    assert not any(row["error"] for row in read(again.output))


@pytest.mark.usefixtures("chat")
async def test_the_table_can_be_written_again_from_the_answers_alone(client: Client, tmp_path: Path) -> None:
    run = run_of(table(tmp_path, 3), schema=SCHEMA, key="id", sample=2, seed=4, shown=Shown(prefix="m_"))
    await answered(client, run)
    again = TableRun.of_answers(run.answers)
    assert again is not None
    again.write_to(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_bytes() == run.output.read_bytes()
    assert list(read(run.output)[0]) == ["id", "text", "m_label", "m_stars", "m_why", "m_error"]
    (tmp_path / "table.json").write_text("[]")  # somebody's file beside that of another kind of run
    assert TableRun.of_answers(tmp_path / "out.jsonl") is None
    with pytest.raises(BatchRefused, match="is the table itself"):
        again.write_to(tmp_path / "in.csv")
    table(tmp_path, 4)
    with pytest.raises(BatchRefused, match=r"in.csv was changed since the run began"):
        again.write_to(tmp_path / "more.csv")
    assert not list(tmp_path.glob("more*"))


@pytest.mark.usefixtures("chat")
async def test_another_table_or_prompt_for_the_same_output_is_refused(client: Client, tmp_path: Path) -> None:
    path = table(tmp_path, 2)
    await answered(client, run_of(path))
    before = sorted(tmp_path.rglob("*"))
    for changed, name in (
        ({"prompt": "Judge {text}."}, "another prompt:"), ({"system": "Be kind."}, "another system prompt:"),
        ({"schema": SCHEMA}, "another schema:"), ({"sample": 1}, "another sample:"), ({"model": "m"}, "another model:"),
        ({"params": {}}, "another --param:"), ({"key": "id"}, "another key:"), ({"rows": (1, 1)}, "another rows:"),
    ):  # fmt: skip
        with pytest.raises(BatchRefused, match=name):
            run_of(path, **changed).prepare()
    table(tmp_path, 3)
    with pytest.raises(BatchRefused, match="another table:"):
        run_of(path).prepare()
    assert sorted(tmp_path.rglob("*")) == before
    table(tmp_path, 2)
    run_of(path).prepare()


@pytest.mark.usefixtures("chat")
async def test_a_run_without_answers_may_be_changed(client: Client, tmp_path: Path) -> None:
    run_of(table(tmp_path, 2)).prepare()
    run = run_of(tmp_path / "in.csv", prompt="Judge {text}.")
    await answered(client, run)
    assert lines_of(run)[0]["body"]["messages"][0]["content"].startswith("Judge")


async def test_a_run_that_ended_without_an_answer_may_be_changed_too(
    client: Client, chat: Chat, tmp_path: Path
) -> None:
    wrong = {"say": ["x"], "fails": 9, "retryable": False, "refuse": "invalid_request"}
    run = run_of(table(tmp_path, 3), params=wrong)
    batch = await answered(client, run)
    assert batch.request_counts.failed == 3
    del run  # and its lock
    again = run_of(tmp_path / "in.csv")
    batch = await answered(client, again)
    assert batch.request_counts.completed == 3
    assert {row["error"] for row in read(again.output)} == {""}


@pytest.mark.usefixtures("chat")
async def test_a_run_that_has_answers_is_never_discarded(client: Client, tmp_path: Path) -> None:
    run = run_of(table(tmp_path, 2))
    await answered(client, run)
    run.discard()
    assert run.answers.exists()


def test_an_answer_replaces_a_failure_of_the_same_row(tmp_path: Path) -> None:
    run = run_of(table(tmp_path, 2))
    run.prepare()
    failed = {"custom_id": "1", "response": None, "error": {"code": "overloaded", "message": "No room."}}
    answer = {"custom_id": "1", "response": {"body": {"choices": [{"message": {"content": "hi"}}]}}, "error": None}
    run.answers.with_name("out.answers.errors.jsonl").write_text(json.dumps(failed) + "\n")
    run.answers.write_text(json.dumps(answer) + '\n{"custom_id": "2", "resp')  # the second is still being written
    assert [new["error"] for _, new in run.joined()] == [None, "no answer yet: the run has not ended"]


def test_one_process_at_a_time_has_the_folder(tmp_path: Path) -> None:
    first = run_of(table(tmp_path, 2))
    first.prepare()
    with pytest.raises(BatchTaken, match=r"out\.csv\.run is locked"):
        run_of(tmp_path / "in.csv").prepare()
    assert first.requests.exists()


@pytest.mark.parametrize(
    ("raw", "changed", "sentence"),
    [
        ("id,text\na,1\nb,2\na,3\na,4\n,5\n", {"key": "id"},
         "row 3: its key 'a' is that of row 1; row 4: its key 'a' is that of row 1; row 5: the key must be 1 to 512"),
        ("id,text\n", {}, "has no row to run"),
        ("id,text\n1\n", {}, "none of its 1 row can be run. row 1: 1 cell, and the header has 2"),
        ("id,text\n1,a\n", {"rows": (2, None)}, "has no row to run"),
        ("id,text,error\n1,a,b\n", {}, "has a column 'error' already"),
        ("id,text\n1,a\n", {"schema": {"properties": {"error": {}}}}, "field 'error' has the name of another"),
        ("id,Text\n1,a\n", {}, "did you mean 'Text'?"),
        ("id,text\n1,a\n2,\xe9\n", {}, "--encoding latin-1"),
    ],
)  # fmt: skip
def test_a_table_that_is_refused_leaves_no_file(
    tmp_path: Path, raw: str, changed: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "in.csv").write_bytes(raw.encode("latin-1"))
    with pytest.raises(BatchRefused) as refused:
        run_of(tmp_path / "in.csv", **changed).prepare()
    assert sentence in str(refused.value)
    assert os.listdir(tmp_path) == ["in.csv"]


@pytest.mark.parametrize(
    ("output", "sentence"),
    [("in.csv", "is the table itself"), ("out.txt", "ends in .csv"), ("taken.csv", "is no file of this run"),
     ("link.csv", "is no file of this run"), ("state.csv", "a run of another kind")],
)  # fmt: skip
def test_an_output_that_is_something_else_is_refused(tmp_path: Path, output: str, sentence: str) -> None:
    (tmp_path / "taken.csv").write_text("mine")
    (tmp_path / "link.csv").symlink_to(tmp_path / "nowhere")
    (tmp_path / "state.csv.run").write_text("{}")
    with pytest.raises(BatchRefused) as refused:
        run_of(table(tmp_path, 1), output).prepare()
    assert sentence in str(refused.value)
    assert (tmp_path / "taken.csv").read_text() == "mine"


def test_a_sample_and_rows_choose_the_same_each_time_in_the_order_of_the_table(tmp_path: Path) -> None:
    path = table(tmp_path, 100)
    drawn = [row.number for row in run_of(path, sample=10).rows()]
    assert drawn == sorted(set(drawn))
    assert len(drawn) == 10
    assert [row.number for row in run_of(path, sample=10).rows()] == drawn
    assert [row.number for row in run_of(path, sample=10, seed=1).rows()] != drawn
    assert [row.number for row in run_of(path, rows=(98, 200)).rows()] == [98, 99, 100]
    within = [row.number for row in run_of(path, rows=(40, 50), sample=5).rows()]
    assert len(within) == 5
    assert set(within) <= set(range(40, 51))
    assert len(list(run_of(path, sample=1_000).rows())) == 100


@pytest.mark.parametrize(("limit", "most"), [("MAX_LINES", 4), ("MAX_FILE_BYTES", 500)])
def test_more_than_a_run_holds_is_refused_with_the_rows_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    path = table(tmp_path, 9)
    monkeypatch.setattr(table_run, limit, most)
    with pytest.raises(BatchRefused) as refused:
        run_of(path).prepare()
    fits = int(str(refused.value).partition("--rows 1-")[2].partition(" ")[0])
    assert f"-o out-1.csv, and then --rows {fits + 1}- -o out-2.csv" in str(refused.value)
    assert not (tmp_path / "out.csv.run").exists()
    run_of(path, rows=(1, fits)).prepare()
    with pytest.raises(BatchRefused):
        run_of(path, "more.csv", rows=(1, fits + 1)).prepare()


@pytest.mark.usefixtures("chat")
async def test_whatever_a_csv_holds_the_rows_of_the_output_are_those_of_the_input(
    client: Client, tmp_path: Path
) -> None:
    """300 rows; the slow test has 5,000."""
    await all_rows(client, tmp_path, 300)


@pytest.mark.slow
@pytest.mark.usefixtures("chat")
async def test_five_thousand_rows_are_joined_by_their_keys(client: Client, tmp_path: Path) -> None:
    await all_rows(client, tmp_path, 5_000)


async def all_rows(client: Client, folder: Path, count: int) -> None:
    hard = [
        'quote "',
        "line\nend",
        "cr\rlf\r\n",
        "",
        " ",
        "é, ü; 你好 🚀",
        "\u2028",
        "{id}",
        "\0",
        "a\tb",
        "'",
        "\ufeff",
    ]
    rows = [[f"key {k}", hard[k % len(hard)] * (1 + k % 3), str(k)] for k in range(count)]
    rows[7][1] = "x" * 1_000_000
    with (folder / "in.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([["id", "text", "n"], *rows])
    run = run_of(folder / "in.csv", key="id", params={"say": ["hi"], "ends": "stop"})
    batch = await answered(client, run)
    assert batch.request_counts.completed == count
    with run.output.open(newline="", encoding="utf-8") as file:
        header, *written = csv.reader(file)
    assert header == ["id", "text", "n", "answer", "error"]
    assert written == [[*row, "hi", ""] for row in rows]
