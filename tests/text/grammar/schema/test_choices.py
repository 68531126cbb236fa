"""Alternatives that exclude each other, and conditions, are held as alternatives; the rest is refused by name."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.selection import examples
from tests.text.grammar.schema.answers import Schema, answers, takes
from worker.errors import JobFailure
from worker.text.grammar.sandbox import Uncompilable
from worker.text.grammar.schema.disjoint import Disjointness


def kind(value: Any, **more: Any) -> Schema:
    """An object whose `kind` has one value."""
    return {"type": "object", "properties": {"kind": {"const": value}, **more}, "required": ["kind"]}


def one_of(*alternatives: Any, **beside: Any) -> Schema:
    return {"oneOf": [*alternatives], **beside}


STATES: Schema = {
    "type": "object",
    "properties": {"state": {"enum": ["open", "paid", "gone"]}, "sum": {"type": "integer"}, "why": {"type": "string"}},
    "required": ["state"],
    "additionalProperties": False,
}
PAID: Schema = {"properties": {"state": {"const": "paid"}}}
DEFINED: Schema = {"a": kind("a", x={"type": "integer"}), "b": kind("b", x={"type": "string"})}

HELD: dict[str, tuple[Schema, list[Any], list[Any]]] = {
    "types": (one_of({"type": "integer"}, {"type": "string"}, {"type": "null"}), [1, "a", None], [True, []]),
    "constants": (one_of({"const": 1, "title": "One"}, {"const": "1"}, {"const": True}), [1, "1", True], [2]),
    "lists": (one_of({"enum": [1, 2, 3]}, {"enum": [3, 4]}), [1, 4], [3, 5]),
    "a boolean each": (one_of({"const": True}, {"enum": [False, None]}), [True, None], [1]),
    "ranges": (one_of({"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 4}), [3, 4], []),
    "open ranges": (one_of({"type": "number", "exclusiveMaximum": 3}, {"type": "number", "minimum": 3}), [2.5, 3], []),
    "lengths": (one_of({"type": "string", "maxLength": 2}, {"type": "string", "minLength": 3}), ["ab", "abc"], []),
    "sizes": (
        one_of({"maxItems": 1}, {"minItems": 2}, type="array", items={"type": "integer"}),
        [[1], [1, 2]],
        [["a"]],
    ),
    "a discriminator": (
        one_of(kind("a", x={"type": "integer"}), kind("b", x={"type": "string"})),
        [{"kind": "a", "x": 1}, {"kind": "b", "x": "y"}],
        [{"kind": "a", "x": "y"}, {"kind": "c"}, {}],
    ),
    "its type beside": (
        one_of(
            {"properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            {"properties": {"kind": {"const": "b"}}, "required": ["kind"]},
            type="object",
        ),
        [{"kind": "a"}, {"kind": "b"}],
        [{"kind": "c"}, "x"],
    ),
    "definitions": (
        {**one_of({"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}), "$defs": DEFINED},
        [{"kind": "a", "x": 1}, {"kind": "b", "x": "y"}],
        [{"kind": "a", "x": "y"}],
    ),
    "an optional one": (
        {"properties": {"pet": one_of({"$ref": "#/$defs/a"}, {"type": "null"})}, "type": "object", "$defs": DEFINED},
        [{"pet": None}, {"pet": {"kind": "a"}}, {}],
        [{"pet": 1}],
    ),
    "either property": (
        one_of({"required": ["a"]}, {"required": ["b"]}, type="object", properties={"a": {}, "b": {}, "c": {}}),
        [{"a": 1}, {"b": 1, "c": 1}],
        [{}, {"a": 1, "b": 1}, {"c": 1}],
    ),
    "closed objects": (
        one_of(
            {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False},
            {"type": "object", "properties": {"b": {}}, "required": ["b"], "additionalProperties": False},
        ),
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "b": 1}],
    ),
    "beside anyOf": (
        {
            "type": ["integer", "null"],
            "anyOf": [{"type": "integer"}, {"type": "null"}],
            "oneOf": [{"maximum": 0, "type": "integer"}, {"minimum": 1, "type": "integer"}],
        },
        [0, 1],
        [None],
    ),
    "one alone": (one_of({"type": "integer"}), [1], ["a"]),
    "needed": (
        {"type": "object", "properties": {"card": {}, "code": {}, "x": {}}, "dependentRequired": {"card": ["code"]}},
        [{}, {"code": 1}, {"card": 1, "code": 1}, {"x": 1}],
        [{"card": 1}, {"card": 1, "x": 1}],
    ),
    "needed both ways": (
        {
            "type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False,
            "dependentRequired": {"a": ["b"], "b": ["a"]},
        },
        [{}, {"a": 1, "b": 1}],
        [{"a": 1}, {"b": 1}],
    ),
    "needed by an earlier draft": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependencies": {"a": ["b"]}},
        [{"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "what depends": (
        {
            "type": "object", "properties": {"a": {}, "b": {}},
            "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}, "required": ["b"]}},
        },
        [{"b": "x"}, {"a": 1, "b": 1}],
        [{"a": 1}, {"a": 1, "b": "x"}],
    ),
    "of any type": ({"dependentRequired": {"a": ["b"]}}, ["x", [], {"b": 1}, {"a": 1, "b": 2}], [{"a": 1}]),
    "if, then, else": (
        {**STATES, "if": PAID, "then": {"required": ["sum"]}, "else": {"properties": {"sum": False}}},
        [{"state": "paid", "sum": 1}, {"state": "open"}, {"state": "gone", "why": "x"}],
        [{"state": "paid"}, {"state": "open", "sum": 1}],
    ),
    "if without else": (
        {**STATES, "if": PAID, "then": {"required": ["sum"]}},
        [{"state": "paid", "sum": 1}, {"state": "open"}, {"state": "open", "sum": 1}],
        [{"state": "paid"}],
    ),
    "a condition for each": (
        {
            **STATES,
            "allOf": [
                {"if": PAID, "then": {"required": ["sum"]}},
                {"if": {"properties": {"state": {"const": "gone"}}}, "then": {"required": ["why"]}},
            ],
        },
        [{"state": "open"}, {"state": "paid", "sum": 1}, {"state": "gone", "why": "x"}],
        [{"state": "paid"}, {"state": "gone", "sum": 1}],
    ),
    "a condition on presence": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        [{}, {"b": 1}, {"a": 1, "b": 1}],
        [{"a": 1}],
    ),
    "a condition on a number": (
        {
            "type": "object", "properties": {"n": {"type": "integer"}, "big": {"type": "boolean"}}, "required": ["n"],
            "if": {"properties": {"n": {"minimum": 10}}}, "then": {"required": ["big"]},
        },
        [{"n": 9}, {"n": 10, "big": True}],
        [{"n": 10}],
    ),
    "a condition on a boolean": (
        {
            "type": "object", "properties": {"on": {"type": "boolean"}, "at": {"type": "string"}}, "required": ["on"],
            "if": {"properties": {"on": {"const": True}}, "required": ["on"]}, "then": {"required": ["at"]},
        },
        [{"on": False}, {"on": True, "at": "x"}],
        [{"on": True}],
    ),
    "then without if": ({"type": "integer", "then": {"type": "string"}, "else": False}, [1], ["a"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_alternatives_and_conditions_are_held(name: str) -> None:
    schema, good, bad = HELD[name]
    dependencies = {"dependentRequired": schema["dependencies"]} if "dependencies" in schema else {}
    validator = Draft202012Validator({**schema, **dependencies})
    for value in good:
        assert validator.is_valid(value)
        assert takes(schema, json.dumps(value)), value
    for value in bad:
        assert not validator.is_valid(value)
        assert not takes(schema, json.dumps(value)), value
    for text in answers(schema, 10):
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (one_of({"type": "integer"}, {"type": "number"}), "#/oneOf"),
        (one_of({"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}), "#/oneOf"),
        (one_of({"required": ["a"]}, {"required": ["a", "b"]}, type="object"), "#/oneOf"),
        (one_of({"enum": [1]}, {"enum": [1]}), "#/oneOf"),
        (one_of({}, {"type": "string"}), "#/oneOf"),
        (one_of(), "#/oneOf"),
        (one_of(*({"pattern": f"{i}"} for i in range(100))), "#/oneOf"),
        ({"properties": {"a": {"oneOf": 5}}}, "#/properties/a/oneOf"),
        ({"if": {"pattern": "x"}, "then": {"type": "string"}}, "#/if"),
        ({"if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}, "type": "object"}, "#/if"),
        ({"allOf": [{"if": {"contains": {}}, "else": False}]}, "#/allOf/0/if"),
        ({"dependentRequired": []}, "#/dependentRequired"),
        ({"dependentRequired": {"a": [1]}}, "#/dependentRequired/a"),
        ({"dependentRequired": {f"p{i}": [f"q{i}"] for i in range(9)}}, "#/dependentRequired/p"),
        ({"not": {"type": "string"}}, "#/not"),
    ],
    ids=str,
)
def test_what_may_hold_at_once_or_has_no_opposite_is_refused_where_it_stands(schema: Schema, place: str) -> None:
    with pytest.raises(JobFailure) as refused:
        takes(schema, "1")
    assert refused.value.type == "invalid_request"
    assert refused.value.message.startswith(f"response_format: {place}")
    assert "; " in refused.value.message


def test_many_alternatives_with_a_discriminator_are_told_apart_at_once() -> None:
    schema = one_of(*(kind(f"k{i}", x={"const": i}) for i in range(500)))
    assert takes(schema, '{"kind": "k321", "x": 321}')
    assert not takes(schema, '{"kind": "k321", "x": 322}')


VALUES = st.sampled_from(
    [None, True, False, 0, 1, 2, 1.0, 2.5, -3, "", "a", "bb", [], [1], ["a", 2], {}, {"a": 1}, {"a": "b", "b": 1}]
)
LEAVES = st.one_of(
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4)),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={key: st.integers(-3, 3) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")},
    ),
    st.fixed_dictionaries(
        {"type": st.just("string")}, optional={"minLength": st.integers(0, 2), "maxLength": st.integers(0, 3)}
    ),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {"type": ["string", "null"]}, {}, True, False]),
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from("abc"), unique=True, max_size=2)
    properties = st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    typed = st.sampled_from([{"type": "object"}, {"type": "object"}, {}])
    closed = st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}])
    objects = st.builds(
        lambda base, properties, names, rest: {**base, "properties": properties, "required": names, **rest},
        typed, properties, names, closed,
    )  # fmt: skip
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={"minItems": st.integers(0, 2), "maxItems": st.integers(0, 3)},
    )
    several = st.lists(inner, min_size=1, max_size=3)
    combined = st.builds(
        lambda keyword, schemas: {keyword: schemas}, st.sampled_from(["oneOf", "oneOf", "anyOf", "allOf"]), several
    )
    conditions = st.fixed_dictionaries({"if": inner, "then": inner}, optional={"else": inner})
    needs = st.builds(
        lambda said: {"dependentRequired": said}, st.dictionaries(st.sampled_from("abc"), names, max_size=2)
    )
    within = st.builds(lambda one, other: {**one, **other}, objects, st.one_of(conditions, needs, combined))
    return st.one_of(objects, objects, arrays, combined, within)


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=6)


@settings(deadline=None, max_examples=examples(80))
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_whatever_alternatives_and_conditions_allow_satisfies_them(schema: Any, seed: int) -> None:
    if not isinstance(schema, dict):
        return
    try:
        written = answers(schema, 3, seed)
    except (JobFailure, Uncompilable):
        return
    for text in written:
        Draft202012Validator(schema).validate(json.loads(text))


@settings(deadline=None, max_examples=examples(100))
@given(
    first=SCHEMAS, second=SCHEMAS, value=st.one_of(VALUES, st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3))
)
def test_what_is_proved_to_exclude_has_no_value_in_common(first: Any, second: Any, value: Any) -> None:
    if Disjointness(lambda reference: True).excluded([first, second]):
        assert not (Draft202012Validator(first).is_valid(value) and Draft202012Validator(second).is_valid(value))
