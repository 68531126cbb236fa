"""Proofs that no value satisfies several schemas at once.

A proof may ignore keywords, which allows more values, never fewer. So True is certain, and False proves nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from worker.text.grammar.schema import unsupported as values
from worker.text.grammar.schema.unsupported import Budget, Schema, UnsupportedKeyword

ResolveReference = Callable[[Any], Any]  # from a reference to its target
_MAX_DEPTH = 12  # schemas within schemas


class Disjointness:
    """Proofs about the parts of one schema. They share a limited number of steps; each raises `BudgetExceeded`."""

    def __init__(self, resolve: ResolveReference, budget: Budget | None = None) -> None:
        self._resolve = resolve
        self._left = 20_000  # steps; without a proof by then, schemas are taken as not disjoint
        self._budget = budget or Budget()

    @property
    def spent(self) -> bool:
        """True if no steps for proofs are left."""
        return self._left <= 0

    def excluded(self, schemas: Iterable[Any], depth: int = 0) -> bool:
        """True if it is proved that no value satisfies all of the schemas."""
        self._left -= 1
        if self._left <= 0 or depth > _MAX_DEPTH:
            return False
        all_of = self.flat(schemas)
        if all_of is None:
            return True
        if (found := self.listed(all_of)) is not None:
            return not any(all(self.may_be(value, each, depth) for each in all_of) for value in found)
        if all(self._is_empty(kind, all_of, depth) for kind in kinds(all_of)):
            return True
        return self._excluded_by_cases(all_of, depth)

    def flat(self, schemas: Iterable[Any]) -> list[Schema] | None:
        """Return the schemas with those that they include by `$ref` and `allOf`. None if one of them is false."""
        found = list[Schema]()
        waiting = deque(schemas)
        seen = set[int]()
        while waiting:
            self._budget.take()
            schema = waiting.popleft()
            if schema is False:
                return None
            if not isinstance(schema, dict) or id(schema) in seen:
                continue
            self._left -= 1
            self._budget.take(_listed_members(schema))
            seen.add(id(schema))
            found.append(schema)
            if isinstance(schema.get("allOf"), list):
                waiting += schema["allOf"]
            if "$ref" in schema and self._left > 0:
                waiting.append(self._resolved(schema["$ref"]))
        return found

    def key(self, value: Any) -> Hashable:
        """Return a key that is equal for values that are equal in JSON."""
        return values.key(value, self._budget)

    def _resolved(self, reference: Any) -> Any:
        try:
            return self._resolve(reference)
        except UnsupportedKeyword:  # `rewrite` refuses it
            return True

    def listed(self, all_of: Sequence[Schema]) -> list[Any] | None:
        """Return the values that all schemas with an `enum` or a `const` list; None if none has one.

        Other keywords may exclude some of these values.
        """
        lists = [found for schema in all_of if (found := _own_list(schema)) is not None]
        if not lists:
            kind = kinds(all_of)
            return [None, True, False] if kind <= {"null", "boolean"} else None
        self._left -= sum(map(len, lists))
        others = [set(map(self.key, each)) for each in lists[1:]]
        return [value for value in lists[0] if all(self.key(value) in each for each in others)]

    def required(self, all_of: Sequence[Schema]) -> list[str]:
        """Return the properties that any of the schemas requires."""
        names = (name for schema in all_of for name in _strings(schema.get("required")))
        return list(dict.fromkeys(names))

    def of_property(self, name: str, all_of: Sequence[Schema]) -> list[Any]:
        """Return the schemas of a property's value."""
        self._budget.take(len(all_of))
        return [value for schema in all_of for value in _of_property(schema, name)]

    def _is_empty(self, kind: str, all_of: Sequence[Schema], depth: int) -> bool:
        """True if no value of this kind satisfies all of the schemas."""
        match kind:
            case "number":
                return _no_number(all_of)
            case "string":
                return _no_size(all_of, "minLength", "maxLength")
            case "array":
                return _no_size(all_of, "minItems", "maxItems") or self._item_excluded(all_of, depth)
            case "object":
                return any(self.excluded(self.of_property(name, all_of), depth + 1) for name in self.required(all_of))
        return not any(
            all(self.may_be(value, each, depth) for each in all_of)
            for value in ([None] if kind == "null" else [True, False])
        )

    def _item_excluded(self, all_of: Sequence[Schema], depth: int) -> bool:
        minimum = max((size for schema in all_of if (size := _size(schema, "minItems")) is not None), default=0)
        self._budget.take(8 * len(all_of))
        return any(
            self.excluded([_of_item(schema, index) for schema in all_of], depth + 1)
            for index in range(min(int(minimum), 8))
        )

    def _excluded_by_cases(self, all_of: Sequence[Schema], depth: int) -> bool:
        for schema in all_of:
            for keyword in ("anyOf", "oneOf"):
                cases = schema.get(keyword)
                if isinstance(cases, list) and cases:
                    self._budget.take(len(schema) + len(all_of))
                    rest = [{key: value for key, value in schema.items() if key != keyword}]
                    rest += [each for each in all_of if each is not schema]
                    return all(self.excluded([case, *rest], depth + 1) for case in cases)
        return False

    def may_be(self, value: Any, schema: Any, depth: int = 0) -> bool:
        """Return False only if it is certain that the value does not satisfy the schema."""
        self._left -= 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._left <= 0:
            return schema is not False
        all_of = self.flat([schema])
        if all_of is None:
            return False
        return all(self._may_be_by_itself(value, each, depth + 1) for each in all_of)

    def _may_be_by_itself(self, value: Any, schema: Schema, depth: int) -> bool:
        if values.kind(value) not in kinds([schema]) or (_integers_only([schema]) and _is_fraction(value)):
            return False
        own = _own_list(schema)
        if own is not None:
            self._left -= len(own)
            wanted = self.key(value)
            if not any(wanted == self.key(each) for each in own):
                return False
        for keyword in ("anyOf", "oneOf"):
            cases = schema.get(keyword)
            if isinstance(cases, list) and not any(self.may_be(value, case, depth) for case in cases):
                return False
        match value:
            case str():
                return _fits(len(value), schema, "minLength", "maxLength")
            case list():
                within = (self.may_be(each, _of_item(schema, index), depth) for index, each in enumerate(value))
                return _fits(len(value), schema, "minItems", "maxItems") and all(within)
            case dict():
                self._budget.take(len(value))
                parts = ((each, part) for name, each in value.items() for part in _of_property(schema, name))
                return value.keys() >= {*_strings(schema.get("required"))} and all(
                    self.may_be(each, part, depth) for each, part in parts
                )
            case int() | float() if not isinstance(value, bool):
                return not _no_number([schema, {"const": value}])
        return True


