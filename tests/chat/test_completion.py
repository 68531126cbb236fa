from typing import Any

import pytest

from schemas import ChatRequest
from worker.chat.completion import warnings_of

TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize(
    ("fields", "parses_tools", "left_out_calls", "fields_named"),
    [
        ({"tools": TOOLS}, True, False, []),
        ({"tools": TOOLS}, False, False, ["tools"]),
        ({}, False, False, []),
        ({"tools": TOOLS, "tool_choice": "none"}, False, False, []),
        ({"tools": TOOLS, "tool_choice": "none"}, True, True, ["tool_choice"]),
    ],
)
def test_a_result_warns_of_calls_that_are_not_read_or_left_out(
    fields: dict[str, Any], parses_tools: bool, left_out_calls: bool, fields_named: list[str]
) -> None:
    asked = ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})
    warnings = warnings_of(asked, parses_tools=parses_tools, left_out_calls=left_out_calls)
    assert [warning.partition(":")[0] for warning in warnings] == fields_named
