"""Random combinations of schemas, and a check of their answers by two validators."""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jsonschema_rs
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from llguidance import LLMatcher

from tests.text.grammar.schema.answers import Schema, answer, matcher
from worker.errors import JobFailure
from worker.text.grammar.sandbox import Uncompilable

NAMES = ("foo", "bar", "a", "fo", "quux")
_SIMPLE: list[Any] = [
    True, False, {}, {"type": "integer"}, {"minimum": 10}, {"minimum": 10, "maximum": 12}, {"maximum": 9},
    {"const": 8}, {"enum": [8, "a"]}, {"type": "string"}, {"type": ["string", "null"]}, {"minLength": 2},
    {"pattern": "^a"}, {"type": "object"}, {"type": "array"}, {"multipleOf": 4},
]  # fmt: skip
_FOR_NAMES: list[Any] = [
    True, False, {"enum": ["foo", "bar"]}, {"enum": ["foo", "bar", 3]}, {"const": "foo"}, {"pattern": "^f"},
    {"pattern": "o"}, {"maxLength": 3}, {"minLength": 2}, {"type": "string"}, {"$ref": "#/$defs/N"},
    {"allOf": [{"enum": ["foo", "bar", "a"]}, {"pattern": "^.o"}]},
]  # fmt: skip
_VALUES: list[Any] = [8, 11, 2.5, "a", "ab", None, True, [], {}]
INSTANCES: list[Any] = [
    *_VALUES, "", "b", "aab", 0, 4, 10, 10.5, 12, -1,
    *([one] for one in _VALUES), *([one, other] for one in (8, 11, "a") for other in (8, "a")), [8, 8, 8],
    *({name: value} for name in NAMES for value in _VALUES),
    *({a: x, b: y} for a, b in (("foo", "bar"), ("bar", "foo"), ("foo", "a"), ("fo", "foo"))
      for x in (8, 11, "a") for y in (8, 11, None)),
    {"foo": 8, "bar": 11, "a": "a"}, {"foo": {"foo": 8}}, {"bar": {"foo": 8, "bar": 11}}, {"foo": {"bar": "a"}},
]  # fmt: skip

# Returns the value of a keyword. The function that it is given returns a schema.
_Keyword = Callable[[random.Random, Callable[[], Any]], Any]
_KEYWORDS: dict[str, _Keyword] = {
    "properties": lambda dice, inner: {dice.choice(NAMES): inner() for _ in range(dice.randint(0, 3))},
    "patternProperties": lambda dice, inner: {
        dice.choice(("^f", "o$", "^b", "^.$", "^foo$", ".")): inner() for _ in range(dice.randint(1, 2))
    },
    "additionalProperties": lambda dice, inner: inner(),
    "propertyNames": lambda dice, inner: dice.choice(_FOR_NAMES),
    "required": lambda dice, inner: dice.sample(NAMES[:3], dice.randint(0, 2)),
    "type": lambda dice, inner: dice.choice(
        ["object", "object", "array", "string", "integer", "number", ["object", "null"], ["integer", "string"]]
    ),
    "minProperties": lambda dice, inner: dice.randint(0, 2),
    "maxProperties": lambda dice, inner: dice.randint(0, 3),
    "dependentRequired": lambda dice, inner: {dice.choice(NAMES): dice.sample(NAMES[:3], dice.randint(0, 2))},
    "dependentSchemas": lambda dice, inner: {dice.choice(NAMES): inner()},
    "items": lambda dice, inner: inner(),
    "prefixItems": lambda dice, inner: [inner() for _ in range(dice.randint(1, 2))],
    "minItems": lambda dice, inner: dice.randint(0, 2),
    "maxItems": lambda dice, inner: dice.randint(0, 2),
    "minLength": lambda dice, inner: dice.randint(0, 2),
    "maxLength": lambda dice, inner: dice.randint(0, 2),
    "pattern": lambda dice, inner: dice.choice(["^a", "b", "^.{1,2}$", "^$|^a+$"]),
    "minimum": lambda dice, inner: dice.choice([0, 8, 10.5]),
    "exclusiveMaximum": lambda dice, inner: dice.choice([8, 11, 12]),
    "multipleOf": lambda dice, inner: dice.choice([1, 4, 2.5]),
    "enum": lambda dice, inner: dice.sample(INSTANCES, 4),
    "const": lambda dice, inner: dice.choice(INSTANCES),
    "allOf": lambda dice, inner: [inner(), inner()],
    "anyOf": lambda dice, inner: [inner(), inner()],
    "oneOf": lambda dice, inner: [inner(), inner()],
    "if": lambda dice, inner: inner(),
    "then": lambda dice, inner: inner(),
    "else": lambda dice, inner: inner(),
    "$ref": lambda dice, inner: dice.choice(["#/$defs/A", "#/$defs/B"]),
}
_NUMBER_OF_MANY_DIGITS = re.compile(r"[0-9.]{16}")
_DEPTH = 2  # of combinations within combinations
_ABOUT_NAMES = 5  # the first keywords, which come three times as often


def of_names(dice: random.Random) -> Schema:
    """Return an object's keywords about names side by side, with simple schemas within."""
    drawn = dice.sample([*_KEYWORDS][:_ABOUT_NAMES], dice.randint(2, 4))
    found = {keyword: _KEYWORDS[keyword](dice, lambda: dice.choice(_SIMPLE)) for keyword in drawn}
    return {"type": "object", **found, "$defs": {"N": {"enum": ["foo", "bar"]}}}


