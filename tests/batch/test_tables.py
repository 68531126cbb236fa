"""Tables: what is read is what is written again, and what cannot be read is refused with the remedy."""

import csv
import datetime
import decimal
import json
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.batch.tables import Kind, Row, Table, Written, open_table, write_table
from sluice.errors import BatchRefused

NEW: dict[str, Kind] = {"label": "string", "error": "string"}


def table_of(path: Path, raw: bytes | str, **options: Any) -> Table:
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    return open_table(path, **options)


def cells(table: Table) -> list[Mapping[str, Any]]:
    return [row.cells for row in table.rows()]


def labelled(table: Table) -> Iterator[Written]:
    return ((row, {"label": f"l{row.number}", "error": None}) for row in table.rows())


def write_csv(path: Path, names: Sequence[str], rows: Sequence[Sequence[str]], **options: Any) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([names, *rows])
    return path


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.lists(TEXT, min_size=1, max_size=4, unique=True).filter(lambda names: not names[0].startswith("\ufeff"))


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    names = draw(NAMES)
    return names, draw(st.lists(st.lists(TEXT, min_size=len(names), max_size=len(names)), max_size=5))


@given(tables(), st.sampled_from(["\r\n", "\n"]), st.sampled_from([".csv", ".tsv"]))
def test_any_cells_pass_through_csv_unchanged(
    tmp_path_factory: pytest.TempPathFactory, table: tuple[list[str], list[list[str]]], end: str, suffix: str
) -> None:
    names, rows = table
    folder = tmp_path_factory.mktemp("csv")
    file = write_csv(folder / f"in{suffix}", names, rows, delimiter="\t", lineterminator=end, quoting=csv.QUOTE_ALL)
    source = open_table(file, delimiter="\t")
    assert [list(each.values()) for each in cells(source)] == rows
    write_table(folder / "out", suffix, source, {"new column": "string"}, ((row, {}) for row in source.rows()))
    again = open_table((folder / "out").rename(folder / f"out{suffix}"), delimiter="," if suffix == ".csv" else "\t")
    assert again.columns == [*names, "new column"]
    assert [list(each.values()) for each in cells(again)] == [[*row, ""] for row in rows]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.lists(st.dictionaries(st.text(max_size=6).filter(lambda name: name not in NEW), VALUES, min_size=1),
                   min_size=1, max_size=5)  # fmt: skip


@given(OBJECTS)
def test_json_rows_keep_their_values(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("jsonl")
    source = table_of(folder / "in.jsonl", "\n".join(map(json.dumps, rows)))
    write_table(folder / "out.jsonl", ".jsonl", source, NEW, labelled(source))
    read = [json.loads(line) for line in (folder / "out.jsonl").read_bytes().splitlines()]
    assert read == [{**row, "label": f"l{number}", "error": None} for number, row in enumerate(rows, 1)]


@given(OBJECTS)
def test_json_rows_become_any_table(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]) -> None:
    folder = tmp_path_factory.mktemp("any")
    source = table_of(folder / "in.jsonl", "\n".join(map(json.dumps, rows)))
    for suffix in (".csv", ".parquet"):
        write_table(folder / f"out{suffix}", suffix, source, NEW, labelled(source))
        written = cells(open_table(folder / f"out{suffix}"))
        assert [row["label"] for row in written] == [f"l{number}" for number in range(1, len(rows) + 1)]


def parquet(path: Path) -> pa.Table:
    """Write a file with every type that people have, and nulls in each."""
    moment = datetime.datetime(2026, 11, 29, 16, 0, 1, 250_000)
    columns = {
        "id": pa.array([1, 2, None], pa.int32()),
        "text": ['a,\n"b"', None, ""],
        "day": pa.array([moment.date(), None, moment.date()]),
        "at": pa.array([moment, None, moment], pa.timestamp("us", "UTC")),
        "nanos": pa.array([1_700_000_000_000_000_001, None, 2], pa.timestamp("ns")),
        "price": pa.array([decimal.Decimal("1.10"), None, decimal.Decimal("2.00")]),
        "raw": pa.array([b"\x00\xff", None, b""]),
        "tags": pa.array([["a", None], None, []], pa.list_(pa.string())),
        "nested": pa.array([{"x": 1, "y": [True]}, None, {"x": None, "y": None}]),
        "by": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "kind": pa.array(["one", None, "two"]).dictionary_encode(),
        "score": pa.array([float("nan"), None, float("inf")]),
    }
    table = pa.table(columns)
    pq.write_table(table, path)
    return table


