"""Writes grammars for the parameters of qwen3_coder's calls: <parameter=city>\nOslo\n</parameter>

`worker/text/dialects/values.py` reads a value by the types of its parameter: as JSON if that is of one of them, else as
a string. So a schema is supported if a grammar can enforce all of it and the meant value is read; anything else is
refused by name.
"""

import json
import math
import re
from collections.abc import Collection, Iterator
from typing import Any

from worker.errors import JobFailure
from worker.text.grammar.lark import Grammar, literal
from worker.text.grammar.schema import values
from worker.text.grammar.schema.formats import FORMATS, patterns
from worker.text.grammar.schema.patterns import Pattern
from worker.text.grammar.schema.regex import UnsupportedPattern
from worker.text.grammar.schema.rewrite import KEYWORDS, TYPES
from worker.text.grammar.schema.unsupported import Schema, quoted

_TEXT = r"/(?s:.*)/ & ~/(?s:.*)<\/(parameter|function|tool_call)>(?s:.*)/"
_NOT_NULL = r" & ~/[nN][uU][lL][lL]/"
_TAG = re.compile("</(parameter|function|tool_call)>")
_END = "\n</parameter>"
_EXACT = 2**53  # more digits are no double
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_DEFINITIONS = ("$defs", "definitions")
_NAMED = {"properties", "required", "additionalProperties", *_DEFINITIONS}
# Texts that are read as JSON if a parameter allows other types than strings. A text beside numbers must not even begin
# like one, since the lexer would go on with the text.
_JSON = {
    "array": r"[\[{](?s:.*)",
    "boolean": r"(true|false)[ \t\r\n]*",
    "number": r"-?[0-9](?s:.*)",
}
_OF_STRINGS = {"type", "pattern", "minLength", "maxLength", "format"}
_NUMBERS = {"integer", "number"}


def parameters(grammar: Grammar, function: str, schema: Schema) -> list[str]:
    """Return a rule for each parameter, in the schema's order, which calls must follow. Raises `JobFailure`."""
    return list(_Parameters(grammar, function, schema).rules())


