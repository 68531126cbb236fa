"""Rewrites a client's schema so that llguidance (1.9) enforces every keyword that is left in it, or refuses a keyword.

Keywords without a meaning in JSON Schema are dropped, and references point to `$defs` only. A keyword that llguidance
would ignore or reject is expressed by keywords that it enforces.
"""

import re
from copy import deepcopy
from fractions import Fraction
from typing import Any

from worker.text.grammar.schema import disjoint, names, numbers
from worker.text.grammar.schema.choices import CONDITIONS, alternatives, one_of, without_conditions
from worker.text.grammar.schema.formats import FORMATS, written_patterns
from worker.text.grammar.schema.patterns import pattern_steps
from worker.text.grammar.schema.references import NAMED, References, schemas_within
from worker.text.grammar.schema.unsupported import Budget, BudgetExceeded, Schema, UnsupportedKeyword, quoted

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DEPTH = 100  # llguidance's reader stops at 128
UNLIMITED = 2**31 - 1  # some schema generators write it for "no limit"
_UNWRITABLE = re.compile(r"[^\b\f\n\r\t -~\x80-\U0010ffff]")
_USE_ANOTHER = "leave it out, and check the answer"
REFUSED = {
    "not": "use enum, or anyOf with what is allowed",
    "contains": _USE_ANOTHER,
    "minContains": _USE_ANOTHER,
    "maxContains": _USE_ANOTHER,
    "unevaluatedProperties": "use additionalProperties",
    "unevaluatedItems": "use items",
    "$dynamicRef": "use $ref",
    "$recursiveRef": "use $ref",
}
_SIMPLE = frozenset({
    "type", "minLength", "maxLength", "pattern", "format", *numbers.BOUNDS, "multipleOf", *names.KEYWORDS, "required",
    "minProperties", "maxProperties", "items", "additionalItems", "prefixItems", "minItems", "maxItems",
})  # fmt: skip
_APPLIED = frozenset({"const", "enum", "allOf", "anyOf", "oneOf", "$ref"})
KEYWORDS = _SIMPLE | _APPLIED | REFUSED.keys() | {"uniqueItems", *CONDITIONS}  # all others are annotations


def rewrite(schema: Schema, root: Schema | None = None) -> Schema:
    """Return the rewritten schema, with the definitions that it refers to.

    `root`: the schema that references are resolved in, if not this one. Its cost is bounded for any schema. Raises
    `UnsupportedKeyword`.
    """
    root = schema if root is None else root
    _check_depth(root)
    return _Rewriter(root).whole(schema)


