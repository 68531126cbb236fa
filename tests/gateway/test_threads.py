"""Long texts leave the event loop, short ones stay, and a text's length is found without reading all of it."""

import json
import threading
from typing import Any

import pytest

from sluice.gateway.body import in_thread_if_long, is_long, json_response, to_json


@pytest.mark.parametrize(
    ("value", "long"),
    [
        (None, False),
        ("x" * 65_536, False),
        ("x" * 65_537, True),
        ({"a": ["x" * 40_000, {"b": "y" * 40_000}]}, True),
        ({"x" * 70_000: 1}, True),
        ([1] * 1_000, False),
        ([1] * 1_001, True),
        (({"a": 1},) * 600, True),
        ({str(number): 1 for number in range(2_000)}, True),
    ],
)
def test_a_value_is_long_by_its_text_and_its_parts(value: Any, long: bool) -> None:
    assert is_long(value) == long


async def test_only_work_on_a_long_text_is_done_in_a_thread() -> None:
    names = [await in_thread_if_long(length, lambda: threading.current_thread().name) for length in (10, 100_000)]
    assert names[0] == threading.current_thread().name
    assert names[1].startswith("sluice-text")


@pytest.mark.parametrize("value", [{"a": "\ud83d"}, {"a": "x" * 100_000}, [{"b": 1}] * 2_000])
async def test_a_response_is_the_value_whichever_thread_writes_it(value: Any) -> None:
    assert json.loads(await to_json(value)) == value
    answer = await json_response(value, {"x-request-id": "a"})
    assert (json.loads(bytes(answer.body)), answer.headers["x-request-id"]) == (value, "a")
