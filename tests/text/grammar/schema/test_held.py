"""A schema is held whole or refused with a sentence of ours, whatever it is."""

import json
import re
import time
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.selection import examples
from tests.text.grammar.schema.answers import Schema, answers, matcher, takes
from tests.text.grammar.schema.test_choices import SCHEMAS
from tests.text.grammar.schema.test_patterns import PATTERNS
from worker.errors import JobFailure
from worker.text.grammar.lark import Grammar
from worker.text.grammar.sandbox import Uncompilable
from worker.text.grammar.schema.formats import FORMATS
from worker.text.grammar.schema.rewrite import rewrite
from worker.text.grammar.schema.unsupported import UnsupportedKeyword
from worker.text.grammar.trial import grammar_error


def complaint(schema: Any) -> str | None:
    """Return what a client is told."""
    try:
        matcher(schema)
    except JobFailure as refusal:
        return refusal.message
    except Uncompilable as error:
        return grammar_error(str(error))
    return None


SMALL = st.one_of(
    SCHEMAS,
    st.builds(
        lambda pattern, maximum: {"type": "string", "pattern": pattern, "maxLength": maximum},
        PATTERNS,
        st.integers(0, 9),
    ),
    st.builds(lambda format: {"type": "string", "format": format}, st.sampled_from(FORMATS)),
    st.builds(
        lambda maximum: {"type": "integer", "minimum": -5, "maximum": maximum},
        st.sampled_from([7, 2**53, 2**63 - 1, 2**64]),
    ),
    st.sampled_from([{"$ref": "#/$defs/first"}, {"$ref": "#/$defs/second"}, {"$ref": "#"}]),
)


def _around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from("abc"), unique=True, max_size=2)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), inner, max_size=3)},
        optional={
            "required": names,
            "additionalProperties": st.sampled_from([False, True, {"type": "integer"}]),
            "propertyNames": st.sampled_from([{"pattern": "^[a-c]"}, {"enum": ["a", "d"]}, {"maxLength": 1}]),
            "patternProperties": st.fixed_dictionaries({r"^z\d": inner}),
            "minProperties": st.integers(0, 2),
            "dependentRequired": st.dictionaries(st.sampled_from("ab"), names, max_size=1),
            "dependentSchemas": st.dictionaries(st.sampled_from("ab"), inner, max_size=1),
            "unknown": st.just({"minimum": 2**60}),
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "maxItems": st.integers(0, 3)},
        optional={"items": inner, "prefixItems": st.lists(inner, max_size=2), "minItems": st.integers(0, 1)},
    )
    older = st.builds(lambda first, rest: {"items": first, "additionalItems": rest}, st.lists(inner, max_size=2), inner)
    return st.one_of(
        objects, objects, arrays, older, st.builds(lambda one, other: {"allOf": [one, other]}, inner, inner)
    )


DEFINITIONS = st.fixed_dictionaries({"first": SMALL, "second": SCHEMAS})
WHOLE = st.builds(
    lambda schema, definitions: {**schema, "$defs": definitions} if isinstance(schema, dict) else {},
    st.recursive(SMALL, _around, max_leaves=5),
    DEFINITIONS,
)


@settings(deadline=None, max_examples=examples(80))
@given(schema=WHOLE, seed=st.integers(0, 99))
def test_a_schema_is_held_whole_or_refused(schema: Schema, seed: int) -> None:
    try:
        written = answers(schema, 2, seed)
    except (JobFailure, Uncompilable):
        return
    for text in written:
        read = json.loads(text)
        older = "additionalItems" in json.dumps(schema)  # which the validator no longer knows
        assert older or Draft202012Validator(schema).is_valid(read), text


KEYWORDS = (
    "type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "minProperties",
    "maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "items", "prefixItems",
    "additionalItems", "minItems", "maxItems", "contains", "uniqueItems", "unevaluatedProperties", "pattern", "format",
    "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "allOf",
    "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "$defs", "definitions", "$id", "$anchor", "$schema",
    "$dynamicRef", "x-guidance", "deprecated", "title", "nonsense",
)  # fmt: skip
ODD = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=4), PATTERNS,
        st.sampled_from(["string", "object", "integer", "#", "#/$defs/a", "#/properties/a", "x#", "a\ud800", "\x00"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from([*KEYWORDS, "a", "b"]), inner, max_size=4),
        st.dictionaries(st.sampled_from([*KEYWORDS, "a", "b"]), inner, max_size=4),
    ),
    max_leaves=12,
)  # fmt: skip
_INTERNAL = re.compile(
    r"[a-z]+_[a-z]+|[A-Z][a-z]+[A-Z][a-z]+|coerce|Extension|guidance|lexer|Lark|Expected|Unimplemented|derivre|::"
)


