"""Names of properties: by pattern, and by `propertyNames`."""

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.selection import examples
from tests.text.grammar.schema.answers import Schema, answers, takes
from tests.text.grammar.schema.test_patterns import PATTERNS
from worker.errors import JobFailure
from worker.text.grammar.sandbox import Uncompilable

LOWER: Schema = {"pattern": "^[a-z]+$"}

HELD: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "a pattern": ({"propertyNames": LOWER}, [{}, {"ab": 1}], [{"A": 1}, {"a": 1, "1": 2}]),
    "a pattern, and values": (
        {"propertyNames": LOWER, "additionalProperties": {"type": "integer"}},
        [{"ab": 1}],
        [{"ab": "x"}, {"A": 1}],
    ),
    "a pattern beside properties": (
        {"properties": {"a": {"type": "string"}, "B": {}}, "propertyNames": LOWER},
        [{"a": "x", "c": 1}],
        [{"a": 1}, {"B": 1}],
    ),
    "a pattern of closed objects": (
        {"properties": {"a": {}, "B": {}}, "additionalProperties": False, "propertyNames": LOWER},
        [{"a": "x"}, {}],
        [{"B": 1}],
    ),
    "a list": ({"propertyNames": {"enum": ["a", "b"]}}, [{}, {"a": 1}, {"a": 1, "b": 2}], [{"c": 1}]),
    "a list, and values": (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}, "required": ["b"]},
        [{"b": None}],
        [{"a": None}, {"b": 1}],
    ),
    "a list beside patterns": (
        {"propertyNames": {"enum": ["a", "b1"]}, "patternProperties": {"[0-9]": {"type": "integer"}}},
        [{"a": "x"}, {"b1": 1}],
        [{"b1": "x"}, {"c": 1}],
    ),
    "a list beside properties and patterns": (
        {
            "propertyNames": {"enum": ["foo", "bar"]},
            "properties": {"foo": {"type": "integer"}},
            "patternProperties": {"^f": {"minimum": 10, "maximum": 12}, "o$": {"multipleOf": 2}},
            "additionalProperties": {"type": "null"},
        },
        [{"foo": 10}, {"bar": None}],
        [{"foo": 8}, {"foo": 11}, {"bar": 1}, {"f": 10}],
    ),
    "one name beside a property and a pattern": (
        {"propertyNames": {"const": "foo"}, "properties": {"foo": {"type": ["string", "null"]}},
         "patternProperties": {"^f": {"minLength": 2}}},
        [{"foo": "ab"}, {"foo": None}],
        [{"foo": "a"}, {"bar": 1}],
    ),
    "one name": ({"propertyNames": {"const": "a"}}, [{"a": 1}], [{"b": 1}]),
    "lengths": ({"propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}, {"äöü": 1}], [{"a": 1}, {"abcd": 1}]),
    "a list of some length": ({"propertyNames": {"enum": ["a", "bc"], "minLength": 2}}, [{"bc": 1}], [{"a": 1}]),
    "a definition": (
        {"propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"type": "string", **LOWER}}},
        [{"ab": 1}],
        [{"A": 1}],
    ),
    "any string": ({"propertyNames": {"type": "string", "title": "Name"}}, [{"A": 1}], []),
    "none": ({"propertyNames": False}, [{}], [{"a": 1}]),
    "patterns": (
        {"patternProperties": {"^x": {"type": "integer"}, "^y": {"type": "string"}}, "additionalProperties": False},
        [{"x1": 1, "y": "a"}],
        [{"x": "a"}, {"z": 1}],
    ),
    "a pattern without quotes": (
        {"patternProperties": {'^[^"]*$': {}}, "additionalProperties": False},
        [{"a": 1}],
        [{'"': 1}],
    ),
    "patterns and the rest": (
        {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
        [{"x": 1, "a": "b"}],
        [{"x": "a"}, {"a": 1}],
    ),
    "digits of all scripts": (
        {"patternProperties": {r"^\d$": {"type": "integer"}}},
        [{"1": 1, "x": "a"}],
        [{"1": "a"}, {"\u0665": "a"}],
    ),
    "digits alone": ({"patternProperties": {r"^\d$": {}}, "additionalProperties": False}, [{"1": 1}], [{"\u0665": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_names_are_held(name: str) -> None:
    schema, good, bad = {"type": "object", **HELD[name][0]}, *HELD[name][1:]
    for value in good:
        Draft202012Validator(schema).validate(value)
        assert takes(schema, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not takes(schema, json.dumps(value, ensure_ascii=False)), value
    for text in answers(schema, 10):
        Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"propertyNames": {"format": "date"}}, "#/propertyNames/format"),
        ({"propertyNames": {"anyOf": [LOWER]}}, "#/propertyNames/anyOf"),
        ({"propertyNames": {**LOWER, "minLength": 2}}, "#/propertyNames"),
        ({"propertyNames": {"pattern": "["}}, "#/propertyNames/pattern"),
        ({"propertyNames": LOWER, "patternProperties": {"^a": {}}}, "#/propertyNames"),
        (
            {"propertyNames": LOWER, "properties": {"a": {}}, "additionalProperties": {"type": "null"}},
            "#/propertyNames",
        ),
        ({"patternProperties": {r"^\w$": {}}, "additionalProperties": {"type": "null"}}, "#/patternProperties"),
        ({"patternProperties": {"[": {}}}, "#/patternProperties"),
        ({"patternProperties": [1]}, "#/patternProperties"),
        (
            {"properties": {"é": {}}, "patternProperties": {r"^\w$": {}}, "additionalProperties": False},
            "#/patternProperties",
        ),
    ],
    ids=str,
)
def test_names_that_cannot_be_held_are_refused_where_they_stand(schema: Schema, place: str) -> None:
    with pytest.raises(JobFailure) as refused:
        takes({"type": "object", **schema}, "{}")
    assert refused.value.message.startswith(f"response_format: {place}: ")


@settings(deadline=None, max_examples=examples(30))
@given(pattern=PATTERNS, closed=st.booleans(), other=PATTERNS, seed=st.integers(0, 99))
def test_whatever_name_is_allowed_matches_or_has_what_the_rest_has(
    pattern: str, closed: bool, other: str, seed: int
) -> None:
    assume(pattern != other)
    schema: Schema = {"type": "object", "patternProperties": {pattern: {"const": 1}, other: {"const": 2}}}
    schema |= {"additionalProperties": False} if closed else {}
    try:
        written = answers(schema, 3, seed, max_bytes=24)
    except (JobFailure, Uncompilable):
        return
    for text in written:
        for name, value in json.loads(text).items():
            assert (value == 1 and not re.search(other, name)) if re.search(pattern, name) else value == 2 or not closed
