"""What cannot be enforced of a function's schema is left out, and nothing else."""

from copy import deepcopy

import pytest

from tests.text.grammar.schema.answers import Schema
from worker.text.grammar.schema.rewrite import names_alone, relaxed, rewrite
from worker.text.grammar.schema.unsupported import UnsupportedKeyword

TEXT: Schema = {"type": "string", "maxLength": 5}


@pytest.mark.parametrize(
    ("schema", "left", "places"),
    [
        ({"properties": {"a": TEXT}}, {"properties": {"a": TEXT}}, []),
        (
            {"properties": {"a": {**TEXT, "format": "x"}, "b": {"items": {**TEXT, "format": "y"}}}},
            {"properties": {"a": TEXT, "b": {"items": TEXT}}},
            ["#/properties/a/format"],
        ),
        (
            {"properties": {"a/b": {**TEXT, "pattern": "(?=a)"}}},
            {"properties": {"a/b": TEXT}},
            ["#/properties/a/b/pattern"],
        ),
        (
            {"properties": {"format": {"not": {}}, "not": TEXT}, "default": {"not": 1}},
            {"properties": {"format": {}, "not": TEXT}, "default": {"not": 1}},
            ["#/properties/format/not"],
        ),
        ({"properties": {"a": 5, "b": TEXT}}, {"properties": {"a": {}, "b": TEXT}}, ["#/properties/a"]),
        ({"anyOf": [TEXT, 5]}, {"anyOf": [TEXT, {}]}, ["#/anyOf/1"]),
        (
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
            {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "number"}]}}},
            ["#/properties/a/oneOf"],
        ),
        (
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {**TEXT, "type": "str"}}},
            {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"maxLength": 5}}},
            ["#/$defs/b/type"],
        ),
        ({"required": "a", "properties": {"a": TEXT}}, {"properties": {"a": TEXT}}, ["#/required"]),
        (
            {"if": {"properties": {"a": {"pattern": "^a"}}}, "then": {"required": ["b"]}},
            {"then": {"required": ["b"]}},
            ["#/if"],
        ),
        ({"anyOf": [{"$ref": "#"}, TEXT]}, {"anyOf": [{}, TEXT]}, ["#/anyOf/0/$ref"]),
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_left_out_at_its_place(schema: Schema, left: Schema, places: list[str]) -> None:
    given = deepcopy(schema)
    found, left_out = relaxed(schema, strict=False)
    assert (found, [each.partition(": ")[0] for each in left_out]) == (left, places)
    assert schema == given
    rewrite(found)


def test_of_a_strict_function_unknown_formats_alone_are_left_out() -> None:
    assert relaxed({"properties": {"a": {**TEXT, "format": "x"}}}, strict=True)[0] == {"properties": {"a": TEXT}}
    with pytest.raises(UnsupportedKeyword):
        relaxed({"properties": {"a": {**TEXT, "format": "x", "pattern": "(?=a)"}}}, strict=True)


def test_a_schema_of_too_much_is_not_relaxed() -> None:
    with pytest.raises(UnsupportedKeyword):
        relaxed({"properties": {f"p{i}": 5 for i in range(50)}}, strict=False)


def test_names_alone_are_held() -> None:
    schema = {"type": "object", "properties": {"a": 5, "b": {"type": "x"}}, "required": ["b", "c", 1]}
    assert names_alone(schema) == {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]}
    assert names_alone({"properties": 5}) == {"type": "object", "properties": {}, "required": []}
