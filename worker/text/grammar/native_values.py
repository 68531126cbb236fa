"""Writes grammars for values in the form in which a dialect writes them: as JSON, as Python, or as Gemma does.

A schema that cannot be expressed by the rules here is left to llguidance's JSON, which all the dialects' readers take.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from worker.text.grammar.lark import Grammar, literal, spaced
from worker.text.grammar.schema import unsupported as values
from worker.text.grammar.schema.formats import FORMATS, patterns
from worker.text.grammar.schema.patterns import Pattern
from worker.text.grammar.schema.references import References
from worker.text.grammar.schema.regex import UnsupportedPattern
from worker.text.grammar.schema.rewrite import KEYWORDS, TYPES, UNLIMITED
from worker.text.grammar.schema.unsupported import Schema, UnsupportedKeyword, quoted

_LONGEST = 10_000  # characters, or items of a list, that a terminal or a rule counts
OF_STRINGS = {"type", "pattern", "minLength", "maxLength", "format"}
# Models write the literals of JSON and those of Python; the readers take both.
_JSON_WORDS = {"boolean": ("true", "false"), "null": ("null",)}
WORDS = {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")}
# Readers take a number beyond a double for a text, so the digits are limited.
_INTEGER, _FRACTION = "(0|[1-9][0-9]{0,199})", r"(\.[0-9]{1,200})?"
NUMBERS = {
    "integer": f"-?{_INTEGER}",
    "number": rf"-?({_INTEGER}{_FRACTION}([eE](\+?[0-9]{{1,2}}|-[0-9]{{1,3}}))?"
    rf"|[0-9]{_FRACTION}[eE]\+?([12][0-9]{{2}}|30[0-7]))",
}
_ESCAPED = r"""\\["'\\\/bfnrt]"""
_COMMA, _COLON = spaced(" , "), spaced(" : ")
_OPEN_LIST, _CLOSE_LIST = spaced(r"\[ "), spaced(r" \]")
_OPEN_OBJECT, _CLOSE_OBJECT = spaced(r"\{ "), spaced(r" \}")
_PLAIN = r"[^{}\\\x00-\x1f]"


class NotNative(Exception):
    """A schema cannot be expressed in a dialect's own form. The message is the keyword that prevents it."""


class _TooLarge(Exception):
    """A schema has too many parts for rules of its own for each."""


def allow_only(schema: Schema, keywords: Collection[str]) -> None:
    """Raise `NotNative` for a schema that has another keyword."""
    if unknown := sorted((schema.keys() & KEYWORDS) - {*keywords}):
        raise NotNative(unknown[0])


def string_terminal(schema: Schema, but: Sequence[str] = ()) -> str:
    """Return the terminal of strings that stand as they are. `but`: expressions of texts that they cannot be."""
    allow_only(schema, OF_STRINGS)
    parts = ["/(?s:.*)/", *(f"~/{each}/" for each in but)]
    minimum, maximum = lengths(schema)
    if (minimum, maximum) != (0, ""):
        parts.append(f"/(?s:.{{{minimum},{maximum}}})/")
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise NotNative("pattern")
        try:
            parts.append(f"/{Pattern(schema['pattern']).whole()}/")
        except UnsupportedPattern as error:
            raise NotNative(f"pattern {quoted(schema['pattern'])}: {error}") from error
    name = schema.get("format")
    if name in FORMATS:
        parts += [f"/{pattern.whole()}/" for pattern in patterns(name)]
    elif name is not None and "pattern" not in schema:
        raise NotNative(f"format {quoted(name)}")
    return " & ".join(parts)


def lengths(schema: Schema) -> tuple[int, int | str]:
    """Return the bounds of a string's length; an empty string for one that is open."""
    minimum, maximum = (schema.get(name) for name in ("minLength", "maxLength"))
    if not all(each is None or (type(each) is int and each >= 0) for each in (minimum, maximum)):
        raise NotNative("minLength or maxLength of that value")
    if minimum is not None and minimum > _LONGEST:
        raise NotNative(f"a minLength of over {_LONGEST:,}")
    return minimum or 0, "" if maximum is None or maximum >= UNLIMITED else maximum


def branches(schema: Any, references: References) -> list[Schema]:
    """Return the alternatives of a schema, each of one type if it names types: without references, and without `anyOf`
    or lists of types at the top. Raises `NotNative`."""
    waiting, found = [schema], list[Schema]()
    for _ in range(200):  # references may lead from each to others
        if not waiting:
            break
        match waiting.pop():
            case {"$ref": reference} as each:
                allow_only(each, {"$ref"})
                waiting.append(target(reference, references))
            case {"anyOf": [*alternatives]} as each:
                allow_only(each, {"anyOf"})
                waiting += reversed(alternatives)
            case {"type": [*types]} as each:
                waiting += [of for name in reversed(types) for of in of_type(name, each)]
            case dict() as each:
                found.append(each)
            case True:
                found.append({})
            case _:
                raise NotNative("such a schema")
    if waiting:
        raise NotNative("so many alternatives")
    return found


def target(reference: Any, references: References) -> Any:
    """Return the schema that a `$ref` points to. Raises `NotNative`."""
    try:
        return references.target(reference, "#").schema
    except UnsupportedKeyword as error:
        raise NotNative("this $ref") from error


def of_type(name: Any, schema: Schema) -> list[Schema]:
    """Return the part of a schema with several types that holds for one of them; none if no value of it is listed."""
    if not isinstance(name, str) or name not in TYPES:
        raise NotNative("such a type")
    others = KEYWORDS - OF_STRINGS if name == "string" else OF_STRINGS
    listed = schema.keys() & {"const", "enum"}
    kept = {key: value for key, value in schema.items() if key not in others - listed} | {"type": name}
    if listed:
        values_of_any = listed_values({key: value for key, value in kept.items() if key != "type"})
        return [kept] if any(_is_of(value, name) for value in values_of_any) else []
    return [kept]


def listed_values(schema: Schema) -> list[Any]:
    """Return the values of an `enum` or a `const` that are of the schema's type."""
    key = "const" if "const" in schema else "enum"
    allow_only(schema, {"type", key})
    found = [schema["const"]] if key == "const" else schema["enum"]
    if not isinstance(found, list):
        raise NotNative(key)
    if fitting := [value for value in found if "type" not in schema or _is_of(value, schema["type"])]:
        return fitting
    raise NotNative(key)


def _is_of(value: Any, name: str) -> bool:
    return values.is_integer(value) if name == "integer" else values.kind(value) == name


def in_any_case(value: Any) -> tuple[str, ...]:
    """Return the texts of a value in JSON, and in Python for a literal."""
    text = json.dumps(value, ensure_ascii=False)
    return (text, str(value)) if value is None or isinstance(value, bool) else (text,)


def any_of(texts: Sequence[str]) -> str:
    """Return a rule's body for one of the alternatives. Raises `NotNative` if there is none."""
    if not texts:
        raise NotNative("no alternatives")
    return f"({' | '.join(dict.fromkeys(texts))})"


class NativeValues:
    """Grammars for the arguments of one function."""

    def __init__(
        self,
        grammar: Grammar,
        root: Schema,
        field: str,
        *,
        python: bool = False,
        quote: str = "",
        but: Sequence[str] = (),
    ) -> None:
        """`root`: the schema of all arguments. `field`: for errors. `python`: values may be those of Python too.
        `quote`: Gemma's marker around strings. `but`: expressions that strings cannot match, with their quotes."""
        self._grammar, self._field = grammar, field
        self._root = root
        self._quote, self._but = quote, but
        self._quotes = ('"', "'") if python else ('"',)
        self._words = WORDS if python or quote else _JSON_WORDS
        self._references = References(root)
        self._left, self._depth = 500, 0  # schemas left, and schemas that the present one is within
        self._names = list[str]()  # of the member that is written, and of those that it is within
        self._targets = dict[str, str]()  # rules of schemas that are referred to, by the reference

    def keywords(self) -> str:
        """Return the rule for the arguments, each after its name: city="Oslo", days=2. Raises `NotNative`."""
        self._check_object(self._root)
        properties = self._root.get("properties", {})
        if wrong := [name for name in properties if not name.isidentifier()]:
            raise NotNative(f"the name {quoted(wrong[0])}")
        try:
            members = {name: f"{literal(f'{name}=')} {self._named(name, each)}" for name, each in properties.items()}
        except _TooLarge as error:
            raise NotNative("so many parts") from error
        return self._members(self._root, members)

    def whole(self) -> str:
        """Return the rule for all arguments as one object."""
        try:
            return self.value(self._root)
        except _TooLarge:
            self._names.clear()
            return self._json(self._root)

    def _named(self, name: str, schema: Any) -> str:
        self._names.append(name)
        found = self.value(schema)
        self._names.pop()
        return found

    def value(self, schema: Any) -> str:
        """Return the rule for a value; as JSON if that is the only form."""
        self._left -= 1
        if self._left < 0:
            raise _TooLarge
        if self._depth == 20:  # a deeper schema has no rules of its own
            return self._json(schema)
        self._depth += 1
        try:
            return self._grammar.rule(any_of(self._forms_of(schema)))
        except NotNative:
            return self._json(schema)
        finally:
            self._depth -= 1

    def _forms_of(self, schema: Any) -> list[str]:
        match schema:
            case {"$ref": str(reference)}:
                allow_only(schema, {"$ref"})
                if reference not in self._targets:
                    self._targets[reference] = ""  # of a circle the second round is JSON
                    self._targets[reference] = self.value(target(reference, self._references))
                return [self._targets[reference] or self._json(schema)]
            case {"anyOf": [_, *_]}:
                allow_only(schema, {"anyOf"})
                return [self.value(each) for each in schema["anyOf"]]
            case {"type": [*types]}:
                return [self._branch(each) for name in types for each in of_type(name, schema)]
            case dict():
                return [self._branch(schema)]
        raise NotNative("a schema of true or false")

    def _branch(self, schema: Schema) -> str:
        if schema.keys() & {"const", "enum"}:
            return any_of([form for value in listed_values(schema) for form in self._forms(value)])
        match schema.get("type"):
            case "string":
                return self._string(schema)
            case ("integer" | "number") as name if not schema.keys() & KEYWORDS - {"type"}:
                return self._grammar.terminal(f"/{NUMBERS[name]}/")
            case ("boolean" | "null") as name:
                allow_only(schema, {"type"})
                return any_of([literal(word) for word in self._words[name]])
            case "array":
                return self._array(schema)
            case "object":
                return self._object_or_json(schema)
        return self._json(schema)

    def _json(self, schema: Any) -> str:
        if not isinstance(schema, dict):  # true, or what is no schema
            schema = {"allOf": [schema]}
        return self._grammar.json(schema, ": ".join([self._field, *self._names]), self._root)

    def _string(self, schema: Schema) -> str:
        if self._quote:
            terminal = string_terminal(schema, [f"(?s:.*){regex_escaped(self._quote)}(?s:.*)"])
            return f"{self._grammar.marker(self._quote)} {self._grammar.text(terminal, until=self._quote)}"
        if schema.keys() & KEYWORDS - {"type", "minLength", "maxLength"}:
            return self._json(schema)  # models of Python write JSON's quotes too
        minimum, maximum = lengths(schema)
        return any_of([self._free_string(sign, f"{{{minimum},{maximum}}}") for sign in self._quotes])

    def _free_string(self, sign: str, count: str) -> str:
        """Return the terminal of strings between these quotes. `count`: how many characters; empty: any number."""
        body = f"/{sign}({_PLAIN.format(sign)}|{_ESCAPED}){count or '*'}{sign}/"
        return self._grammar.terminal(" & ".join([body, *(f"~/{each}/" for each in self._but)]))

    def _forms(self, value: Any) -> list[str]:
        """Return the forms of a value that is listed."""
        if not isinstance(value, str):
            texts = in_any_case(value) if self._words is WORDS else in_any_case(value)[:1]
            return [literal(text) for text in texts]
        if not self._quote or self._quote in value:
            return self._quoted(value)
        return [" ".join([self._grammar.marker(self._quote), literal(value), self._grammar.marker(self._quote)])]

    def _quoted(self, text: str) -> list[str]:
        in_json = literal(json.dumps(text, ensure_ascii=False))
        is_plain = "'" in self._quotes and re.fullmatch(r"[^'\\\x00-\x1f]*", text)
        return [in_json, literal(f"'{text}'")] if is_plain else [in_json]

    def _array(self, schema: Schema) -> str:
        allow_only(schema, {"type", "items", "minItems", "maxItems"})
        fewest, most = schema.get("minItems", 0), schema.get("maxItems")
        if "items" not in schema or not isinstance(schema["items"], dict) or type(fewest) is not int or fewest > 1:
            return self._json(schema)
        if not (most is None or (type(most) is int and max(1, fewest) <= most <= _LONGEST)):
            return self._json(schema)
        item = self._named("items", schema["items"])
        more = "*" if most is None else f"{{0,{most - 1}}}"
        others = "" if most == 1 else f"({self._grammar.terminal(_COMMA)} {item}){more}"
        items = f"({item} {others}){'' if fewest else '?'}"
        return f"{self._grammar.terminal(_OPEN_LIST)} {items} {self._grammar.terminal(_CLOSE_LIST)}"

    def _object_or_json(self, schema: Schema) -> str:
        others = schema.get("additionalProperties")
        if isinstance(others, dict) and not schema.keys() & KEYWORDS - {"type", "additionalProperties"}:
            return self._dictionary(others)
        try:
            self._check_object(schema)
        except NotNative:
            return self._json(schema)
        properties = schema.get("properties", {})
        members = {name: f"{self._key(name)} {self._named(name, each)}" for name, each in properties.items()}
        # Gemma's templates sort the names, so its models do.
        orders = {tuple(members), tuple(sorted(members, key=str.lower))} if self._quote else {tuple(members)}
        found = any_of([self._members(schema, {name: members[name] for name in order}) for order in sorted(orders)])
        return f"{self._grammar.terminal(_OPEN_OBJECT)} {found} {self._grammar.terminal(_CLOSE_OBJECT)}"

    def _dictionary(self, schema: Schema) -> str:
        """Return the rule for an object with any names, whose values have one schema."""
        names = [self._free_string('"', ""), *([self._grammar.terminal(r"/[\w-]{1,100}/")] if self._quote else [])]
        member = self._grammar.rule(f"{any_of(names)} {self._grammar.terminal(_COLON)} {self.value(schema)}")
        members = f"({member} ({self._grammar.terminal(_COMMA)} {member})*)?"
        return f"{self._grammar.terminal(_OPEN_OBJECT)} {members} {self._grammar.terminal(_CLOSE_OBJECT)}"

    def _check_object(self, schema: Schema) -> None:
        """Raise `NotNative` for the schema of an object whose members are not known by name."""
        allow_only(schema, {"type", "properties", "required", "additionalProperties"})
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not is_names(required):
            raise NotNative("such properties")
        others = schema.get("additionalProperties", True)
        if isinstance(others, dict) and others.keys() & KEYWORDS:
            raise NotNative("additionalProperties")
        if not properties and others is not False:
            raise NotNative("additionalProperties")
        if not {*required} <= properties.keys():
            raise NotNative("required names that are not in properties")

    def _key(self, name: str) -> str:
        is_bare = self._quote and re.fullmatch(r"[\w-]+", name)
        return f"{literal(name) if is_bare else any_of(self._quoted(name))} {self._grammar.terminal(_COLON)}"

    def _members(self, schema: Schema, members: Mapping[str, str]) -> str:
        """Return the rule for members in this order, of which those that are not required may be missing."""
        required, comma = {*schema.get("required", [])}, self._grammar.terminal(_COMMA)
        first, rest = list[str](), ""
        for name, member in reversed([*members.items()]):
            begun = f"{member} {rest}"
            first = [begun] if name in required else [begun, *first]
            rest = self._grammar.rule(f"({comma} {member}){'' if name in required else '?'} {rest}")
        return self._grammar.rule(any_of(first or ['""']) + ("" if required or not first else "?"))


def regex_escaped(text: str) -> str:
    """Return an expression of this text, for use within the slashes of a terminal."""
    return re.escape(text).replace("/", r"\/")


def is_names(names: Any) -> bool:
    """True for a list of names."""
    return isinstance(names, list) and all(isinstance(name, str) for name in names)
