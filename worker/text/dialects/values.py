"""Reads the value of a parameter that a model wrote as text, by the parameter's JSON schema."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from worker.text.dialects.json_text import Repair, whole

ValueSchema = Mapping[str, Any]

_TYPES = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
# What people who write schemas by hand call types, as Python or other languages do.
_ALSO_NAMED = {
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "list": "array", "tuple": "array",
}  # fmt: skip
# Keywords that only values of one type can meet, for schemas that name no type.
_OF_TYPE = {
    "properties": "object", "additionalProperties": "object", "required": "object", "patternProperties": "object",
    "items": "array", "prefixItems": "array", "minItems": "array", "maxItems": "array",
    "minLength": "string", "maxLength": "string", "pattern": "string", "format": "string",
    "minimum": "number", "maximum": "number", "multipleOf": "number",
}  # fmt: skip

_SURE = frozenset({Repair.LITERAL, Repair.COMMA})  # what was wrong with a value that is hardly meant as a string


class Parameters:
    """The schemas of a function's parameters, by name."""

    def __init__(self, schema: Any, root: ValueSchema | None = None) -> None:
        """`schema`: that of the function's arguments; anything else than an object names no parameters. `root`: the
        schema in which references are resolved, if not this one."""
        schema = schema if isinstance(schema, dict) else {}
        self._root: ValueSchema = schema if root is None else root
        properties = schema.get("properties")
        self._properties: dict[str, Any] = properties if isinstance(properties, dict) else {}
        self._others = schema.get("additionalProperties")

    @property
    def names(self) -> list[str]:
        """The parameters' names, in the schema's order."""
        return list(self._properties)

    def json_of(self, name: str, text: str, repairs: set[Repair], *, python: bool = False) -> str:
        """Return the JSON of a parameter's value that was written as `text`.

        A text that is a value of one of the parameter's types other than string is that value, as it was written; any
        other text is a string with all its characters. `python`: the dialect writes lists and objects as Python."""
        types, constants = self._types(name)
        meant = _other_types(types)
        if constants and text in constants:
            return _dumps(text)
        found = set[Repair]()
        written = whole(text.strip(), found, python=python, zeros="string" not in types) if meant else None
        is_sure = "string" not in types or found <= _SURE
        if written is None or not is_sure or _type_of(written) not in meant or not _is_exact(written):
            return _dumps(text)
        repairs |= found
        return written

    def typed_json_of(self, name: str, text: str, repairs: set[Repair], *, is_string: bool) -> str:
        """Return the JSON of a value whose tag says if it is a string; the schema decides if it does not allow that."""
        may_be_string = self.may_be_string(name)
        if is_string:
            return _dumps(text) if may_be_string else self.json_of(name, text, repairs)
        found = set[Repair]()
        written = whole(text.strip(), found, zeros=not may_be_string)
        if written is None or (may_be_string and _type_of(written) not in _with_integers(self._types(name)[0])):
            return _dumps(text)
        repairs |= found
        return written

    def other_types(self, name: str) -> frozenset[str]:
        """Return the types other than string whose values are read as such in a text of this parameter."""
        return _other_types(self._types(name)[0])

    def may_be_string(self, name: str) -> bool:
        """True if strings are among the parameter's types."""
        return "string" in self._types(name)[0]

    def is_string(self, name: str) -> bool:
        """True if the schema says something about the parameter, and strings are among its types."""
        return (name in self._properties or isinstance(self._others, dict)) and self.may_be_string(name)

    def _types(self, name: str) -> tuple[frozenset[str], set[str] | None]:
        """Return the types of a parameter, and the texts that are strings whatever else they may be."""
        reading = _Reading(self._root)
        return reading.types(self._properties.get(name, self._others)), reading.constants

    def within(self, name: str, item: str) -> "Parameters":
        """Return the schemas of what a parameter's value holds, by name: an object's members, or a list's items as
        `item`."""
        found, others = dict[str, Any](), None
        for part in _Reading(self._root).parts(self._properties.get(name, self._others)):
            members, items = part.get("properties"), part.get("items")
            found |= members if isinstance(members, dict) else {}
            found |= {item: items} if isinstance(items, dict) else {}
            others = others or part.get("additionalProperties")
        return Parameters({"properties": found, "additionalProperties": others}, self._root)

    def has(self, name: str) -> bool:
        """True if the schema names the parameter."""
        return name in self._properties