class _Rewriter:
    def __init__(self, root: Schema) -> None:
        self._references = References(root)
        # What is left of the limits, in which copies by the rewriting count:
        self._left = 30_000  # schemas, at all levels
        self._characters = 500_000  # of patterns, after their classes are written out
        self._written = 2_000_000  # characters of values and names
        self._depth = 0
        self._steps = pattern_steps()
        self._proofs = disjoint.Disjointness(lambda value: self._references.target(value, "#").schema, Budget())
        self._waiting, self._definitions = list[tuple[str, Any, str]](), Schema()
        self._within, self._in_place = "", True  # name of the current definition; True while its own value is described
        self._references_in_place = dict[str, dict[str, str]]()
        self._multiples, self._combines = dict[Fraction, str](), False

    def whole(self, schema: Schema) -> Schema:
        found = self._object(schema, "#")
        while self._waiting:
            name, meant, place = self._waiting.pop()
            self._within, self._in_place = name, True
            self._definitions[name] = self.schema(meant, place)
        self._check_circles()
        if self._combines:
            numbers.check_multiples(self._multiples)
        return {**found, "$defs": self._definitions} if self._definitions else found

    def schema(self, schema: Any, at: str) -> Any:
        self._left -= 1
        if self._left < 0 or self._depth > _MAX_DEPTH:
            raise UnsupportedKeyword(at, "the schema is too large or too deep from here on; make it smaller")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise UnsupportedKeyword(at, "a schema must be an object, true or false; correct it")
        self._depth += 1
        found = self._object(schema, at)
        self._depth -= 1
        return found

    def _inner(self, schema: Any, at: str) -> Any:
        """Rewrite the schema of a member of the value: a property or an item."""
        before, self._in_place = self._in_place, False
        found = self.schema(schema, at)
        self._in_place = before
        return found

    def _object(self, schema: Schema, at: str) -> Schema:
        try:
            return self._rewritten(schema, at)
        except BudgetExceeded:
            instead = "use fewer alternatives, conditions and allOf, or shorter lists in them"
            raise UnsupportedKeyword(at, f"its parts take too long to compare; {instead}") from None

    def _rewritten(self, schema: Schema, at: str) -> Schema:
        _check_known(schema, at)
        cases = alternatives(schema, at, self._proofs)
        if cases is not None:
            rest = without_conditions(schema)
            return self._object({**rest, "allOf": [*_all_of(rest, at), {"anyOf": cases}]}, at)
        found, simple = Schema(), self._simple(schema, at)
        for keyword, value in schema.items():
            if keyword in _SIMPLE:
                found |= simple  # all at once, since some of these keywords depend on others
            if keyword in _APPLIED:
                self._combines = self._combines or keyword not in ("const", "enum")
                found |= self._applied(keyword, value, schema, at)
        if "oneOf" in schema and "anyOf" in schema:
            found["allOf"] = [*found.get("allOf", []), {"anyOf": self._one_of(schema, at)}]
        if of_format := [{"pattern": each} for each in _format_patterns(schema, at)]:
            if "pattern" not in found:
                found |= of_format.pop(0)
            found["allOf"] = [*found.get("allOf", []), *of_format]
        return found

    def _simple(self, schema: Schema, at: str) -> Schema:
        """Return the keywords that apply to values of one type, for the types that the schema allows."""
        kinds, found = disjoint.kinds([schema]), Schema()
        if "type" in schema:
            found["type"] = _types(schema["type"], at)
        if "number" in kinds and any(keyword in schema for keyword in (*numbers.BOUNDS, "multipleOf")):
            found |= self._numeric(schema, at)
        if "string" in kinds:
            found |= _textual(schema, at)
        if "object" in kinds:
            found |= self._named(schema, at) | self._required(schema, at)
        if "array" in kinds:
            found |= self._items(schema, at)
        self._characters -= sum(map(len, (found.get("pattern", ""), *found.get("patternProperties", ()))))
        if self._characters < 0:
            raise UnsupportedKeyword(at, "the schema's patterns are too large from here on; make them smaller")
        return found

    def _numeric(self, schema: Schema, at: str) -> Schema:
        types = schema.get("type", "number")
        found = numbers.bounds(schema, integer="number" not in ([types] if isinstance(types, str) else types), at=at)
        if "multipleOf" in schema:
            found["multipleOf"] = numbers.multiple(schema["multipleOf"], at)
            self._multiples.setdefault(Fraction(repr(found["multipleOf"])), at)
        return found

    def _named(self, schema: Schema, at: str) -> Schema:
        if not any(keyword in schema for keyword in names.KEYWORDS):
            return {}
        found = names.rewrite_properties(schema, at, self._inner, self._proofs, self._steps)
        self._check_writable([*found.get("properties", {})], f"{at}/properties")
        return found

    def _items(self, schema: Schema, at: str) -> Schema:
        """Return the keywords of arrays. In earlier drafts `items` as a list has the meaning of `prefixItems`."""
        items = schema.get("items")
        rest = "items"
        found = _sizes(schema, "minItems", "maxItems", at)
        first = schema.get("prefixItems", [])
        if isinstance(items, list):
            first = items
            rest = "additionalItems"
            items = schema.get("additionalItems")
        if not isinstance(first, list):
            raise UnsupportedKeyword(f"{at}/prefixItems", "it must be a list of schemas; correct it")
        if first:
            found["prefixItems"] = [self._inner(each, f"{at}/prefixItems/{place}") for place, each in enumerate(first)]
        if items is not None or rest in schema:
            found["items"] = self._inner(items, f"{at}/{rest}")
        return found

    def _applied(self, keyword: str, value: Any, schema: Schema, at: str) -> Schema:
        match keyword:
            case "const":
                self._check_writable(value, f"{at}/const")
                return {keyword: value}
            case "enum":
                return {keyword: self._listed(value, at)}
            case "$ref":
                return {keyword: self._referred(value, at)}
            case "oneOf":
                return {} if "anyOf" in schema else {"anyOf": self._one_of(schema, at)}
        if not isinstance(value, list) or not value:
            raise UnsupportedKeyword(f"{at}/{keyword}", "it must be a list of schemas; correct it")
        return {keyword: [self.schema(each, f"{at}/{keyword}/{place}") for place, each in enumerate(value)]}

    def _one_of(self, schema: Schema, at: str) -> list[Any]:
        others = {keyword: value for keyword, value in schema.items() if keyword != "oneOf"}
        found = one_of(schema["oneOf"], others, at, self._proofs)
        return [self.schema(each, f"{at}/oneOf/{place}") for place, each in enumerate(found)]

    def _required(self, schema: Schema, at: str) -> Schema:
        found = _sizes(schema, "minProperties", "maxProperties", at)
        value = schema.get("required")
        if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
            raise UnsupportedKeyword(f"{at}/required", "it must list names of properties; correct it")
        self._check_writable(value, f"{at}/required")
        if found.get("minProperties", 0) > 1:
            if found["minProperties"] > len(set(value or [])):
                raise UnsupportedKeyword(
                    f"{at}/minProperties", "above 1 it is not supported, since a property may come twice; use required"
                )
            del found["minProperties"]
        return found if value is None else {**found, "required": value}

    def _listed(self, value: Any, at: str) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise UnsupportedKeyword(f"{at}/enum", "it must be a list of at least one value; correct it")
        self._check_writable(value, f"{at}/enum")
        return value

    def _check_writable(self, value: Any, at: str) -> None:
        """Refuse strings and numbers that an answer could not write exactly."""
        waiting = [value]
        while waiting:
            self._take_written(waiting[-1], at)
            match each := waiting.pop():
                case str() if found := _UNWRITABLE.search(each):
                    raise UnsupportedKeyword(
                        at, f"an answer cannot have the control character {found[0]!r}; leave it out"
                    )
                case list():
                    waiting += each
                case dict():
                    waiting += [*each, *each.values()]
                case int() | float() if not isinstance(each, bool):
                    numbers.check_value(each, at)

    def _take_written(self, value: Any, at: str) -> None:
        self._written -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._written < 0:
            raise UnsupportedKeyword(
                at, "the schema's values and names are too large from here on; make them fewer or shorter"
            )

    def _referred(self, reference: Any, at: str) -> str:
        target = self._references.target(reference, at)
        if target.name not in self._definitions:
            self._definitions[target.name] = True
            self._waiting.append((target.name, target.schema, target.place))
        if self._in_place:
            self._references_in_place.setdefault(self._within, {})[target.name] = at
        return f"#/$defs/{target.name}"

    def _check_circles(self) -> None:
        """Refuse definitions that refer back to themselves for the same value, without a property or item between."""
        done = set[str]()
        for begin in self._references_in_place:
            path, waiting = dict[str, None](), [(begin, True)]
            while waiting:
                name, enters = waiting.pop()
                if not enters:
                    done.add(path.popitem()[0])
                elif name not in done:
                    path[name] = None
                    waiting.append((name, False))
                    for lead, at in self._references_in_place.get(name, {}).items():
                        if lead in path:
                            raise UnsupportedKeyword(
                                f"{at}/$ref", "it refers back to itself for the same value; break the circle"
                            )
                        waiting.append((lead, True))


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level := [
        each
        for found in level
        if isinstance(found, dict | list)
        for each in (found.values() if isinstance(found, dict) else found)
    ]:
        if (depth := depth + 1) > _MAX_DEPTH:
            raise UnsupportedKeyword("#", f"it is nested deeper than {_MAX_DEPTH} levels; flatten it")


