"""Negates a schema: returns alternatives, at least one of which holds exactly when the schema does not."""

from collections.abc import Iterable, Sequence
from typing import Any

from worker.text.grammar.schema.disjoint import Disjointness, kinds
from worker.text.grammar.schema.unsupported import Schema

_MAX_ALTERNATIVES = 32  # alternatives
_MAX_DEPTH = 8  # schemas within schemas
_ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema",
    "$id", "$defs", "definitions", "$anchor",
}  # fmt: skip
_OPPOSITE_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}


class NotNegatable(Exception):
    """The negation cannot be written as schemas."""


def negation(schema: Any, known: Sequence[Any], proofs: Disjointness, depth: int = 0) -> list[Any]:
    """Return the alternatives; none for a schema that every value satisfies.

    `known`: schemas that all values in question satisfy. Raises `NotNegatable`, and `BudgetExceeded`.
    """
    if isinstance(schema, bool):
        return [] if schema else [True]
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        raise NotNegatable
    found = [each for keyword in schema for each in _of_keyword(keyword, schema, known, proofs, depth + 1)]
    if len(found) > _MAX_ALTERNATIVES:
        raise NotNegatable
    return found


def _of_keyword(keyword: str, schema: Schema, known: Sequence[Any], proofs: Disjointness, depth: int) -> Iterable[Any]:
    value = schema[keyword]
    match keyword:
        case _ if keyword in _ANNOTATIONS:
            return []
        case "type":
            return _other_types(value, known, proofs)
        case "const":
            return _other_values([value], known, proofs)
        case "enum" if isinstance(value, list):
            return _other_values(value, known, proofs)
        case "required" if isinstance(value, list) and all(isinstance(name, str) for name in value):
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties" if isinstance(value, dict):
            return _other_properties(value, known, proofs, depth)
        case "allOf" if isinstance(value, list):
            return [each for part in value for each in negation(part, known, proofs, depth)]
        case "anyOf" if isinstance(value, list):
            return _none_of(value, known, proofs, depth)
        case "not":
            return [value]
        case _ if keyword in _OPPOSITE_BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
            return _opposite_bound(keyword, value)
    raise NotNegatable


def _opposite_bound(keyword: str, bound: float) -> list[Any]:
    kind, other, by = _OPPOSITE_BOUNDS[keyword]
    if by and bound + by < 0:
        return []
    return [{"type": kind, other: bound + by if by else bound}]


def _other_types(value: Any, known: Sequence[Any], proofs: Disjointness) -> list[Any]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise NotNegatable
    others = _kinds(known, proofs).difference(names)
    if "integer" in names and "number" in others:
        raise NotNegatable  # fractions are left, and no type is fractions alone
    return [{"type": sorted(others)}] if others else []


def _kinds(known: Sequence[Any], proofs: Disjointness) -> frozenset[str]:
    all_of = proofs.flat(known)
    return frozenset() if all_of is None else kinds(all_of)


def _other_values(value: list[Any], known: Sequence[Any], proofs: Disjointness) -> list[Any]:
    all_of = proofs.flat(known)
    if all_of is None:
        return []
    listed = proofs.listed(all_of)
    if listed is None:
        raise NotNegatable
    these = set(map(proofs.key, value))
    others = [value for value in listed if proofs.key(value) not in these]
    return [{"enum": others}] if others else []


def _other_properties(value: dict[str, Any], known: Sequence[Any], proofs: Disjointness, depth: int) -> list[Any]:
    all_of = proofs.flat(known)
    return [
        {"type": "object", "properties": {name: each}, "required": [name]}
        for name, schema in value.items()
        for each in negation(schema, proofs.of_property(name, all_of or []), proofs, depth)
    ]


def _none_of(value: list[Any], known: Sequence[Any], proofs: Disjointness, depth: int) -> list[Any]:
    """Return every combination of one negation of each part."""
    ways: list[list[Any]] = [[]]
    for part in value:
        contrary = negation(part, known, proofs, depth)
        ways = [[*way, each] for way in ways for each in contrary]
        if len(ways) > _MAX_ALTERNATIVES:
            raise NotNegatable
    return [{"allOf": way} if len(way) != 1 else way[0] for way in ways]
