"""Recorded arrivals."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from scripts.benchmarks.serve import trace
from scripts.benchmarks.serve.trace import BadTrace
from scripts.benchmarks.serve.workload import Chat, Turn

LINE: dict[str, Any] = {"at": 0, "prompt": "hello", "max_tokens": 4}


def replayed(*lines: dict[str, Any]) -> list[Chat]:
    entries = trace.parse(json.dumps(line) for line in lines)
    return trace.chats(entries, lambda tokens: tokens // 2, Random(0))


def test_a_line_is_a_chat_with_its_time_tenant_and_lane() -> None:
    assert replayed({**LINE, "at": 1.5, "tenant": "a", "lane": "batch"}) == [
        Chat((Turn("hello", 4, at_s=1.5),), "a", "batch")
    ]


def test_chats_come_in_the_order_of_their_times() -> None:
    assert [chat.at_s for chat in replayed({**LINE, "at": 3}, {**LINE, "at": 1}, {**LINE, "at": 2})] == [1, 2, 3]


def test_turns_of_a_chat_follow_one_another() -> None:
    second = {"at": 9, "prompt": "and then", "max_tokens": 5, "chat": "c", "turn": 2}
    [chat] = replayed(second, {**LINE, "chat": "c"})
    assert chat.turns == (Turn("hello", 4), Turn("and then", 5, at_s=9))


def test_a_number_of_prompt_tokens_becomes_a_text_of_as_many() -> None:
    [chat] = replayed({"at": 0, "prompt_tokens": 40, "max_tokens": 4})
    assert len(chat.turns[0].text.split()) == 20


@pytest.mark.parametrize(
    "line",
    [
        {**LINE, "at": -1},
        {**LINE, "at": None},
        {**LINE, "at": float("inf")},
        {**LINE, "max_tokens": 0},
        {**LINE, "max_tokens": 1.5},
        {**LINE, "max_tokens": True},
        {**LINE, "prompt": ""},
        {**LINE, "prompt_tokens": 5},
        {"at": 0, "max_tokens": 4},
        {**LINE, "lane": "fast"},
        {**LINE, "tenant": 7},
        {**LINE, "temperature": 1},
    ],
)
def test_a_line_that_cannot_be_replayed_is_refused_by_its_number(line: dict[str, Any]) -> None:
    with pytest.raises(BadTrace, match="^line 2: "):
        replayed(LINE, line)


@pytest.mark.parametrize("text", ["{", "[]", "7"])
def test_a_line_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(BadTrace):
        trace.parse([text])


def test_turns_are_numbered_without_gaps() -> None:
    with pytest.raises(BadTrace):
        replayed({**LINE, "chat": "c", "turn": 2})


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(BadTrace):
        trace.parse(["", "  "])


def test_a_file_is_read_and_a_missing_one_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{json.dumps(LINE)}\n\n{json.dumps(LINE)}\n")
    assert len(trace.read(file)) == 2
    with pytest.raises(BadTrace):
        trace.read(tmp_path / "none.jsonl")
