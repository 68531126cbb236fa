"""The status object: OpenAI's types can read it."""

import json
from dataclasses import asdict, replace

import pytest
from openai.types import Batch as Theirs
from pydantic import TypeAdapter

import schemas
from sluice.batch.files import LineError, LineResult
from sluice.batch.source import parse_window
from sluice.contract.batch import (
    NO_LINES,
    Batch,
    BatchDetails,
    BatchUsage,
    InputTokens,
    LineDetails,
    OutcomeCounts,
    OutputTokens,
    Problem,
    Problems,
    RequestCounts,
    SlowLine,
)

FRESH = Batch(
    id="batch_1",
    input_file_id="in.jsonl",
    completion_window="24h",
    status="validating",
    created_at=5,
    request_counts=NO_LINES,
)
FULL = replace(
    FRESH,
    model="default",
    status="failed",
    errors=Problems((Problem("invalid_url", "no", 3, "url"), Problem("empty_file", "none"))),
    output_file_id="/out.jsonl",
    error_file_id="/out.errors.jsonl",
    in_progress_at=6,
    request_counts=RequestCounts(5, 3, 2),
    usage=BatchUsage(9, 6, 15, InputTokens(4), OutputTokens(0)),
    metadata={"a": "b"},
    sluice=BatchDetails(
        "mac-1",
        1.5,
        {"default": 5},
        1,
        {"internal": 2},
        kinds={"cut": OutcomeCounts(1, 2, 3, 4, 0.5)},
        slowest=(SlowLine("a", 1.5, 3),),
        retry={"cut": 2},
        rerun_at=7,
    ),
)


@pytest.mark.parametrize("batch", [FRESH, FULL])
def test_what_is_written_is_read_with_the_same_values(batch: Batch) -> None:
    assert Batch.from_json(batch.to_json()) == batch
    assert TypeAdapter(schemas.Batch).validate_json(batch.to_json()) == batch


def test_what_a_later_version_adds_is_left_out() -> None:
    said = json.loads(FULL.to_json())
    said["mood"] = said["sluice"]["mood"] = said["usage"]["mood"] = "good"
    assert Batch.from_json(json.dumps(said)) == FULL


@pytest.mark.parametrize("batch", [FRESH, FULL])
def test_openai_s_own_type_reads_it(batch: Batch) -> None:
    read = Theirs.model_validate_json(batch.to_json(), strict=True)
    assert read.request_counts is not None
    assert read.usage is not None
    assert (read.id, read.status, read.model) == (batch.id, batch.status, batch.model)
    assert asdict(batch.request_counts) == read.request_counts.model_dump()
    assert asdict(batch.usage) == read.usage.model_dump()
    assert (read.errors.model_dump() if read.errors else None) == (
        json.loads(json.dumps(asdict(batch.errors))) if batch.errors else None
    )


@pytest.mark.parametrize(
    "ended",
    [
        LineResult("batch_1-1", "a", result=b'{"object": "x"}'),
        LineResult("batch_1-1", "a", error=LineError("c", "m")),
        LineResult("batch_1-1", "a", error=LineError("c", "m", 400, b"{}")),
        LineResult("batch_1-1", "a", error=LineError("c", "m"), details=LineDetails("failed")),
        LineResult("batch_1-1", "a", b"{}", details=LineDetails("cut", "length", 1.5, 0.5, 9, 4, 3, 2)),
    ],
)
def test_a_line_of_the_output_is_one_of_the_contract(ended: LineResult) -> None:
    read = schemas.BatchOutput.model_validate_json(ended.as_line())
    assert json.loads(read.model_dump_json(exclude_unset=True)) == json.loads(ended.as_line())


def test_a_state_is_entered_with_its_time() -> None:
    entered = FRESH.enter("in_progress", 7.9)
    assert (entered.status, entered.in_progress_at, entered.ended) == ("in_progress", 7, False)
    assert FRESH.enter("expired", 8).ended


@pytest.mark.parametrize(("text", "seconds"), [("24h", 86_400), ("90m", 5_400), ("1s", 1), ("7d", 604_800)])
def test_a_completion_window_is_a_number_of_a_unit(text: str, seconds: int) -> None:
    assert parse_window(text) == seconds


@pytest.mark.parametrize("text", ["", "24", "h", "0h", "1.5h", "24 h", "24H", "-1h", "٣h", "24h\n", "9999999999d"])
def test_anything_else_is_no_completion_window(text: str) -> None:
    with pytest.raises(ValueError, match="such as 24h"):
        parse_window(text)