def test_parquet_keeps_its_types_and_nulls(tmp_path: Path) -> None:
    before = parquet(tmp_path / "in.parquet")
    source = open_table(tmp_path / "in.parquet")
    kinds: dict[str, Kind] = {**NEW, "stars": "integer", "ok": "boolean", "share": "number", "more": "json"}
    new = {"label": "é", "stars": 3.0, "ok": True, "share": 1, "more": {"a": [1]}}
    write_table(tmp_path / "out.parquet", ".parquet", source, kinds, ((row, new) for row in source.rows()))
    after = pq.read_table(tmp_path / "out.parquet")
    own = after.select(before.column_names)
    assert own.schema.equals(pq.read_table(tmp_path / "in.parquet").schema)
    assert repr(own.to_pylist()) == repr(before.to_pylist())  # in which NaN is NaN
    added = after.select(list(kinds)).to_pylist()[0]
    assert added == {"label": "é", "error": None, "stars": 3, "ok": True, "share": 1.0, "more": '{"a": [1]}'}
    assert [str(after.schema.field(name).type) for name in ("stars", "ok", "share")] == ["int64", "bool", "double"]


def test_parquet_becomes_text_that_can_be_read(tmp_path: Path) -> None:
    parquet(tmp_path / "in.parquet")
    source = open_table(tmp_path / "in.parquet")
    write_table(tmp_path / "out.csv", ".csv", source, NEW, labelled(source))
    first, nulls, _ = cells(open_table(tmp_path / "out.csv"))
    assert first == {
        "id": "1", "text": 'a,\n"b"', "day": "2026-11-29", "at": "2026-11-29T16:00:01.250000+00:00",
        "nanos": "2023-11-14 22:13:20.000000001", "price": "1.10", "raw": "00ff", "tags": '["a", null]',
        "nested": '{"x": 1, "y": [true]}', "by": '[["k", 1]]', "kind": "one", "score": "nan",
        "label": "l1", "error": "",
    }  # fmt: skip
    assert {name for name, value in nulls.items() if value} == {"id", "label"}
    write_table(tmp_path / "out.jsonl", ".jsonl", source, NEW, labelled(source))
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    assert (lines[0]["nested"], lines[0]["score"], lines[1]["text"]) == ({"x": 1, "y": [True]}, None, None)


def test_what_is_no_parquet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchRefused, match="is not a Parquet file"):
        table_of(tmp_path / "in.parquet", "id,text\n")
    twice = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(BatchRefused, match="'a' \\(columns 1 and 2\\)"):
        open_table(tmp_path / "twice.parquet")
    parquet(tmp_path / "cut.parquet")
    raw = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(raw[:4] + b"\xff" * 300 + raw[304:])  # the pages, and not the footer
    with pytest.raises(BatchRefused, match="after row 0"):
        list(open_table(tmp_path / "cut.parquet").rows())


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_read_from_the_file(tmp_path: Path, delimiter: str) -> None:
    rows = [[str(k), "a, b; c"] for k in range(30)]
    source = open_table(write_csv(tmp_path / "in.csv", ["id", "my text"], rows, delimiter=delimiter))
    assert source.columns == ["id", "my text"]
    assert [list(each.values()) for each in cells(source)] == rows


@pytest.mark.parametrize("raw", ["text\nHello, you; there\n", "text\na;b\nc\n", 'text\n"a\tb"\n', "text\n"])
def test_one_column_is_not_divided(tmp_path: Path, raw: str) -> None:
    assert table_of(tmp_path / "in.csv", raw).columns == ["text"]


def test_a_byte_order_mark_is_no_part_of_the_first_name(tmp_path: Path) -> None:
    for name, raw in (("in.csv", "id,text\n1,a\n"), ("in.jsonl", '{"id": "1", "text": "a"}\n')):
        source = table_of(tmp_path / name, raw.encode("utf-8-sig"))
        assert cells(source) == [{"id": "1", "text": "a"}]
    assert cells(open_table(tmp_path / "in.csv", "UTF_8")) == [{"id": "1", "text": "a"}]


