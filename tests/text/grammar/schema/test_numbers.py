"""Bounds of numbers are held exactly, or refused by name."""

import json
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.selection import examples
from tests.text.grammar.schema.answers import Schema, answers, takes
from worker.errors import JobFailure
from worker.text.grammar.sandbox import Uncompilable

INT64 = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
UINT64 = {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}
FLOATS = {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (INT64, [0, -1, 2**53 + 1, 2**63 - 1, -(2**63) + 1024], [2**63, -(2**63) - 1, 10**30, -(10**30)]),
        (UINT64, [0, 2**53 + 1, 2**63 - 1], [-1, 2**64, 10**30]),
        ({"type": "integer", "exclusiveMaximum": 2**63}, [2**63 - 1, -(10**30)], [2**63]),
        ({"type": "integer", "exclusiveMinimum": -(2**63) - 1}, [0, 10**30], [-(10**19)]),
        ({"type": "integer", "minimum": 10**18}, [10**18, 2**63 - 1], [10**18 - 1, 10**20]),
        ({"type": "integer", "maximum": -(10**18)}, [-(10**18)], [-(10**18) + 1, 0]),
        ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**53}, [2**53 - 1], [2**53]),
        ({"type": "integer", "exclusiveMinimum": 0.5, "maximum": 2.5}, [1, 2], [0, 3]),
        ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, [4], [3]),
        (FLOATS, [0, -1.5, 10**15, 9 * 10**18], []),
        ({"type": "number", "maximum": 2**53}, [2**53], [2**53 + 1]),
        ({"maximum": 2**63}, [1, 9 * 10**18], [10**19]),
        ({"enum": [2**53 + 2, 10**18]}, [2**53 + 2, 10**18], [2**53 + 1, 10**18 + 1]),
        ({"type": ["integer", "null"], "maximum": 2**63 - 1}, [2**63 - 1], [2**63]),
    ],
    ids=str,
)
def test_a_bound_beyond_what_doubles_hold_is_held(schema: Schema, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        Draft202012Validator({} if "exclusiveMinimum" in schema else schema).validate(value)
        assert takes(schema, json.dumps(value)), value
    for value in bad:
        assert not takes(schema, json.dumps(value)), value


@pytest.mark.parametrize("bound", [{"minimum": 0}, {"maximum": 0}, {"exclusiveMinimum": -1.5}, {"maximum": 2**63}])
def test_a_number_with_one_bound_is_within_a_double(bound: Schema) -> None:
    sign = "-" if "maximum" in bound else ""
    assert takes({"type": "number", **bound}, f"{sign}{10**18}.5")
    for digits in ("9" * 309 + ".5", "9" * 400):
        assert not takes({"type": "number", **bound}, sign + digits)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "integer", "maximum": 2**53 + 1}, "#/maximum"),
        ({"type": "integer", "minimum": -(2**53) - 1}, "#/minimum"),
        ({"type": "integer", "exclusiveMaximum": 2**60}, "#/exclusiveMaximum"),
        ({"type": "integer", "exclusiveMinimum": 2**60}, "#/exclusiveMinimum"),
        ({"type": "integer", "minimum": 2**63}, "#/minimum"),
        ({"type": "integer", "maximum": -(2**64)}, "#/maximum"),
        ({"type": "integer", "minimum": 2**63 - 1}, "#/minimum"),
        ({"type": "integer", "maximum": -(2**63)}, "#/maximum"),
        ({"type": "number", "maximum": 2**60}, "#/maximum"),
        ({"type": "number", "exclusiveMaximum": 2**54}, "#/exclusiveMaximum"),
        ({"type": "number", "minimum": 1e300}, "#/minimum"),
        ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "#/minimum"),
        ({"minimum": 3, "maximum": 2}, "#/minimum"),
        ({"minimum": "3"}, "#/minimum"),
        ({"minimum": float("nan")}, "#/minimum"),
        ({"maximum": float("inf")}, "#/maximum"),
        ({"multipleOf": 2**32}, "#/multipleOf"),
        ({"multipleOf": 0}, "#/multipleOf"),
        ({"multipleOf": -3}, "#/multipleOf"),
        ({"multipleOf": 1.23456789123}, "#/multipleOf"),
        ({"multipleOf": True}, "#/multipleOf"),
        ({"allOf": [{"multipleOf": 65536}, {"multipleOf": 65537}]}, "#/allOf/1/multipleOf"),
        ({"const": 2**53 + 1}, "#/const"),
        ({"const": 1e300}, "#/const"),
        ({"enum": [1, -(2**63)]}, "#/enum"),
        ({"properties": {"a": {"items": {"maximum": 2**54 + 1}}}}, "#/properties/a/items/maximum"),
    ],
    ids=str,
)
def test_what_cannot_be_held_is_refused_where_it_stands(schema: Schema, place: str) -> None:
    with pytest.raises(JobFailure) as refused:
        takes(schema, "1")
    assert refused.value.type == "invalid_request"
    assert refused.value.message.startswith(f"response_format: {place}: ")
    assert "; " in refused.value.message


NEAR = [0, 1, 7, -3, 2**31 - 1, 2**53, -(2**53), 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**18, 2**60, 2**54, -(10**17)]
BOUND = st.builds(lambda near, by: near + by, st.sampled_from(NEAR), st.sampled_from([0, 0, 0, 1, -1, 1024, 0.5]))
BOUNDED = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "integer", "number", ["integer", "null"]])},
    optional={
        "minimum": BOUND,
        "maximum": BOUND,
        "exclusiveMinimum": BOUND,
        "exclusiveMaximum": BOUND,
        "multipleOf": st.sampled_from([2, 7, 1000]),
    },
)


@settings(deadline=None, max_examples=examples(100))
@given(schema=BOUNDED, other=st.one_of(st.none(), BOUNDED), seed=st.integers(0, 99))
def test_whatever_bounds_allow_satisfies_them(schema: Schema, other: Schema | None, seed: int) -> None:
    schema = schema if other is None else {"allOf": [schema, other]}
    try:
        written = answers(schema, 4, seed)
    except (JobFailure, Uncompilable):
        return
    for text in written:
        Draft202012Validator(schema).validate(json.loads(text, parse_float=Decimal))


@settings(deadline=None, max_examples=examples(100))
@given(
    values=st.lists(st.one_of(st.integers(-(2**64), 2**64), st.floats(), st.sampled_from(NEAR)), min_size=1, max_size=3)
)
def test_a_listed_number_is_written_as_it_is(values: list[Any]) -> None:
    try:
        written = answers({"enum": values}, 3)
    except (JobFailure, Uncompilable):
        return
    for text in written:
        assert json.loads(text) in values
