"""Rewrites conditional keywords and `oneOf` as alternatives, since a grammar only has `anyOf`."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from worker.text.grammar.schema import unsupported as values
from worker.text.grammar.schema.disjoint import Disjointness, kinds
from worker.text.grammar.schema.unsupported import Schema, UnsupportedKeyword, quoted

_MAX_NEGATED = 32  # alternatives
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


class _NotNegatable(Exception):
    """The negation cannot be written as schemas."""


def negation(schema: Any, known: Sequence[Any], proofs: Disjointness, depth: int = 0) -> list[Any]:
    """Return the alternatives; none for a schema that every value satisfies.

    `known`: schemas that all values in question satisfy. Raises `_NotNegatable`, and `BudgetExceeded`.
    """
    if isinstance(schema, bool):
        return [] if schema else [True]
    if not isinstance(schema, dict) or depth > 8:  # schemas within schemas
        raise _NotNegatable
    found = [each for keyword in schema for each in _of_keyword(keyword, schema, known, proofs, depth + 1)]
    if len(found) > _MAX_NEGATED:
        raise _NotNegatable
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
    raise _NotNegatable


def _opposite_bound(keyword: str, bound: float) -> list[Any]:
    kind, other, by = _OPPOSITE_BOUNDS[keyword]
    if by and bound + by < 0:
        return []
    return [{"type": kind, other: bound + by if by else bound}]


def _other_types(value: Any, known: Sequence[Any], proofs: Disjointness) -> list[Any]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _NotNegatable
    others = _kinds(known, proofs).difference(names)
    if "integer" in names and "number" in others:
        raise _NotNegatable  # fractions are left, and no type is fractions alone
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
        raise _NotNegatable
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
        if len(ways) > _MAX_NEGATED:
            raise _NotNegatable
    return [{"allOf": way} if len(way) != 1 else way[0] for way in ways]


_LISTING = {"const", "enum", "type", "title", "description", "default", "examples", "deprecated", "$comment"}
CONDITIONS = ("dependentRequired", "dependentSchemas", "dependencies", "if", "then", "else")


def alternatives(schema: Schema, at: str, proofs: Disjointness) -> list[Any] | None:
    """Return alternatives that together replace the schema's conditions; None if it has none. `at`: its JSON pointer.

    Raises `UnsupportedKeyword` for conditions that cannot be replaced, and `BudgetExceeded`.
    """
    known = without_conditions(schema)
    choices = [*_choices(schema, known, at, proofs)]
    members = schema.get("allOf")
    for index, member in enumerate(members if isinstance(members, list) else []):
        if isinstance(member, dict):
            choices += _choices(member, known, f"{at}/allOf/{index}", proofs)
    if not choices:
        return None
    ways: list[list[Any]] = [[]]
    limit = 64  # combinations of all conditions of one schema
    for place, choice in choices:
        ways = [[*way, each] for way in ways for each in choice if not proofs.excluded([known, *way, each])]
        if len(ways) > limit:
            raise UnsupportedKeyword(
                place, f"its combinations with the other conditions are over {limit} cases; use fewer"
            )
        if not ways:
            raise UnsupportedKeyword(
                place, "no value satisfies it together with the other keywords; correct one of them"
            )
    return [{"allOf": way} if len(way) != 1 else way[0] for way in ways]


def without_conditions(schema: Schema) -> Schema:
    """Return the schema without the conditions that `alternatives` replaces."""
    rest = {keyword: value for keyword, value in schema.items() if keyword not in CONDITIONS}
    if isinstance(rest.get("allOf"), list):
        rest["allOf"] = [_without(member) for member in rest["allOf"]]
    return rest


def _without(member: Any) -> Any:
    if not isinstance(member, dict):
        return member
    return {keyword: value for keyword, value in member.items() if keyword not in CONDITIONS}


def _choices(schema: Schema, known: Schema, at: str, proofs: Disjointness) -> Iterator[tuple[str, list[Any]]]:
    """Yield the JSON pointer and the alternatives of each condition. `known`: a schema that all values satisfy."""
    for keyword in ("dependentRequired", "dependencies", "dependentSchemas"):
        value = schema.get(keyword, {})
        if not isinstance(value, dict):
            raise UnsupportedKeyword(f"{at}/{keyword}", "it must be an object; correct it")
        for name, needs in value.items():
            yield f"{at}/{keyword}/{name}", _dependent(name, needs, f"{at}/{keyword}/{name}")
    if "if" in schema and ("then" in schema or "else" in schema):
        yield f"{at}/if", _conditional(schema, known, at, proofs)


def _dependent(name: str, needs: Any, at: str) -> list[Any]:
    without: Schema = {"type": "object", "properties": {name: False}}
    other = {"type": sorted(values.KINDS - {"object"})}
    if not isinstance(needs, list):
        return [without, {"allOf": [needs], "type": "object", "required": [name]}, other]
    if not all(isinstance(each, str) for each in needs):
        raise UnsupportedKeyword(at, "it must list names of properties; correct it")
    return [without, {"type": "object", "required": list(dict.fromkeys([name, *needs]))}, other]


def _conditional(schema: Schema, known: Schema, at: str, proofs: Disjointness) -> list[Any]:
    condition = schema["if"]
    then = schema.get("then", True)
    otherwise = schema.get("else", True)
    try:
        contrary = negation(condition, [known], proofs)
    except _NotNegatable:
        instead = "compare properties that have an enum, or write the cases as anyOf"
        raise UnsupportedKeyword(f"{at}/if", f"its negation cannot be written as a schema; {instead}") from None
    return [{"allOf": [condition, then]}, *({"allOf": [each, otherwise]} for each in contrary)]


def one_of(value: Any, others: Schema, at: str, proofs: Disjointness) -> list[Any]:
    """Return alternatives for `anyOf`, at most one of which holds for any value. `others`: the rest of the schema.

    Raises `UnsupportedKeyword` if they cannot be separated, and `BudgetExceeded`.
    """
    if not isinstance(value, list) or not value:
        raise UnsupportedKeyword(f"{at}/oneOf", "it must be a list of schemas; correct it")
    if len(value) == 1 or _clearly_disjoint(value, others, proofs):
        return value
    if all(isinstance(each, dict) and each.keys() <= _LISTING and each.keys() & {"const", "enum"} for each in value):
        if found := _in_one([_allowed_values(each, proofs) for each in value], proofs):
            return [{"enum": found}]
        raise UnsupportedKeyword(f"{at}/oneOf", "every value is in more than one of its alternatives; use anyOf")
    return _with_forbidden_names(value, others, at, proofs)


def _clearly_disjoint(value: Sequence[Any], others: Schema, proofs: Disjointness) -> bool:
    """True if the alternatives clearly exclude each other: by their values, or by those of a required property."""
    lists = [_listed([each], proofs) for each in value]
    if all(each is not None for each in lists):
        return _no_common_value(lists, proofs)
    flat = [proofs.flat([each, others]) or [] for each in value]
    return any(
        all(name in proofs.required(each) and kinds(each) == {"object"} for each in flat)
        and _no_common_value([_listed(proofs.of_property(name, each), proofs) for each in flat], proofs)
        for name in proofs.required(flat[0])[:8]
    )


def _listed(schemas: Sequence[Any], proofs: Disjointness) -> list[Any] | None:
    flat = proofs.flat(schemas)
    return [] if flat is None else proofs.listed(flat)


def _allowed_values(schema: Schema, proofs: Disjointness) -> list[Any]:
    """Return the values that a schema of nothing but values and types allows."""
    return [value for value in _listed([schema], proofs) or [] if proofs.may_be(value, schema)]


def _no_common_value(lists: Sequence[list[Any] | None], proofs: Disjointness) -> bool:
    seen = set[Hashable]()
    for each in lists:
        keys = set(map(proofs.key, each)) if each is not None else None
        if keys is None or keys & seen:
            return False
        seen |= keys
    return True


def _in_one(lists: Sequence[list[Any]], proofs: Disjointness) -> list[Any]:
    counts = Counter(key for each in lists for key in set(map(proofs.key, each)))
    found = {proofs.key(value): value for each in lists for value in each}
    return [value for key, value in found.items() if counts[key] == 1]


def _with_forbidden_names(value: Sequence[Any], others: Schema, at: str, proofs: Disjointness) -> list[Any]:
    """Return alternatives of which no two hold at once: if two might, each forbids a property that the other
    requires. Raises `UnsupportedKeyword` if there is no such property."""
    if len(value) > 64:
        apart = "give each a required property with a const of its own"
        raise UnsupportedKeyword(f"{at}/oneOf", f"{len(value)} alternatives are too many to compare in pairs; {apart}")
    forbidden: list[dict[str, bool]] = [{} for _ in value]
    for one, other in combinations(range(len(value)), 2):
        if proofs.excluded([value[one], value[other], others]):
            continue
        names = _own_name(value[one], value[other], proofs), _own_name(value[other], value[one], proofs)
        if proofs.spent or None in names:
            both = f"alternatives {quoted(one + 1)} and {quoted(other + 1)} may hold at once"
            raise UnsupportedKeyword(f"{at}/oneOf", f"{both}; use anyOf, or a required property with a const in each")
        forbidden[one][str(names[1])] = forbidden[other][str(names[0])] = False
    return [
        {"allOf": [each, {"type": "object", "properties": names}]} if names else each
        for each, names in zip(value, forbidden, strict=True)
    ]


def _own_name(schema: Any, other: Any, proofs: Disjointness) -> str | None:
    """Return a property that `schema` requires and `other` does not, or None."""
    own, others = (proofs.required(proofs.flat([each]) or []) for each in (schema, other))
    unwanted = set(others)
    return next((name for name in own if name not in unwanted), None)