def test_another_encoding_is_refused_with_the_option_and_read_with_it(tmp_path: Path) -> None:
    raw = "id,text\n1,fine\n2,Très bien\n".encode("latin-1")
    with pytest.raises(BatchRefused, match=r"not UTF-8, .*: byte 0xe8. Give its encoding, such as --encoding latin-1"):
        list(table_of(tmp_path / "in.csv", raw).rows())
    assert cells(open_table(tmp_path / "in.csv", "latin-1"))[1]["text"] == "Très bien"
    with pytest.raises(BatchRefused, match="--encoding utf-16"):
        table_of(tmp_path / "in.csv", "id,text\n".encode("utf-16"))
    assert open_table(tmp_path / "in.csv", "utf-16").columns == ["id", "text"]
    for wrong in ("klingon", "hex"):
        with pytest.raises(BatchRefused, match="is no encoding of text"):
            open_table(tmp_path / "in.csv", wrong)


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,b,a,a\n", r"'a' \(columns 1 and 3 and 4\)"),
        ('a,b\n1,"x" y\n', "line 2: .* expected after"),
        ('a,b\n1,"never closed\n2,c\n', "the file ends within a quoted cell"),
    ],
)
def test_a_csv_that_cannot_be_read_is_refused(tmp_path: Path, raw: str, sentence: str) -> None:
    with pytest.raises(BatchRefused, match=sentence):
        list(table_of(tmp_path / "in.csv", raw).rows())


def test_rows_of_another_length_are_kept_with_their_problem(tmp_path: Path) -> None:
    short, whole, long = table_of(tmp_path / "in.csv", "a,b\n1\n\n2,x\n3,y,z\n").rows()
    assert (short.cells, whole, long.cells) == ({"a": "1", "b": ""}, Row(2, {"a": "2", "b": "x"}), {"a": "3", "b": "y"})
    assert "1 cell, and the header has 2;" in (short.problem or "")
    assert "3 cells, and the header has 2; beyond it: ['z'];" in (long.problem or "")


def test_lines_that_are_no_objects_are_rows_with_a_problem(tmp_path: Path) -> None:
    raw = b'{"a": 1}\n\n{"a": \n[1]\n{"a": NaN}\n"\xff"\n{"a": 2}'
    rows = list(table_of(tmp_path / "in.jsonl", raw).rows())
    assert [row.number for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row.problem is None for row in rows] == [True, False, False, False, False, True]
    with pytest.raises(BatchRefused, match="no line that is a JSON object"):
        table_of(tmp_path / "in.jsonl", "1\n2\n")


@pytest.mark.parametrize("name", ["in.txt", "in", "in.csv.gz", "in.xlsx"])
def test_another_suffix_is_refused_with_those_that_are_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(BatchRefused, match=r"ends in \.csv, \.tsv, \.jsonl or \.parquet"):
        table_of(tmp_path / name, "a,b\n")


def test_a_megabyte_in_a_cell_is_a_cell(tmp_path: Path) -> None:
    large = "é" * 1_000_000
    source = open_table(write_csv(tmp_path / "in.csv", ["id", "text"], [["1", large], ["2", "b"]]))
    assert [row["text"] for row in cells(source)] == [large, "b"]
    with pytest.raises(BatchRefused, match="longer than 16,000,000 characters"):
        list(table_of(tmp_path / "in.csv", "a,b\n1," + "x" * 16_000_001).rows())


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_a_large_table_is_never_whole_in_memory(tmp_path: Path, suffix: str) -> None:
    rows, text = 4_000, "x" * 10_000  # 40 MB
    if suffix == ".parquet":
        pq.write_table(
            pa.table({"id": range(rows), "text": [f"{k}{text}" for k in range(rows)]}), tmp_path / "in.parquet"
        )
    elif suffix == ".csv":
        write_csv(tmp_path / "in.csv", ["id", "text"], [[str(k), text] for k in range(rows)])
    else:
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": k, "text": text}) + "\n" for k in range(rows)))
    tracemalloc.start()
    try:
        source = open_table(tmp_path / f"in{suffix}")
        write_table(tmp_path / f"out{suffix}", suffix, source, NEW, labelled(source))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 14_000_000  # of 40 MB: a row group of Parquet
    assert sum(1 for _ in open_table(tmp_path / f"out{suffix}").rows()) == rows
