"""Damaged input: each kind of damage breaks a named rule, and docs/batches.md lists the rules."""

import json
import re
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from schemas import BatchLine
from sluice.batch.lines import BadLine, read_line
from sluice.batch.source import Source, sorted_for_reuse
from sluice.errors import BatchRefused
from tests.batch.helpers import ANY, HELLO, as_bytes, line, scan, write
from tests.schemas.strategies import JSON, TEXT
from tests.support.stack import ROOT

GOOD = as_bytes([line("a"), line("b")])


def found(tmp_path: Path, raw: bytes, **limits: int) -> list[tuple[int | None, str]]:
    """Return the line and the rule of each problem."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(raw)
    return [(problem.line, problem.code) for problem in scan(file, **limits).problems]


def numbers(tmp_path: Path, raw: bytes) -> list[int]:
    """Return the numbers of the lines to run."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(raw)
    scanned = scan(file)
    assert scanned.problems == []
    return [each.number for each in scanned.lines]


# What does no harm


@pytest.mark.parametrize(
    ("raw", "lines"),
    [
        (GOOD, [1, 2]),
        (b"\xef\xbb\xbf" + GOOD, [1, 2]),
        (GOOD.replace(b"\n", b"\r\n"), [1, 2]),
        (b"\n \t\r\n" + GOOD.replace(b"\n", b"\n\n"), [3, 5]),
        (GOOD.removesuffix(b"\n"), [1, 2]),
        (b"  " + GOOD, [1, 2]),
        (as_bytes([line("Grüße 🚀 \u2028 x"), line("x" * 512)]), [1, 2]),
    ],
    ids=["as it should be", "BOM", "CRLF", "blank lines", "no line break at the end", "indented", "unicode"],
)
def test_what_does_no_harm_is_taken(tmp_path: Path, raw: bytes, lines: list[int]) -> None:
    assert numbers(tmp_path, raw) == lines


# What does


