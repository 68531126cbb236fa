"""Each form of a parameter, written and read back in each dialect."""

from typing import Any

import pytest

from tests.text.dialects.reading import BY_NAME, read
from worker.text.dialects.values import Parameters

DEFS = {"city": {"type": "string"}, "count": {"type": ["integer", "null"]}, "any": {"$ref": "#/$defs/any"}}
_STR, _INT = {"type": "string"}, {"type": "integer"}
# A schema and a value of it.
FORMS: dict[str, tuple[Any, Any]] = {
    "string": (_STR, "Oslo"),
    "empty": (_STR, ""),
    "leading and trailing blanks": (_STR, "  Oslo \t"),
    "line ends at both ends": (_STR, "\n\nOslo\n"),
    "carriage return": (_STR, "a\r\nb"),
    "unicode": (_STR, "Ærø 東京 🙂\u2028"),
    "string like a number": (_STR, "7"),
    "string like a float": (_STR, "1e5"),
    "string like null": (_STR, "null"),
    "string like a boolean": (_STR, "True"),
    "string like JSON": (_STR, '{"a": [1]}'),
    "string like a list": (_STR, "[1, 2]"),
    "string in quotes": (_STR, '"Oslo"'),
    "string of quotes": (_STR, "it's \"so\" '''x'''"),
    "backslashes": (_STR, r"C:\new\d+ \" \\"),
    "tags": (_STR, "<b>x</b> <a href='y'> & </"),
    "markdown": (_STR, "```json\n{}\n```"),
    "format": ({"type": "string", "format": "date"}, "2026-11-28"),
    "integer": (_INT, 7),
    "negative": (_INT, -7),
    "integer beyond 2^53": (_INT, 2**63 + 1),
    "number": ({"type": "number"}, 1.5),
    "whole number": ({"type": "number"}, 7),
    "number with an exponent": ({"type": "number"}, 1.5e300),
    "true": ({"type": "boolean"}, True),
    "false": ({"type": "boolean"}, False),
    "null": ({"type": "null"}, None),
    "list": ({"type": "array", "items": _STR}, ["a", " b ", ""]),
    "empty list": ({"type": "array"}, []),
    "list of any": ({"type": "array"}, ["a", 1, None, True, [2.5, {}]]),
    "object": ({"type": "object", "properties": {"x": _INT}}, {"x": 1}),
    "empty object": ({"type": "object"}, {}),
    "nested": ({"type": "object"}, {"a": {"b": [{"c": None, "d": "x\ny"}]}}),
    "additional properties": ({"type": "object", "additionalProperties": _INT}, {"a": 1, "b": 2}),
    "list of types, a string": ({"type": ["string", "null"]}, "Oslo"),
    "list of types, null": ({"type": ["string", "null"]}, None),
    "list of types, an integer": ({"type": ["integer", "string"]}, 7),
    "nullable": ({"type": "integer", "nullable": True}, None),
    "anyOf, null": ({"anyOf": [_STR, {"type": "null"}]}, None),
    "anyOf, a list": ({"anyOf": [_STR, {"type": "array"}]}, ["a"]),
    "oneOf": ({"oneOf": [_INT, {"type": "boolean"}]}, True),
    "allOf": ({"allOf": [_INT, {"minimum": 1}]}, 7),
    "reference": ({"$ref": "#/$defs/city"}, "7"),
    "reference to types": ({"$ref": "#/$defs/count"}, 7),
    "reference in a circle": ({"$ref": "#/$defs/any"}, "Oslo"),
    "enum of strings": ({"enum": ["7", "null"]}, "7"),
    "enum of numbers": ({"enum": [1, 2]}, 2),
    "mixed enum": ({"enum": ["a", 1, None]}, None),
    "mixed enum, a string": ({"enum": ["1", 2]}, "1"),
    "constant": ({"const": "true"}, "true"),
    "no type, a string": ({}, "Oslo"),
    "no type, a list": ({}, ["a", 1]),
    "no type but items": ({"items": _STR}, ["a"]),
    "no type but a minimum": ({"minimum": 0}, 7),
    "a type as Python calls it": ({"type": "int"}, 7),
    "true for a schema": (True, "Oslo"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_parameter_of_each_form_is_read_as_it_was_written(name: str, form: str) -> None:
    schema, value = FORMS[form]
    parameters = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}, "$defs": DEFS}
    calls = [("weather", {"a": value, "b": 1}), ("weather", {"b": 2, "a": value}), ("weather", {"a": value})]
    written = BY_NAME[name].write(calls)
    for pieces in (written, list(written)):
        answer = read(name, pieces, functions={"weather": Parameters(parameters)})
        assert [(function, _exact(given)) for function, given in answer.calls] == [
            (function, _exact(given)) for function, given in calls
        ]


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_string_may_hold_each_marker_of_its_dialect(name: str) -> None:
    dialect = BY_NAME[name]
    for marker in (*dialect.openings, dialect.closing):
        calls = [("weather", {"a": f"a{marker}b", "b": 1})]
        schema = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
        answer = read(name, dialect.write(calls), functions={"weather": Parameters(schema)})
        assert answer.calls == calls, marker


@pytest.mark.parametrize(("schema", "value"), [({"type": "integer"}, 7), ({"type": "string"}, "7"), (None, "7")])
def test_a_parameter_without_a_name_of_its_own_has_the_schema_of_the_others(schema: Any, value: Any) -> None:
    parameters = {"type": "object", "additionalProperties": schema if schema else True}
    written = BY_NAME["qwen3_coder"].write([("weather", {"a": value})])
    answer = read("qwen3_coder", written, functions={"weather": Parameters(parameters)})
    assert answer.calls == [("weather", {"a": value})]


def _exact(value: Any) -> Any:
    """Return the value so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {name: _exact(each) for name, each in value.items()}
    return [_exact(each) for each in value] if isinstance(value, list) else (type(value), value)