def _all_of(schema: Schema, at: str) -> list[Any]:
    value = schema.pop("allOf", [])
    if not isinstance(value, list):
        raise UnsupportedKeyword(f"{at}/allOf", "it must be a list of schemas; correct it")
    return value


def _check_known(schema: Schema, at: str) -> None:
    for keyword in sorted(schema.keys() & REFUSED.keys()):
        raise UnsupportedKeyword(f"{at}/{keyword}", f"{keyword} is not supported; {REFUSED[keyword]}")
    if schema.get("uniqueItems", False) is not False:
        raise UnsupportedKeyword(f"{at}/uniqueItems", f"uniqueItems is not supported; {_USE_ANOTHER}")


def _types(value: Any, at: str) -> Any:
    for name in value if isinstance(value, list) and value else [value]:
        if not isinstance(name, str) or name not in TYPES:
            raise UnsupportedKeyword(
                f"{at}/type", f"{quoted(name)} is not a type of JSON Schema; use one of {', '.join(sorted(TYPES))}"
            )
    return list(dict.fromkeys(value)) if isinstance(value, list) else value


def _textual(schema: Schema, at: str) -> Schema:
    found = _sizes(schema, "minLength", "maxLength", at)
    if "pattern" in schema:
        found["pattern"] = names.written_pattern(schema["pattern"], f"{at}/pattern")
    return found


