"""Templates, images and parameters: a row becomes a request, or its problem a sentence."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.batch.lines import read_line
from sluice.batch.outcomes import wants_json
from sluice.batch.prompts import Asked, BadRow, RowRequests, Template, parse_schema
from sluice.batch.tables import Row
from sluice.errors import BatchRefused

COLUMNS = ["id", "Review text", "product", "a.b:c!"]
PNG = b"\x89PNG\r\n\x1a\n0000"


def requests(folder: Path, **asked: Any) -> RowRequests:
    return RowRequests(Asked(**{"prompt": "{id}", **asked}), [*COLUMNS, "picture"], folder)


def body(folder: Path, cells: dict[str, Any], **asked: Any) -> dict[str, Any]:
    return requests(folder, **asked).body(Row(1, cells))


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("Say {id}.\n", "Say 7."),
        ("{Review text}{id}", "{id} and }7"),
        ('{{"label": "{product}"}}', '{"label": ""}'),
        ("{{{id}}} {a.b:c!}", '{7} {"x": 1}'),
        ("{{id}}", "{id}"),
        ("no column", "no column"),
    ],
)
def test_a_template_is_filled_once(text: str, filled: str) -> None:
    cells = {"id": 7, "Review text": "{id} and }", "product": None, "a.b:c!": {"x": 1}}
    assert Template(text, COLUMNS, "the prompt").fill(cells) == filled


@given(st.text(), st.text())
def test_any_text_is_itself_with_its_braces_doubled(before: str, cell: str) -> None:
    doubled = before.replace("{", "{{").replace("}", "}}")
    assert Template(f"{doubled}{{id}}.", COLUMNS, "the prompt").fill({"id": cell}) == f"{before}{cell}."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{Id}", "did you mean 'id'?"),
        ("a\n{review_text}", "line 2: the table has no column 'review_text'; did you mean 'Review text'?"),
        ("{}", "no column ''"),
        ('{"label": 1}', "Braces that name no column are written {{ and }}"),
        ("{unlike anything}", "it has 'id', 'Review text', 'product', 'a.b:c!'"),
        ("a } b", "a single }; write }} for a brace"),
        ("{id", "a single {; write {{ for a brace"),
    ],
)
def test_a_template_that_does_not_fit_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(BatchRefused) as refused:
        Template(text, COLUMNS, "the prompt")
    assert sentence in str(refused.value)


def test_a_line_is_a_request_of_the_batch_format(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"label": {"type": "string"}}}
    made = requests(tmp_path, system="Be {product}.", schema=schema, params={"temperature": 0}, key="id")
    read = read_line(made.line(Row(9, {"id": "k1", "product": "brief"})), {"*": "default"})
    assert (read.custom_id, wants_json(read.body), read.body["temperature"]) == ("k1", True, 0)
    assert read.body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "k1"}]
    assert read.body["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize("key", [None, "", "x" * 513, "\ud800"])
def test_a_key_that_names_nothing_is_a_bad_row(tmp_path: Path, key: str | None) -> None:
    with pytest.raises(BadRow, match="1 to 512 characters"):
        requests(tmp_path, key="id").key(Row(1, {"id": key}))


def test_a_row_that_no_worker_could_take_is_bad(tmp_path: Path) -> None:
    for text, sentence in (("\ud800", "surrogate"), ("x" * 16_000_000, "the limit is 16,000,000")):
        with pytest.raises(BadRow, match=sentence):
            requests(tmp_path).line(Row(1, {"id": text}))


def test_an_image_is_a_url_or_a_file_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.png").write_bytes(PNG)
    for named in ("deep/a.png", "./deep/../deep/a.png", str(tmp_path / "deep" / "a.png")):
        image, text = body(tmp_path, {"id": "x", "picture": named}, image="picture")["messages"][0]["content"]
        assert image["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
        assert text == {"type": "text", "text": "x"}
    for url in ("https://example.org/a.png", "HTTP://x/y", "data:image/png;base64,AA=="):
        image, _ = body(tmp_path, {"picture": url}, image="picture")["messages"][0]["content"]
        assert image["image_url"]["url"] == url


def test_an_image_may_be_in_the_table_itself(tmp_path: Path) -> None:
    for cell in (PNG, {"bytes": PNG, "path": "../a.png"}):
        image, _ = body(tmp_path, {"picture": cell}, image="picture")["messages"][0]["content"]
        assert image["image_url"]["url"] == f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    with pytest.raises(BadRow, match="the image: it is no PNG"):
        body(tmp_path, {"picture": b"text"}, image="picture")


def test_an_image_that_cannot_be_sent_is_a_bad_row(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (tmp_path / "secret.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "loop.png").symlink_to(inside / "loop.png")
    (inside / "text.png").write_text("secret: 1")
    (inside / "large.png").write_bytes(PNG + bytes(12_000_000))
    sentences = {
        "../secret.png": "outside of",
        str(tmp_path / "secret.png"): "outside of",
        "link.png": "outside of",
        "loop.png": "loop.png",
        "text.png": "no PNG, JPEG, GIF or WebP",
        "large.png": "larger than 12,000,000 bytes",
        "gone.png": "no such file",
        ".": "no regular file",
        "a\0b": "null",
        "x" * 5_000: "too long",
        "": "is empty",
    }
    for named, sentence in sentences.items():
        with pytest.raises(BadRow) as bad:
            body(inside, {"picture": named}, image="picture")
        assert sentence in str(bad.value)
        assert len(str(bad.value)) < 600


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"prompt": "the same"}, "names no column"),
        ({"image": "pictur"}, "--image: the table has no column 'pictur'; did you mean 'picture'?"),
        ({"key": "ID"}, "--key-column: the table has no column 'ID'; did you mean 'id'?"),
        ({"system": "{nope}"}, "the system prompt, line 1"),
        ({"params": {"messages": []}}, "--param messages"),
        ({"params": {"model": "m"}}, "use --model"),
        ({"params": {"response_format": {}}, "schema": {"properties": {"a": {}}}}, "--schema sets it"),
    ],
)
def test_what_does_not_fit_the_table_is_refused(tmp_path: Path, asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BatchRefused) as refused:
        requests(tmp_path, **asked)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("field", "kind"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["integer", "null"]}, "integer"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, "number"),
        ({"enum": ["a", None]}, "string"),
        ({"enum": [True, False]}, "boolean"),
        ({"enum": [1, "a"]}, "json"),
        ({"const": 3}, "integer"),
        ({"type": "array", "items": {}}, "json"),
        ({"$ref": "#/$defs/x"}, "json"),
        (True, "json"),
        ({"type": "null"}, "json"),
    ],
)
def test_a_field_of_the_schema_is_a_column_of_its_kind(field: object, kind: str) -> None:
    schema = parse_schema(json.dumps({"type": "object", "properties": {"x": field}}), "answer.json")
    assert Asked("", schema=schema).fields() == {"x": kind}


def test_a_whole_response_format_is_taken_for_its_schema() -> None:
    inner = {"type": "object", "properties": {"x": {}}}
    whole = {"type": "json_schema", "json_schema": {"name": "n", "schema": inner}}
    assert parse_schema(json.dumps(whole), "answer.json") == {**inner, "additionalProperties": False}


def test_a_schema_allows_no_field_that_has_no_column_unless_it_says_so() -> None:
    own = {"type": "object", "properties": {"x": {}}, "additionalProperties": True}
    assert parse_schema(json.dumps(own), "answer.json") == own


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"type": "string"}', '{"properties": {}}', "[" * 100_000])
def test_a_schema_without_fields_is_refused(text: str) -> None:
    with pytest.raises(BatchRefused, match=r"^answer\.json"):
        parse_schema(text, "answer.json")