def kinds(all_of: Iterable[Schema]) -> frozenset[str]:
    """Return the kinds of value that all of the schemas allow; an integer is a number."""
    found = values.KINDS
    for schema in all_of:
        if "type" in schema:
            names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            found &= {"number" if name == "integer" else name for name in _strings(names)}
    return found


def _integers_only(all_of: Iterable[Schema]) -> bool:
    return any("integer" in _types(schema) and "number" not in _types(schema) for schema in all_of)


def _types(schema: Schema) -> list[str]:
    part = schema.get("type", [])
    return [part] if isinstance(part, str) else list(_strings(part))


def _is_fraction(value: Any) -> bool:
    return values.kind(value) == "number" and not values.is_integer(value)


def _listed_members(schema: Schema) -> int:
    """Return the total length of the lists that are read whole."""
    return sum(
        len(value) for keyword in ("allOf", "required", "type") if isinstance(value := schema.get(keyword), list)
    )


def _own_list(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _strings(found: Any) -> Iterator[str]:
    return (each for each in found if isinstance(each, str)) if isinstance(found, list) else iter(())


def _of_property(schema: Schema, name: str) -> Iterator[Any]:
    named = schema.get("properties")
    if isinstance(named, dict) and name in named:
        yield named[name]
    elif "patternProperties" not in schema and "additionalProperties" in schema:
        yield schema["additionalProperties"]


def _of_item(schema: Schema, index: int) -> Any:
    items = schema.get("items", True)
    first = items if isinstance(items, list) else schema.get("prefixItems", [])
    if isinstance(first, list) and index < len(first):
        return first[index]
    return schema.get("additionalItems", True) if isinstance(items, list) else items


def _size(schema: Schema, keyword: str) -> float | None:
    size = schema.get(keyword)
    # A larger bound is ignored: it is hardly a double.
    if isinstance(size, bool) or not isinstance(size, int | float) or size != size or abs(size) > 10**300:
        return None
    return size


def _fits(size: float, schema: Schema, min_keyword: str, max_keyword: str) -> bool:
    return not _no_size([schema, {min_keyword: size, max_keyword: size}], min_keyword, max_keyword)


def _no_size(all_of: Iterable[Schema], min_keyword: str, max_keyword: str) -> bool:
    low = [size for schema in all_of if (size := _size(schema, min_keyword)) is not None]
    high = [size for schema in all_of if (size := _size(schema, max_keyword)) is not None]
    return max(low, default=0) > min(high, default=math.inf)


def _no_number(all_of: Sequence[Schema]) -> bool:
    """True if the bounds leave no number. An end is a pair of a bound and a flag that orders equal bounds."""
    low = max((end for schema in all_of for end in _lower_ends(schema)), default=(-math.inf, False))
    high = min((end for schema in all_of for end in _upper_ends(schema)), default=(math.inf, True))
    minimum, excluded = low
    maximum, included = high
    if not _integers_only(all_of):
        return minimum > maximum or (minimum == maximum and (excluded or not included))
    if math.isfinite(minimum):
        minimum = math.floor(minimum) + 1 if excluded else math.ceil(minimum)
    if math.isfinite(maximum):
        maximum = math.floor(maximum) if included else math.ceil(maximum) - 1
    return minimum > maximum


def _lower_ends(schema: Schema) -> Iterator[tuple[float, bool]]:
    """Yield each lower bound, and True if the bound itself is excluded."""
    for keyword in ("minimum", "const"):
        if (bound := _size(schema, keyword)) is not None:
            yield bound, keyword == "minimum" and schema.get("exclusiveMinimum") is True
    if (bound := _size(schema, "exclusiveMinimum")) is not None:
        yield bound, True


def _upper_ends(schema: Schema) -> Iterator[tuple[float, bool]]:
    """Yield each upper bound, and True if the bound itself is included."""
    for keyword in ("maximum", "const"):
        if (bound := _size(schema, keyword)) is not None:
            yield bound, keyword == "const" or schema.get("exclusiveMaximum") is not True
    if (bound := _size(schema, "exclusiveMaximum")) is not None:
        yield bound, False