@settings(deadline=None, max_examples=examples(60))
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), ODD, max_size=5))
@example(schema={"$ref": "#"})
@example(schema={"oneOf": [{"type": "integer"}, {"type": "number"}]})
@example(schema={"type": "string", "enum": [1]})
@example(schema={"properties": {"a": {}, "b": {}}, "maxProperties": 1})
def test_whatever_is_wrong_is_said_in_our_own_words(schema: Schema) -> None:
    message = complaint(schema)
    if message is not None:
        assert not _INTERNAL.search(message.removeprefix("response_format")), message
        assert len(message) < 400
        assert message.isprintable()


def test_an_unknown_complaint_is_not_repeated() -> None:
    assert "thread panicked" not in grammar_error("thread panicked at src/x.rs: RegexAst::Not")
    assert grammar_error("thread panicked").endswith(".")


@pytest.mark.parametrize("format", FORMATS)
def test_the_formats_are_those_that_can_be_held(format: str) -> None:
    assert matcher({"type": "string", "format": format})


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"items": [{"type": "integer"}], "additionalItems": False, "type": "array"}, ["[1]"], ['["a"]', "[1, 2]"]),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "prefixItems": [{"type": "null"}]},
            ["[null]"],
            ["[1]"],
        ),
        ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        ({"type": "array", "maxItems": 2**31 - 1, "items": {"type": "integer"}}, ["[1]"], ["[null]"]),
        ({"type": "string", "maxLength": 2**63 - 1}, ['"a"'], []),
        ({"type": "integer", "format": "int64", "pattern": "(?=a)"}, ["1"], ['"a"']),
        ({"type": "string", "deprecated": True, "unknown": {"type": 5}}, ['"a"'], ["1"]),
        ({"x-guidance": {"lenient": True}, "type": "integer"}, ["1"], ['"a"']),
        (
            {"components": {"schemas": {"A B": {"type": "integer"}}}, "$ref": "#/components/schemas/A%20B"},
            ["1"],
            ['"a"'],
        ),
        ({"$defs": {"x": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, ["null"], ["1"]),
        (
            {"$id": "https://a.org/b", "$ref": "https://a.org/b#/$defs/x", "$defs": {"x": {"type": "null"}}},
            ["null"],
            ["1"],
        ),
        (
            {
                "type": "object", "additionalProperties": False,
                "properties": {"child": {"$ref": "#"}, "n": {"type": "integer"}},
            },
            ['{"child": {"child": {"n": 1}}}'],
            ['{"child": {"n": "a"}}', '{"child": 1}'],
        ),
        ({"definitions": {"a/b": {"type": "null"}}, "anyOf": [{"$ref": "#/definitions/a~1b"}]}, ["null"], ["1"]),
    ],
    ids=str,
)  # fmt: skip
def test_earlier_drafts_and_references_are_held(schema: Schema, good: list[str], bad: list[str]) -> None:
    for text in good:
        assert takes(schema, text), text
    for text in bad:
        assert not takes(schema, text), text


def nested(depth: int) -> Schema:
    """Conditions in each other, of which each doubles what is within."""
    inner: Schema = {"type": "integer"}
    for level in range(depth):
        name = f"p{level}"
        inner = {
            "type": "object",
            "properties": {"k": {"enum": [1, 2]}, name: inner},
            "dependentSchemas": {"k": {"properties": {name: inner}}},
        }
    return inner


def alternately(depth: int) -> Schema:
    """Alternatives in each other, which every way to contradict them repeats."""
    inner: Schema = {"anyOf": [{"minimum": 1}, {"allOf": [{"maximum": 2}, {"maximum": 3}]}]}
    for _ in range(depth):
        inner = {"anyOf": [inner, {"maximum": 4}, inner]}
    return inner