def _format_patterns(schema: Schema, at: str) -> tuple[str, ...]:
    """Return the patterns of the schema's format. Beside a pattern of the client an unknown format is an annotation."""
    name = schema.get("format")
    if name is None or "string" not in disjoint.kinds([schema]):
        return ()
    if isinstance(name, str) and name in FORMATS:
        return written_patterns(name)
    if isinstance(name, str) and "pattern" in schema:
        return ()
    known = f"a pattern, or {', '.join(FORMATS)}"
    raise UnsupportedKeyword(f"{at}/format", f"{quoted(name)} is not supported; leave it out, or use {known}")


def _sizes(schema: Schema, min_keyword: str, max_keyword: str, at: str) -> Schema:
    found = Schema()
    if (low := names.size(schema, min_keyword, at)) is not None:
        if low >= UNLIMITED:
            problem = f"{quoted(low)} is longer than any answer; use a smaller number"
            raise UnsupportedKeyword(f"{at}/{min_keyword}", problem)
        found[min_keyword] = low
    if (high := names.size(schema, max_keyword, at)) is not None and high < UNLIMITED:
        found[max_keyword] = high
    return found


_UNSUPPORTED = {*REFUSED, "uniqueItems"}


def relaxed(schema: Schema, *, strict: bool) -> tuple[Schema, list[str]]:
    """Return the schema without the keywords that cannot be enforced, and what was left out, with its place and reason:
    of a keyword without any support, and of unknown formats, the first place alone.

    `strict`: only unknown formats are left out, which are annotations in JSON Schema. Raises `UnsupportedKeyword` if
    something else cannot be enforced, or too much of it.
    """
    schema, left_out = deepcopy(schema), list[str]()
    while True:
        try:
            rewrite(schema)
        except UnsupportedKeyword as error:
            is_format = error.place.endswith("/format")
            # Each place takes another attempt.
            if len(left_out) == 40 or (strict and not is_format):
                raise
            if not _drop(schema, error.place):
                raise
            left_out.append(str(error))
        else:
            return schema, left_out


def names_alone(schema: Schema) -> Schema:
    """Return a schema that holds the names of the arguments, those that are required among them, and no values."""
    properties, required = schema.get("properties"), schema.get("required")
    names = list(properties) if isinstance(properties, dict) else []
    needed = [name for name in names if isinstance(required, list) and name in required]
    return {"type": "object", "properties": {name: {} for name in names}, "required": needed}


def _drop(root: Schema, place: str) -> bool:
    """Leave out the keyword at a JSON pointer, everywhere if it has no support at all. A schema there becomes that of
    any value, and alternatives that may hold at once need not exclude each other. Returns False if nothing is found."""
    found, holder = root, root
    key, is_schema = "", True
    rest = place.removeprefix("#").removeprefix("/")
    holds_schema = False
    while rest and (step := _step(found, rest)) is not None:
        holds_schema = is_schema
        is_schema = not (is_schema and step in NAMED) if isinstance(found, dict) else True
        holder, key = found, step
        found, rest = found[step], rest[len(str(step)) + 1 :]
    if rest:  # in a case that was made of conditions
        made_of = [keyword for keyword in CONDITIONS if isinstance(found, dict) and keyword in found]
        for keyword in made_of:
            del found[keyword]
        return bool(made_of)
    if found is root:
        return False
    if not (holds_schema and isinstance(holder, dict)):
        holder[key] = {}
    elif key == "format" or key in _UNSUPPORTED:
        for schema in schemas_within(root):
            if key != "format" or not (schema.get(key) in FORMATS or "pattern" in schema):
                schema.pop(key, None)
    else:
        value = holder.pop(key)
        if key == "oneOf" and "anyOf" not in holder:
            holder["anyOf"] = value
    return True


def _step(found: Any, rest: str) -> Any:
    """Return the key or index with which a pointer goes on, whose names are not escaped; None if there is none."""
    if isinstance(found, dict):
        fitting = (key for key in found if rest == key or rest.startswith(f"{key}/"))
        return max(fitting, key=len, default=None)
    first = rest.partition("/")[0]
    is_index = isinstance(found, list) and first.isdecimal() and int(first) < len(found)
    return int(first) if is_index else None