CASES: dict[str, tuple[bytes, list[tuple[int | None, str]]]] = {
    "duplicate": (
        as_bytes([line("a"), line("b"), line("a"), line("a")]),
        [(3, "duplicate_custom_id"), (4, "duplicate_custom_id")],
    ),
    "invalid UTF-8": (GOOD.replace(b"Hello", b"\xff"), [(1, "invalid_utf8"), (2, "invalid_utf8")]),
    "not JSON": (b"hello\n" + GOOD + b"{'a': 1}\n", [(1, "invalid_json"), (4, "invalid_json")]),
    "no object": (b'[]\n"a"\n1\nnull\n', [(k, "invalid_json") for k in range(1, 5)]),
    "NaN": (GOOD.replace(b'"messages"', b'"seed": NaN, "messages"'), [(1, "invalid_json"), (2, "invalid_json")]),
    "1e999": (GOOD.replace(b'"messages"', b'"seed": 1e999, "messages"'), [(1, "invalid_json"), (2, "invalid_json")]),
    "too deep": (b"[" * 100_000 + b"\n" + GOOD, [(1, "invalid_json")]),
    "deeper than a worker takes": (
        GOOD.replace(b'"messages"', b'"metadata": ' + b"[" * 200 + b"]" * 200 + b', "messages"'),
        [(1, "invalid_json"), (2, "invalid_json")],
    ),
    "endless digits": (b"1" * 5_000 + b"\n" + GOOD, [(1, "invalid_json")]),
    "truncated": (GOOD[:-10], [(2, "truncated_line")]),
    "truncated in a letter": (GOOD + '{"custom_id": "ü'.encode()[:-1], [(3, "truncated_line")]),
    "another method": (
        as_bytes([line("a", method="GET"), line("b", method=None)]),
        [(1, "invalid_method"), (2, "invalid_method")],
    ),
    "another url": (
        as_bytes([line("a", url="/v1/messages/count_tokens"), line("b", url=[])]),
        [(1, "invalid_url"), (2, "invalid_url")],
    ),
    "several urls": (
        as_bytes([line("a", url="/v1/embeddings"), line("b"), line("c", url="/v1/embeddings"), line("d")]),
        [(2, "mixed_urls"), (4, "mixed_urls")],
    ),
    "an unknown field": (as_bytes([line("a") | {"priority": 1}]), [(1, "unknown_field")]),
    "a missing field": (as_bytes([{"custom_id": "a"}, {}]), [(1, "missing_field"), (2, "missing_field")]),
    "a bad custom_id": (
        as_bytes([line(""), line("x" * 513), line("a") | {"custom_id": 7}, line("\ud83d")]),
        [(k, "invalid_custom_id") for k in range(1, 5)],
    ),
    "a bad body": (
        as_bytes([line("a", body=[]), line("b", body={}), line("c", messages=[]), line("d", n=2)]),
        [(k, "invalid_body") for k in range(1, 5)],
    ),
    "a bad model": (as_bytes([line("a", model=7)]), [(1, "invalid_model")]),
    "nothing": (b"", [(None, "empty_file")]),
    "nothing but blanks": (b"\n \n", [(None, "empty_file")]),
    "UTF-16": (GOOD.decode().encode("utf-16"), [(1, "invalid_utf8"), (2, "invalid_json"), (3, "truncated_line")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_bad_line_is_named_with_its_number_and_the_rule(tmp_path: Path, name: str) -> None:
    raw, problems = CASES[name]
    assert found(tmp_path, raw) == problems


def test_a_problem_says_in_a_sentence_what_would_be_right(tmp_path: Path) -> None:
    raw = as_bytes([line("a"), line("a"), line("b", url="/v1/completions"), line("c", url="/v1/responses")])
    (tmp_path / "in.jsonl").write_bytes(raw)
    first, second, third = scan(tmp_path / "in.jsonl").problems
    assert (first.param, first.message) == ("custom_id", "the custom_id is the same as in line 1.")
    assert (second.param, second.message) == (
        "url",
        'url must be /v1/chat/completions, /v1/responses, /v1/embeddings or /v1/messages, not "/v1/completions".',
    )
    assert (third.line, third.param, third.message) == (
        4,
        "url",
        "the url is /v1/responses, and that of the lines before is /v1/chat/completions: a file has one, so divide it.",
    )


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        ({"custom_id": "a"}, "missing_field", "there is no method, url or body."),
        ({"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}, "missing_field", "there is no body."),
        (
            {"id": "a", "method": "GET", "url": "/v1", "body": {"model": 7, "messages": [{}]}},
            "unknown_field",
            '"id" is not a field of a line; there is no custom_id; method must be "POST", not "GET"; url must be '
            '/v1/chat/completions, /v1/responses, /v1/embeddings or /v1/messages, not "/v1"; body.model must be a '
            "string, not 7.",
        ),
        ({**line("a"), **dict.fromkeys("pqrstu")}, "unknown_field", '"t" is not a field of a line; and 1 more.'),
        (
            line("", method="GET"),
            "invalid_custom_id",
            'custom_id must be a string of 1 to 512 characters, not ""; method must be "POST", not "GET".',
        ),
    ],
)
def test_all_that_is_wrong_with_a_line_is_in_one_sentence(
    tmp_path: Path, bad: dict[str, Any], code: str, message: str
) -> None:
    example = (
        ' A line looks like {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": '
        "[...]}}."
    )
    (problem,) = scan(write(tmp_path / "in.jsonl", bad)).problems
    is_shape = code in ("missing_field", "unknown_field")
    assert problem.code == code
    assert problem.message.endswith(message + example * is_shape)


def test_a_problem_is_short_however_long_what_is_wrong(tmp_path: Path) -> None:
    long = "x" * 100_000
    bad = [line(long), line("a") | {long: 1}, line("b", model=long), line("c", n=long)]
    (tmp_path / "in.jsonl").write_bytes(as_bytes([*bad, line("d", method=long), line("e", url=long)]))
    problems = scan(tmp_path / "in.jsonl", {}).problems
    assert len(problems) == 6
    assert max(len(problem.message) + len(problem.param or "") for problem in problems) < 350


def test_a_line_of_ten_megabytes_is_taken_and_one_that_no_worker_would_take_is_named(tmp_path: Path) -> None:
    long = [{"role": "user", "content": "x" * 10_000_000}]
    longer = [{"role": "user", "content": "x" * 16_000_000}]
    raw = as_bytes([line("a"), line("b", messages=long), line("c", messages=longer), line("d")])
    assert found(tmp_path, raw) == [(3, "line_too_long")]


def test_a_file_of_more_lines_or_bytes_than_are_taken_is_refused(tmp_path: Path) -> None:
    assert found(tmp_path, b"\n" + GOOD, max_lines=2) == []
    assert found(tmp_path, b"\n" + GOOD + b"\n{}\n{}\n", max_lines=2) == [(5, "too_many_lines")]
    assert found(tmp_path, b"{\n" * 9 + GOOD, max_lines=2) == [
        (1, "invalid_json"), (2, "invalid_json"), (3, "too_many_lines"),
    ], "bad lines count too, or reading 200 MB of them would take a quarter of an hour"  # fmt: skip
    assert found(tmp_path, GOOD, max_bytes=len(GOOD) - 1) == [(None, "file_too_large")]


def test_a_million_lines_are_too_many_if_they_are_blank(tmp_path: Path) -> None:
    assert found(tmp_path, b"\n" * 40 + GOOD, max_lines=2) == [(41, "too_many_lines")]
    assert found(tmp_path, b"\n" * 38 + GOOD, max_lines=2) == []


def test_a_file_has_a_hundred_models_at_most(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", *(line(f"r{k}", model=f"m{k % 101}") for k in range(202)))
    problems = [(problem.line, problem.code) for problem in scan(file, {}).problems]
    assert problems == [(101, "too_many_models"), (202, "too_many_models")]
    assert scan(file, {"m100": "m0"}).problems == []


def test_the_limits_are_those_of_openai() -> None:
    parameters = signature(Source.scan).parameters
    assert (parameters["max_lines"].default, parameters["max_bytes"].default) == (50_000, 200 * 1024 * 1024)


def test_beyond_a_thousand_problems_only_their_number_is_said(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b"{\n" * 2_500)
    named = scan(tmp_path / "in.jsonl").listed_problems()
    assert (len(named), named[999].line, named[-1].code) == (1_001, 1_000, "more_errors")
    assert named[-1].message == "1,500 more lines are invalid."


def test_the_page_on_batches_lists_every_rule_and_no_other() -> None:
    section = (ROOT / "docs" / "batches.md").read_text().partition("## Checks of an input file")[2]
    listed = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
    code = "".join((ROOT / "sluice" / "batch" / name).read_text() for name in ("lines.py", "source.py", "run.py"))
    raised = set(re.findall(r'(?:BadLine|Problem)\(\s*"(\w+)"', code)) - {"replaced"}  # by another run of the same file
    harmless = {"bom", "crlf", "blank_line"}
    assert listed == raised | harmless


@pytest.mark.parametrize("path", ["missing.jsonl", "."])
def test_what_is_no_file_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(BatchRefused, match="cannot read|not a regular file"):
        scan(tmp_path / path)


# Any damage


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    raw = bytearray(as_bytes([line(f"r{k}") for k in range(draw(st.integers(1, 5)))]))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        raw[at : at + draw(st.integers(0, 20))] = draw(st.binary(max_size=6) | st.sampled_from([b"\n", b"\r\n", b'"']))
    return bytes(raw)


@given(damaged() | st.binary(max_size=200))
def test_damage_never_crashes_the_reader_and_every_line_is_run_or_named(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    file = tmp_path_factory.mktemp("in") / "in.jsonl"
    file.write_bytes(raw)
    scanned = scan(file)
    lines = raw.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    there = [number for number, text in enumerate(lines, 1) if text.strip()]
    seen = sorted([each.number for each in scanned.lines] + [problem.line or 0 for problem in scanned.problems])
    assert seen == (there or [0])
    with Source(file, ANY) as opened:
        for each in scanned.lines:
            assert opened.request(each).custom_id == json.loads(lines[each.number - 1])["custom_id"]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "custom_id": TEXT | st.just("x" * 513) | JSON,
            "method": st.sampled_from(["POST", "post", "GET"]) | JSON,
            "url": st.sampled_from(["/v1/chat/completions", "/v1/embeddings"]) | JSON,
            "body": st.just({"messages": HELLO}) | JSON,
        },
    )
    | st.dictionaries(TEXT, JSON, max_size=5)
)
@example(line("a"))
@example(line("a") | {"more": 1})
def test_a_line_is_taken_where_the_contract_takes_it(said: dict[str, Any]) -> None:
    """Except for what a body needs in order to be queued, which the contract leaves to the request."""
    try:
        read_line(json.dumps(said).encode(), ANY)
    except BadLine as bad:
        if bad.code not in ("invalid_body", "invalid_model"):
            with pytest.raises(ValidationError):
                BatchLine.model_validate(said)
    else:
        BatchLine.model_validate(said)


# Models


@pytest.mark.parametrize(
    ("asked", "models", "served"),
    [
        (None, {}, "default"),
        (None, {"*": "tiny"}, "tiny"),
        ("qwen", {}, "qwen"),
        ("gpt-4o-mini", {"gpt-4o-mini": "tiny"}, "tiny"),
        ("gpt-4o-mini", {"gpt-4o-mini": "tiny", "*": "big"}, "tiny"),
        ("gpt-4o", {"gpt-4o-mini": "tiny", "*": "big"}, "big"),
        ("ft:gpt-4o:acme::1", {"*": "big"}, "big"),
    ],
)
def test_a_line_goes_to_the_model_that_its_name_is_mapped_to(
    asked: str | None, models: dict[str, str], served: str
) -> None:
    request = read_line(json.dumps(line("a", model=asked)).encode(), models)
    assert (request.model, request.as_job()["model"]) == (served, served)


def test_a_name_that_no_worker_can_have_is_a_bad_line_unless_it_is_mapped(tmp_path: Path) -> None:
    file = write(tmp_path / "in.jsonl", line("a", model="org/model"))
    assert [problem.code for problem in scan(file, {}).problems] == ["invalid_model"]
    assert scan(file, {"org/model": "tiny"}).problems == []


def test_nobody_listens_to_a_line_so_it_does_not_end_for_that() -> None:
    request = read_line(json.dumps(line("a", on_disconnect="cancel")).encode(), ANY)
    assert request.as_job()["on_disconnect"] == "continue"


# Reuse


def test_lines_that_begin_alike_are_neighbours_and_keep_their_order(tmp_path: Path) -> None:
    documents = ["alpha " * 300, "beta " * 3_000, "gamma " * 30]
    lines = [
        line(f"{k}", messages=[{"role": "user", "content": documents[k % 3] + f"Question {k}?"}]) for k in range(30)
    ]
    order = [each.number - 1 for each in sorted_for_reuse(scan(write(tmp_path / "in.jsonl", *lines)).lines)]
    groups = [k % 3 for k in order]
    assert sorted(order) == list(range(30))
    assert sum(groups[k] != groups[k + 1] for k in range(29)) == 2


def test_within_a_shared_instruction_those_with_the_same_document_are_neighbours(tmp_path: Path) -> None:
    def ask(k: int) -> dict[str, Any]:
        document = f"Document {k % 4}. " + f"{k % 4} " * 700
        return line(f"{k}", messages=[{"role": "system", "content": "Be brief. " * 40 + document}, *HELLO], seed=k)

    scanned = scan(write(tmp_path / "in.jsonl", *(ask(k) for k in range(20))))
    groups = [(each.number - 1) % 4 for each in sorted_for_reuse(scanned.lines)]
    assert sum(groups[k] != groups[k + 1] for k in range(19)) == 3


def test_lines_with_nothing_in_common_but_their_prompt_run_in_the_order_of_the_file(tmp_path: Path) -> None:
    scanned = scan(write(tmp_path / "in.jsonl", *(line(f"{k}") for k in range(50))))
    assert [each.number for each in sorted_for_reuse(scanned.lines)] == list(range(1, 51))
