"""A grammar for llguidance, as it is written: rules in its dialect of Lark, and the JSON schemas that they name."""

import json
import re
from collections.abc import Callable
from typing import Any

from worker.errors import Refusal

Schema = dict[str, Any]

# Where JSON may have space: as people and programs write it, and no more, since a weak model never leaves off.
_SPACE = r" {1,2}|\n {0,40}|\n\t{0,10}"
# Without \u, which can spell a property's name in a way that its schema does not know.
_HOW = {"whitespace_pattern": _SPACE, "json_allowed_escapes": r"nrbtf\""}
_UNWRITABLE = re.compile(r"[^\b\f\n\r\t -~\x80-\U0010ffff]")
_EXACT = 2**53
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_NEARBY = 1e-9
_DATA = ("const", "enum", "default", "examples")
_NAMES = ("properties", "patternProperties", "$defs", "definitions")  # of schemas, by names of the client's
_LONGEST = 500_000  # characters: llguidance reads so many in some 20 ms, in which nothing else runs


class Grammar:
    """Rules go by the names that the methods return."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._rules, self._schemas = list[str](), list[Schema]()

    def rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, terminal: str, until: str) -> str:
        """What the terminal allows, up to and with the first `until`."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={literal(until)}]: {self.terminal(terminal)}")
        return name

    def json(self, schema: Schema) -> str:
        if "x-guidance" in schema:
            raise Refusal("invalid_request", "x-guidance in a schema is the worker's own; leave it out.")
        name = f"s{len(self._schemas)}"
        self._schemas.append({"name": name, "json_schema": {**_sound(schema), "x-guidance": _HOW}})
        return f"@{name}"

    def marker(self, text: str) -> str:
        """Where the vocabulary has a token for it, that token alone."""
        tokens = self._encode(text)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 else literal(text)

    def starting_with(self, rule: str) -> str:
        """The whole of it, as llguidance takes it."""
        rules = "\n".join([f"start: {rule}", *self._rules])
        text = json.dumps({"grammars": [{"lark_grammar": rules}, *self._schemas]})
        if (over := len(text) - _LONGEST) > 0:
            raise Refusal("too_large", f"The request's schemas are {over:,} characters too long to be held to.")
        return text


def literal(text: str) -> str:
    return json.dumps(text)


def spaced(pattern: str) -> str:
    """A regular expression whose spaces stand for what JSON may have there."""
    return "/" + pattern.replace(" ", f"(?:{_SPACE})?") + "/"


def _sound(schema: Schema) -> Schema:
    """Without what llguidance (1.9.1) takes and does not hold to."""
    if type(least := schema.get("minProperties")) is int and least > 1:
        raise Refusal("invalid_request", "minProperties above 1 cannot be held to: a property may come twice.")
    return {keyword: _sound_within(keyword, value) for keyword, value in (schema | _sound_bounds(schema)).items()}


def _sound_within(keyword: str, value: Any) -> Any:
    """A reference may point anywhere, so an unknown keyword may hold a schema, too."""
    if keyword in ("const", "enum", "required"):
        _check_writable(value)
    match value:
        case dict() if keyword in _NAMES:
            _check_writable([*value])
            return {name: _sound_within("", each) for name, each in value.items()}
        case dict() if keyword not in _DATA:
            return _sound(value)
        case list() if keyword not in _DATA:
            return [_sound_within("", each) for each in value]
    return value


def _check_writable(value: Any) -> None:
    """llguidance leaves out the characters that only \\u can write, and rounds as floats do."""
    match value:
        case str() if found := _UNWRITABLE.search(value):
            raise Refusal("invalid_request", f"A schema's words cannot have the control character {found[0]!r}.")
        case int() if abs(value) > _EXACT:
            raise Refusal("invalid_request", f"A schema's values cannot have {value}: whole numbers go to 2**53.")
        case list():
            for each in value:
                _check_writable(each)
        case dict():
            _check_writable([*value, *value.values()])


def _sound_bounds(schema: Schema) -> Schema:
    """An excluded whole number is let through where the range ends within the same unit."""
    bounds = {key: schema[key] for key in _BOUNDS if type(schema.get(key)) in (int, float)}
    if len(bounds) < 2 or max(bounds.values()) - min(bounds.values()) >= 1:
        return {}
    inwards = {"exclusiveMinimum": _NEARBY, "exclusiveMaximum": -_NEARBY}
    return {key: bounds[key] + by for key, by in inwards.items() if key in bounds}
