"""Keywords that say "if this, then that", and `oneOf`, as alternatives: `anyOf` is what a grammar has."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations
from typing import Any

from worker.text.grammar.schema import values
from worker.text.grammar.schema.disjoint import Disjointness, kinds
from worker.text.grammar.schema.negation import NotNegatable, negation
from worker.text.grammar.schema.unsupported import UnsupportedKeyword, shown

Schema = dict[str, Any]
_MOST = 64  # alternatives, where several of these keywords meet
_MOST_IN_PAIRS = 64
_LISTING = {"const", "enum", "type", "title", "description", "default", "examples", "deprecated", "$comment"}
CONDITIONS = ("dependentRequired", "dependentSchemas", "dependencies", "if", "then", "else")


def alternatives(schema: Schema, at: str, proofs: Disjointness) -> list[Any] | None:
    """Return alternatives that say together what its conditions say. None if it has no condition."""
    known = without_conditions(schema)
    choices = [*_choices(schema, known, at, proofs)]
    members = schema.get("allOf")
    for index, member in enumerate(members if isinstance(members, list) else []):
        if isinstance(member, dict):
            choices += _choices(member, known, f"{at}/allOf/{index}", proofs)
    if not choices:
        return None
    ways: list[list[Any]] = [[]]
    for place, choice in choices:
        ways = [[*way, each] for way in ways for each in choice if not proofs.excluded([known, *way, each])]
        if len(ways) > _MOST:
            raise UnsupportedKeyword(
                place, f"together with the conditions beside it, it makes over {_MOST} cases; use fewer"
            )
        if not ways:
            raise UnsupportedKeyword(place, "nothing can satisfy it with what stands beside it; correct one of them")
    return [{"allOf": way} if len(way) != 1 else way[0] for way in ways]


def without_conditions(schema: Schema) -> Schema:
    """Return what is left beside `alternatives`."""
    rest = {keyword: said for keyword, said in schema.items() if keyword not in CONDITIONS}
    if isinstance(rest.get("allOf"), list):
        rest["allOf"] = [_without(member) for member in rest["allOf"]]
    return rest


def _without(member: Any) -> Any:
    if not isinstance(member, dict):
        return member
    return {keyword: said for keyword, said in member.items() if keyword not in CONDITIONS}


def _choices(schema: Schema, known: Schema, at: str, proofs: Disjointness) -> Iterator[tuple[str, list[Any]]]:
    """Yield the alternatives of each condition. `known` is what its values satisfy besides."""
    for keyword in ("dependentRequired", "dependencies", "dependentSchemas"):
        said = schema.get(keyword, {})
        if not isinstance(said, dict):
            raise UnsupportedKeyword(f"{at}/{keyword}", "it must be an object; correct it")
        for name, needs in said.items():
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
    condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
    try:
        contrary = negation(condition, [known], proofs)
    except NotNegatable:
        instead = "compare properties that have an enum, or write the cases as anyOf"
        raise UnsupportedKeyword(f"{at}/if", f"its opposite cannot be written as a schema; {instead}") from None
    return [{"allOf": [condition, then]}, *({"allOf": [each, otherwise]} for each in contrary)]


def one_of(said: Any, beside: Schema, at: str, proofs: Disjointness) -> list[Any]:
    """Return alternatives for `anyOf` of which no two hold at once. `beside` is the rest of the schema."""
    if not isinstance(said, list) or not said:
        raise UnsupportedKeyword(f"{at}/oneOf", "it must be a list of schemas; correct it")
    if len(said) == 1 or _told_apart(said, beside, proofs):
        return said
    if all(isinstance(each, dict) and each.keys() <= _LISTING and each.keys() & {"const", "enum"} for each in said):
        if found := _in_one([_satisfying(each, proofs) for each in said], proofs):
            return [{"enum": found}]
        raise UnsupportedKeyword(f"{at}/oneOf", "no value is in one of its alternatives alone; use anyOf")
    return _forbidding(said, beside, at, proofs)


def _told_apart(said: Sequence[Any], beside: Schema, proofs: Disjointness) -> bool:
    """Return whether one look shows it: each lists values, or a property must have one of the values listed."""
    lists = [_listed([each], proofs) for each in said]
    if all(each is not None for each in lists):
        return _apart(lists, proofs)
    together = [proofs.flat([each, beside]) or [] for each in said]
    return any(
        all(name in proofs.required(each) and kinds(each) == {"object"} for each in together)
        and _apart([_listed(proofs.of_property(name, each), proofs) for each in together], proofs)
        for name in proofs.required(together[0])[:8]
    )


def _listed(schemas: Sequence[Any], proofs: Disjointness) -> list[Any] | None:
    together = proofs.flat(schemas)
    return [] if together is None else proofs.listed(together)


def _satisfying(schema: Schema, proofs: Disjointness) -> list[Any]:
    """Return the values of a schema that says nothing besides them and their types."""
    return [value for value in _listed([schema], proofs) or [] if proofs.may_be(value, schema)]


def _apart(lists: Sequence[list[Any] | None], proofs: Disjointness) -> bool:
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


def _forbidding(said: Sequence[Any], beside: Schema, at: str, proofs: Disjointness) -> list[Any]:
    """Return alternatives of which no two hold at once: if two might, each forbids a property that the other
    requires."""
    if len(said) > _MOST_IN_PAIRS:
        apart = "give each a required property with a const of its own"
        raise UnsupportedKeyword(
            f"{at}/oneOf", f"{len(said)} alternatives are too many to tell apart in pairs; {apart}"
        )
    forbidden: list[dict[str, bool]] = [{} for _ in said]
    for one, other in combinations(range(len(said)), 2):
        if proofs.excluded([said[one], said[other], beside]):
            continue
        names = _own_name(said[one], said[other], proofs), _own_name(said[other], said[one], proofs)
        if proofs.spent or None in names:
            both = f"alternatives {shown(one + 1)} and {shown(other + 1)} may hold at once"
            raise UnsupportedKeyword(f"{at}/oneOf", f"{both}; use anyOf, or a required property with a const in each")
        forbidden[one][str(names[1])] = forbidden[other][str(names[0])] = False
    return [
        {"allOf": [each, {"type": "object", "properties": names}]} if names else each
        for each, names in zip(said, forbidden, strict=True)
    ]


def _own_name(schema: Any, other: Any, proofs: Disjointness) -> str | None:
    """Return a property that it requires and the other does not."""
    own, others = (proofs.required(proofs.flat([each]) or []) for each in (schema, other))
    unwanted = set(others)
    return next((name for name in own if name not in unwanted), None)