class _Parameters:
    def __init__(self, grammar: Grammar, function: str, whole: Schema) -> None:
        self._grammar = grammar
        self._function = function
        self._schema_of_all = whole
        self._parameter = ""  # name of the current one, for errors
        self._json_texts = ""  # texts that are not read as strings, since the current one has other types too

    def rules(self) -> Iterator[str]:
        self._allow_only(self._schema_of_all, {"type", *_NAMED})
        properties = self._schema_of_all.get("properties", {})
        required = self._schema_of_all.get("required", [])
        if not isinstance(properties, dict) or not _is_names(required):
            raise self._invalid()
        if self._schema_of_all.get("additionalProperties", True) not in (True, {}) and not properties.keys() >= {
            *required
        }:
            raise self._refusal("required names that are not in properties")
        for name in dict.fromkeys([*properties, *required]):
            yield self._rule(name, properties.get(name, {})) + ("" if name in required else "?")

    def _rule(self, name: str, schema: Any) -> str:
        if re.search(r"[\s<>]", name):
            message = f"tools: this model's calls cannot name a parameter {name!r}."
            raise JobFailure("unsupported", message, param="tools")
        head, self._parameter = literal(f"<parameter={name}>\n"), name
        return self._grammar.rule(f'{head} ({" | ".join(self._values(self._schema(schema)))}) "\\n"')

    def _values(self, schema: Schema) -> list[str]:
        """Return a rule for each alternative of the value, with the tag that ends it."""
        match schema.get("type"):
            case "string":
                return self._strings(schema)
            case str():
                return [self._json(schema)]
            case list() as types if all(each in (*_NUMBERS, "null") for each in types):
                return [self._json(schema)]
            case list() as types if types and all(each in TYPES for each in types):
                self._json_texts = _json_texts(types)
                return [value for each in dict.fromkeys(types) for value in self._of_type(each, schema)]
            case None:
                return self._untyped(schema)
        raise self._invalid()

    def _of_type(self, name: str, schema: Schema) -> list[str]:
        """Return a rule for each alternative of one type of a list of types."""
        listed = [schema["const"]] if "const" in schema else schema.get("enum")
        if listed is None:
            others = KEYWORDS - _OF_STRINGS if name == "string" else _OF_STRINGS
            return self._branch({key: value for key, value in schema.items() if key not in others} | {"type": name})
        if not isinstance(listed, list):
            raise self._invalid()
        rest = {key: value for key, value in schema.items() if key in KEYWORDS - {"const", "enum"} - _OF_STRINGS}
        if rest:
            raise self._refusal(f"{min(rest)} beside an enum and a list of types")
        fitting = [value for value in listed if _is_of(value, name)]
        return self._branch({"type": name, "enum": fitting}) if fitting else []

    def _untyped(self, schema: Schema) -> list[str]:
        meant = self._resolved(schema)
        self._json_texts = _json_texts([])
        if "anyOf" not in meant:
            return self._branch(meant)
        self._allow_only(meant, {"anyOf"})
        if not isinstance(meant["anyOf"], list):
            raise self._invalid()
        branches = [self._resolved(self._schema(branch)) for branch in meant["anyOf"]]
        self._json_texts = _json_texts([str(branch.get("type")) for branch in branches])
        return [value for branch in branches for value in self._branch(branch)]

    def _branch(self, schema: Schema) -> list[str]:
        match schema.get("type"):
            case "string":
                return self._strings(schema, or_json=True)
            case "object" | "array" | "integer" | "number":
                return [self._json(schema)]
            case "boolean":
                return self._booleans(schema)
            case "null":
                return [literal("null" + _END)]
            case None if schema.keys() & {"enum", "const"}:
                return self._listed_values(schema, or_json=True)
            case None:
                self._allow_only(schema, ())
                return [self._grammar.text(_TEXT, until=_END)]
        raise self._refusal(f"type {quoted(schema['type'])} within anyOf or $ref")

    def _booleans(self, schema: Schema) -> list[str]:
        self._allow_only(schema, {"type", "const", "enum"})
        listed = [schema["const"]] if "const" in schema else schema.get("enum", [True, False])
        if not isinstance(listed, list):
            raise self._invalid()
        return [literal(json.dumps(value) + _END) for value in listed if isinstance(value, bool)]

    def _json(self, schema: Schema) -> str:
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        exact = self._exact(schema) if _NUMBERS.intersection(types) else {}
        field = f"tools: {self._function}: {self._parameter}"
        return f"{self._grammar.json({**schema, **exact}, field, self._schema_of_all)} {literal(_END)}"

    def _exact(self, schema: Schema) -> Schema:
        """Return bounds that replace the schema's wider ones: within them a float represents every integer."""
        own = [schema[key] for key in (*_LOWER, *_UPPER) if key in schema]
        if not all(type(bound) in (int, float) for bound in own):
            return {}  # `_json` refuses them with the reason
        low = max((schema[key] for key in _LOWER if key in schema), default=-math.inf)
        high = min((schema[key] for key in _UPPER if key in schema), default=math.inf)
        if low > _EXACT or high < -_EXACT:
            raise self._refusal("a bound beyond 2**53")
        exact = {"minimum": -_EXACT} if low < -_EXACT else {}
        return exact | ({"maximum": _EXACT} if high > _EXACT else {})

    def _strings(self, schema: Schema, *, or_json: bool = False) -> list[str]:
        if schema.keys() & {"enum", "const"}:
            return self._listed_values(schema, or_json=or_json)
        self._allow_only(schema, _OF_STRINGS)
        terminal = _TEXT + _NOT_NULL + (f" & ~/{self._json_texts}/" if or_json else "")
        if "pattern" in schema:
            terminal += f" & /{self._whole_pattern(schema['pattern'])}/"
        terminal += "".join(f" & /{pattern.whole()}/" for pattern in self._format(schema))
        minimum, maximum = schema.get("minLength", 0), schema.get("maxLength", "")
        lengths = [schema[name] for name in ("minLength", "maxLength") if name in schema]
        if not all(type(length) is int and length >= 0 for length in lengths):
            raise self._invalid()
        if (minimum, maximum) != (0, ""):
            terminal += f" & /(?s:.{{{minimum},{maximum}}})/"
        return [self._grammar.text(terminal, until=_END)]

    def _listed_values(self, schema: Schema, *, or_json: bool) -> list[str]:
        key = "const" if "const" in schema else "enum"
        self._allow_only(schema, {"type", key})
        listed = [schema["const"]] if key == "const" else schema["enum"]
        if not isinstance(listed, list):
            raise self._invalid()
        if "type" in schema:
            listed = [word for word in listed if isinstance(word, str)]
        words = [self._listed_value(value) for value in listed if not self._is_misread(value, or_json)]
        if not words:
            raise self._refusal(f"this {key}")
        return [literal(word + _END) for word in words]

    def _is_misread(self, value: Any, or_json: bool) -> bool:
        """True if the parser would return another value for it. Such a value is left out."""
        if not isinstance(value, str):
            return _TAG.search(json.dumps(value)) is not None
        is_json = or_json and re.fullmatch(self._json_texts, value) is not None
        return value.lower() == "null" or _TAG.search(value) is not None or is_json

    def _listed_value(self, value: Any) -> str:
        if isinstance(value, bool | int | float):
            raise self._refusal("an enum of numbers without their type")
        return value if isinstance(value, str) else json.dumps(value)

    def _format(self, schema: Schema) -> tuple[Pattern, ...]:
        name = schema.get("format")
        if name is None or (name not in FORMATS and "pattern" in schema):
            return ()
        if name not in FORMATS:
            raise self._refusal(f"format {quoted(name)}")
        return patterns(name)

    def _whole_pattern(self, text: Any) -> str:
        if not isinstance(text, str):
            raise self._invalid()
        try:
            return Pattern(text).whole()
        except UnsupportedPattern as error:
            raise self._refusal(f"pattern {quoted(text)}: {error}") from error

    def _resolved(self, schema: Schema) -> Schema:
        """Return the definition that a schema refers to, or the schema itself if it is not a reference."""
        seen = set[str]()
        while "$ref" in schema:
            self._allow_only(schema, {"$ref"})
            match str(schema["$ref"]).split("/"):
                case ["#", ("$defs" | "definitions") as where, name] if name not in seen:
                    seen.add(name)
                    named = self._schema_of_all.get(where, {})
                    schema = self._schema(named.get(name) if isinstance(named, dict) else named)
                case _:
                    raise self._refusal(f"$ref {quoted(schema['$ref'])}")
        return schema

    def _schema(self, schema: Any) -> Schema:
        if isinstance(schema, dict):
            return schema
        raise self._refusal(f"a schema of {json.dumps(schema)}") if isinstance(schema, bool) else self._invalid()

    def _allow_only(self, schema: Schema, keywords: Collection[str]) -> None:
        if unknown := sorted((schema.keys() & KEYWORDS) - {*keywords}):
            raise self._refusal(unknown[0])

    def _refusal(self, keyword: str) -> JobFailure:
        message = f"tools: {self._function}: this model's calls do not support parameters with {keyword}."
        return JobFailure("unsupported", message, param="tools")

    def _invalid(self) -> JobFailure:
        message = f"tools: the parameters of {self._function} are not a JSON Schema; correct them."
        return JobFailure("invalid_request", message, param="tools")


def _is_names(names: Any) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_of(value: Any, name: str) -> bool:
    return values.is_integer(value) if name == "integer" else values.kind(value) == name


def _json_texts(types: Collection[str]) -> str:
    """Return an expression of the texts that are read as JSON if a parameter has these types beside strings."""
    others = {"array", *("number" if name == "integer" else name for name in types)}
    return rf"[ \t\r\n]*({'|'.join(text for name, text in _JSON.items() if name in others)})"