class _Reading:
    """Collects the types that a schema allows, through references and combinations."""

    def __init__(self, root: ValueSchema) -> None:
        self._root = root
        self._steps = self._depth = 0
        self.constants: set[str] | None = None  # texts that `enum` and `const` allow

    def _may_read(self, schema: Any) -> bool:
        """Count a schema. Returns False for one too many: references may lead to each other in fans and circles."""
        self._steps += 1
        return isinstance(schema, dict) and self._steps <= 1_000 and self._depth <= 50

    def types(self, schema: Any) -> frozenset[str]:
        """Return the types of values that may meet the schema; all types if it does not say."""
        if not self._may_read(schema):
            return _TYPES
        self._depth += 1
        types = self._combined(schema)
        self._depth -= 1
        return types or _TYPES

    def parts(self, schema: Any) -> Iterator[ValueSchema]:
        """Yield the schema and those that it combines or refers to."""
        if not self._may_read(schema):
            return
        self._depth += 1
        yield schema
        if isinstance(ref := schema.get("$ref"), str):
            yield from self.parts(self._resolved(ref))
        for keyword in ("anyOf", "oneOf", "allOf"):
            for branch in schema[keyword] if isinstance(schema.get(keyword), list) else ():
                yield from self.parts(branch)
        self._depth -= 1

    def _combined(self, schema: ValueSchema) -> frozenset[str]:
        types = self._own(schema)
        if isinstance(ref := schema.get("$ref"), str):
            types &= self.types(self._resolved(ref))
        for keyword in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(keyword), list) and branches:
                types &= frozenset[str]().union(*(self.types(branch) for branch in branches))
        for branch in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            types &= self.types(branch)
        if schema.get("nullable") is True:
            types |= {"null"}
        return types

    def _own(self, schema: ValueSchema) -> frozenset[str]:
        values = schema.get("enum") if isinstance(schema.get("enum"), list) else None
        if "const" in schema:
            values = [schema["const"]]
        if values is not None:
            texts = {value for value in values if isinstance(value, str)}
            self.constants = texts | (self.constants or set())
        named = schema.get("type")
        if isinstance(named, str | list):
            types = _named([named] if isinstance(named, str) else named)
            if types:
                return types
        if values is not None:
            return frozenset(_type_of(json.dumps(value)) for value in values) or _TYPES
        hints = {_OF_TYPE[keyword] for keyword in schema if keyword in _OF_TYPE}
        return _with_integers(hints) if len(hints) == 1 else _TYPES

    def _resolved(self, ref: str) -> Any:
        found: Any = self._root
        if not ref.startswith("#"):
            return None
        for part in ref[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict):
                found = found.get(part)
            else:
                return None
        return found


def _other_types(types: frozenset[str]) -> frozenset[str]:
    # Without a type most templates write texts as they are, and lists and objects as JSON.
    return _with_integers({"object", "array"} if types == _TYPES else types - {"string"})


def _named(types: Iterable[Any]) -> frozenset[str]:
    return frozenset(_ALSO_NAMED.get(type, type) for type in types if isinstance(type, str)) & _TYPES


def _with_integers(types: Iterable[str]) -> frozenset[str]:
    """Return the types with integers if numbers are among them, since each integer is a number."""
    types = frozenset(types)
    return types | {"integer"} if "number" in types else types


def _type_of(written: str) -> str:
    """Return the type of a JSON text."""
    match written[:1]:
        case "{":
            return "object"
        case "[":
            return "array"
        case '"':
            return "string"
        case "t" | "f":
            return "boolean"
        case "n":
            return "null"
    return "number" if any(char in written for char in ".eE") and not _is_whole(written) else "integer"


def _is_whole(written: str) -> bool:
    """True if a number with a fraction or an exponent is an integer, as JSON schema counts it."""
    return len(written) < 30 and float(written).is_integer()


def _is_exact(written: str) -> bool:
    """False for a number that readers of JSON take for infinite; then it stays the text that was written."""
    if _type_of(written) not in ("number", "integer") or not any(char in written for char in "eE"):
        return True
    return abs(float(written)) != float("inf")


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