def of_keywords(dice: random.Random) -> Schema:
    """Return two to five keywords side by side, with schemas like that within."""
    found = _of_keywords(dice, 2, dice.randint(2, 5))
    if dice.random() < 0.6:
        found.setdefault("type", "object")
    if '"$ref"' in json.dumps(found):
        names = [each for each in _FOR_NAMES if isinstance(each, dict) and "$ref" not in each]
        found["$defs"] = {"A": _inner(dice, 1), "B": _inner(dice, 1), "N": dice.choice(names)}
    return found


def _of_keywords(dice: random.Random, depth: int, count: int) -> Schema:
    weights = [3 if place < _ABOUT_NAMES else 1 for place in range(len(_KEYWORDS))]
    drawn = dict.fromkeys(dice.choices([*_KEYWORDS], weights, k=count))
    return {keyword: _KEYWORDS[keyword](dice, lambda: _inner(dice, depth)) for keyword in drawn}


def _inner(dice: random.Random, depth: int) -> Any:
    if depth and dice.random() < 0.35:
        return _of_keywords(dice, depth - 1, dice.randint(1, 3))
    return dice.choice(_SIMPLE)


def of_parts(parts: Sequence[Schema], dice: random.Random, depth: int = _DEPTH) -> Schema:
    """Return a schema that combines some of the parts."""
    a, b, c = (
        of_parts(parts, dice, depth - 1) if depth and dice.random() < 0.2 else _some(dice.choice(parts), dice)
        for _ in range(3)
    )
    name = dice.choice(NAMES)
    ways: list[Callable[[], Schema]] = [
        lambda: {"allOf": [a, b]},
        lambda: {**a, "allOf": [b]},
        lambda: {"anyOf": [a, b]},
        lambda: {**a, "anyOf": [b, c]},
        lambda: {"oneOf": [a, b]},
        lambda: {**c, "oneOf": [a, b]},
        lambda: {**a, **b},
        lambda: {**a, **b, **c},
        lambda: {"if": a, "then": b, **c},
        lambda: {"if": a, "then": b, "else": c},
        lambda: {"type": "object", "propertyNames": a, **b},
        lambda: {"type": "object", "patternProperties": {dice.choice(("^f", "a", "^.{3}$", ".")): a, "^ba": c}, **b},
        lambda: {"type": "object", "properties": {name: a, "bar": b}, "required": [name], "additionalProperties": c},
        lambda: {**a, "dependentSchemas": {name: b}},
        lambda: {"type": "array", "prefixItems": [a], "items": b, "minItems": 1, "maxItems": 2},
        lambda: {"$ref": "#/$defs/A", "$defs": {"A": a}, **b},
    ]
    return dice.choice(ways if depth == _DEPTH else ways[:-1])()  # the last has a reference to its own root


def _some(part: Schema, dice: random.Random) -> Schema:
    """Return the part, or some of its keywords."""
    return part if dice.random() < 0.6 else {keyword: part[keyword] for keyword in part if dice.random() < 0.6}


def of_2020_12(schema: Any) -> Any:
    """Return a schema of an earlier draft by the keywords of 2020-12, the only ones that both validators have."""
    if isinstance(schema, list):
        return [of_2020_12(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    data = ("const", "enum", "default", "examples")
    found: Schema = {
        keyword: value if keyword in data else of_2020_12(value)
        for keyword, value in schema.items()
        if keyword not in ("$schema", "$id", "id")
    }
    if isinstance(found.get("items"), list):
        found["prefixItems"] = found.pop("items")
        if "additionalItems" in found:
            found["items"] = found["additionalItems"]
    found.pop("additionalItems", None)
    if isinstance(dependencies := found.pop("dependencies", {}), dict):
        for name, needs in dependencies.items():
            found.setdefault("dependentRequired" if isinstance(needs, list) else "dependentSchemas", {})[name] = needs
    for bound, excluded in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if found.get(excluded) is True and bound in found:
            found[excluded] = found.pop(bound)
        elif isinstance(found.get(excluded), bool):
            del found[excluded]
    return found


def compiled(schema: Schema) -> LLMatcher | None:
    """Return None for a schema that is refused."""
    try:
        return matcher(schema)
    except (JobFailure, Uncompilable):
        return None


def takes(found: LLMatcher, text: str) -> bool:
    """True if all of the text is allowed, and may be the end."""
    found.reset()
    written = [*text.encode()]
    return found.validate_tokens(written) == len(written) and found.consume_tokens(written) and found.is_accepting()


def wrong_answer(schema: Schema, found: LLMatcher, instances: Sequence[Any], dice: random.Random) -> str | None:
    """Return an answer that the grammar allows and a validator does not, or None. The answers are random ones, and
    those of the instances that the grammar allows."""
    drawn = [written for _ in range(3) if (written := answer(found, dice, 120)) is not None]
    allowed = [text for each in instances if takes(found, text := json.dumps(each, ensure_ascii=False))]
    validators = _Exact(schema), jsonschema_rs.Draft202012Validator(schema)
    for text in [*drawn, *allowed]:
        value = json.loads(text)
        if _NUMBER_OF_MANY_DIGITS.search(text):  # test_numbers.py has them: the validators read them differently
            continue
        if not all(validator.is_valid(value) for validator in validators):
            return text
    return None


def _multiple(validator: Any, factor: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[ValidationError]:
    """Compare decimals: jsonschema divides floats, by which 0.6 is no multiple of 0.0001."""
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and Fraction(repr(value)) % Fraction(repr(factor))
    ):
        yield ValidationError(f"{value} is not a multiple of {factor}")


_Exact = extend(Draft202012Validator, {"multipleOf": _multiple})
