from typing import Any

import pytest

from schemas import ChatRequest
from worker.chat.recorder import faulty_calls, warnings_of

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


NO_OBJECT = ("no_json_object", "tool_calls: the arguments of 'now' are no JSON object.")
SEND = {"name": "send", "parameters": {"type": "object", "required": ["to", "text"], "properties": {}}}


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([call("send", '{"to": "ann", "text": "Hi"}'), call("now", "{}"), call("now", "")], []),
        ([call("sned", "{}")], [("unknown_function", "tool_calls: the function 'sned' is not among the tools.")]),
        (
            [call("send", '{"to": "ann"}')],
            [("missing_argument", "tool_calls: the call of 'send' has no 'text', which is required.")],
        ),
        ([call("now", '{"a"')], [NO_OBJECT]),
        ([call("now", "[1]")] * 2, [NO_OBJECT] * 2),
        ([call("now", "[" * 100_000)], [NO_OBJECT]),
    ],
)
def test_a_result_names_the_faults_of_calls(calls: list[dict[str, Any]], said: list[tuple[str, str]]) -> None:
    asked = ChatRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], "tools": [*TOOLS, {"type": "function", "function": SEND}]}
    )
    for given, is_cut_off in ((calls, False), ([*calls, call("now", "{")], True)):
        found = faulty_calls(asked, given, is_cut_off=is_cut_off)
        assert found == said
