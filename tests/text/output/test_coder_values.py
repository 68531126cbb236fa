"""Parameters of several types come as what their text means."""

from typing import Any

import pytest

from worker.text.output.coder_values import read, with_strings

COUNT = {"type": "integer"}


def tools(schema: Any) -> list[dict[str, Any]]:
    parameters = {"properties": {"a": schema, "b": {"type": "integer"}}, "$defs": {"count": COUNT}}
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"anyOf": [COUNT, {"type": "null"}]}, "5", 5),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, "5", 5),
        ({"$ref": "#/$defs/count"}, "5", 5),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "[1]", "[1]"),
        ({"type": ["string", "boolean"]}, "true", True),
        ({"type": ["integer", "string"]}, "1.5", "1.5"),
        ({"type": ["integer", "string"]}, "9" * 5_000, "9" * 5_000),
        ({"type": ["number", "string"]}, "NaN", "NaN"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": 5}, "5", "5"),
        ({"$ref": "#/$defs/none"}, "5", "5"),
        ({"$ref": "#/$defs/none"}, "[5]", [5]),
    ],
)
def test_a_text_is_read_by_the_types_of_its_parameter(schema: Any, text: str, value: Any) -> None:
    read_call = read({"name": "f", "arguments": {"a": text, "b": 1, "c": "5"}}, tools(schema))
    assert read_call == {"name": "f", "arguments": {"a": value, "b": 1, "c": "5"}}
    assert type(read_call["arguments"]["a"]) is type(value)
    (told,) = with_strings(tools(schema))
    assert told["function"]["parameters"]["properties"] == {"a": {"type": "string"}, "b": {"type": "integer"}}


@pytest.mark.parametrize("schema", [COUNT, {"type": "string"}, {}, True, {"enum": ["a"]}])
def test_a_parameter_of_one_type_is_left_to_the_parser(schema: Any) -> None:
    assert with_strings(tools(schema)) == tools(schema)
    call = {"name": "f", "arguments": {"a": "5"}}
    assert read(call, tools(schema)) == call


def test_references_in_a_circle_end() -> None:
    circle = {"$ref": "#/$defs/x"}
    parameters = {"properties": {"a": circle}, "$defs": {"x": circle}}
    asked = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert read({"name": "f", "arguments": {"a": "5"}}, asked)["arguments"] == {"a": "5"}