HEAVY: dict[str, Schema] = {
    "conditions in conditions": nested(12),
    "conditions side by side": {"dependentRequired": {f"p{i}": [f"q{i}"] for i in range(2000)}},
    "many alternatives": {"oneOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(5000)]},
    "long lists": {"oneOf": [{"enum": [*range(i, i + 200)]} for i in range(200)]},
    "a long pattern": {"pattern": "(" * 30 + "a?" * 900 + ")*" * 30},
    "many classes": {"pattern": r"[^\w]" * 700},
    "many patterns": {"properties": {f"p{i}": {"pattern": rf"^\W{{{i}}}$"} for i in range(3000)}},
    "names and a pattern": {
        "propertyNames": {"pattern": "^((a?b?)*c?)*$"},
        "properties": {f"{'ab' * 20}{i}": {} for i in range(5000)},
    },
    "circles": {
        "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(5000)}, "$ref": "#/$defs/d0",
    },
    "oneOf beside a long allOf": {"oneOf": [{}] * 14_900, "allOf": [{}] * 14_900},
    "alternatives beside a long allOf": {
        "oneOf": [{"required": [f"p{i}"]} for i in range(3000)], "allOf": [{"title": str(i)} for i in range(3000)],
    },
    "conditions beside a long allOf": {
        "allOf": [{"if": {"properties": {"a": {"const": i}}}, "then": {"minimum": 1}} for i in range(8000)],
        "properties": {"a": {"enum": [*range(8000)]}},
    },
    "names of a condition and a long allOf": {
        "if": {"properties": {f"p{i}": {"const": 1} for i in range(6000)}, "required": ["p1"]},
        "then": {"minimum": 1},
        "allOf": [{"properties": {f"p{i}": {"enum": [1, 2]}}} for i in range(6000)],
    },
    "opposites of opposites": {"if": alternately(7), "then": {"minimum": 1}},
    "required names": {
        "oneOf": [{"required": [f"p{i}" for i in range(1000)], "title": str(i)} for i in range(60)],
        "allOf": [{"properties": {"a": {}}}] * 1000,
    },
    "many characters and a disputed pattern": {
        "properties": {f"{i}{'é' * 200}": {} for i in range(5000)},
        "patternProperties": {r"^\w$": {}},
        "additionalProperties": False,
    },
    "many names listed": {"propertyNames": {"enum": [f"p{i}" for i in range(14_000)]}},
    "names that share a schema": {
        "propertyNames": {"enum": [f"p{i}" for i in range(4000)]}, "additionalProperties": {"enum": ["x" * 20] * 4000},
    },
    "numbers of one hash": {"oneOf": [{"enum": [i * (2**61 - 1) for i in range(12_000)]}, {"enum": ["a"]}]},
    "values that cases repeat": {
        "dependentSchemas": {f"p{i}": {"properties": {"z": {"enum": [*range(9000)]}}} for i in range(5)},
    },
    "a long name with much in it": {
        "properties": {"k" * 500_000: {"properties": {f"p{i}": {} for i in range(15_000)}}},
    },
    "many multiples": {"prefixItems": [{"multipleOf": 1 + i / 8} for i in range(20_000)], "allOf": [{}]},
    "many anchors": {
        "patternProperties": {f"(^a|^b){'x' * 3000}{i}": {} for i in range(100)},
    },
    "anyOf of anyOf": {"oneOf": [{"anyOf": [{"minimum": i + j} for j in range(30)]} for i in range(30)]},
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (number % 2)) for number, name in enumerate(HEAVY)]
)
def test_what_a_schema_costs_is_bounded(name: str) -> None:
    begun = time.process_time()
    grammar = Grammar({})
    with suppress(JobFailure):
        grammar.starting_with(grammar.json(HEAVY[name], "response_format"))
    assert time.process_time() - begun < 2.5


def test_a_schema_of_many_comparisons_takes_little_memory() -> None:
    tracemalloc.start()
    with pytest.raises(UnsupportedKeyword):
        rewrite(HEAVY["oneOf beside a long allOf"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50_000_000


def test_a_schema_nested_too_deeply_is_refused_not_followed() -> None:
    schema: Any = {"type": "integer"}
    for _ in range(3_000):
        schema = {"items": schema}
    with pytest.raises(UnsupportedKeyword):
        rewrite(schema)
