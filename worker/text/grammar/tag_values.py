"""Writes grammars for the parameters of calls in tags: <parameter=city>\nOslo\n</parameter>

`worker/text/dialects/values.py` reads such a text by the types of its parameter: as JSON if it is a value of one of
them, else as a string. So a grammar for strings excludes the texts that are read as another value, and those that
spell a tag of the call.
"""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from worker.text.dialects.tag_calls import TagCalls, tag
from worker.text.dialects.values import Parameters
from worker.text.grammar.lark import Grammar, literal
from worker.text.grammar.native_values import (
    NUMBERS,
    WORDS,
    NativeValues,
    NotNative,
    allow_only,
    any_of,
    branches,
    in_any_case,
    is_names,
    listed_values,
    regex_escaped,
    string_terminal,
)
from worker.text.grammar.schema import unsupported as values
from worker.text.grammar.schema.references import References
from worker.text.grammar.schema.rewrite import KEYWORDS
from worker.text.grammar.schema.unsupported import Schema, quoted

_NAME = re.compile(r"[\w.$@:/-]+")  # of a parameter; others could spell a tag, or the name of a token
_BLANK = r"[\s\x1c-\x1f]*"  # what Python strips
_CDATA = r"<!\[CDATA\[(?s:.*)\]\]>"
_TYPED = {"integer": "number"}  # an attribute's name for a type, if it is another
# Texts that are read as JSON, by type. The reader adds missing brackets, so the first one decides.
_READ = {
    "array": rf"{_BLANK}[\[{{](?s:.*)",
    "object": rf"{_BLANK}[\[{{](?s:.*)",
    **{name: rf"{_BLANK}({'|'.join(words)}){_BLANK}" for name, words in WORDS.items()},
    **dict.fromkeys(("integer", "number"), rf"{_BLANK}-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?{_BLANK}"),
}
# Beside a rule for JSON a text must not even begin like a number, since the lexer would go on with the text.
_NUMBER_BEGINS = rf"{_BLANK}-?[0-9](?s:.*)"


class TagParameters:
    """The parameters of one function between the tags of a dialect."""

    def __init__(self, grammar: Grammar, dialect: TagCalls, root: Schema, field: str, gap: str) -> None:
        """`root`: the schema of all parameters. `field`: for errors. `gap`: the rule between tags."""
        self._grammar, self._dialect = grammar, dialect
        self._gap = gap
        self._root, self._field = root, field
        self._of_string, self._of_other = dialect.typed or ("", "")  # the attributes of typed tags
        self._references, self._reads = References(root), Parameters(root)
        value_end, _, _ = dialect.value[1].partition("{name}")
        marks = (dialect.openings[0], value_end, dialect.parameter[0], dialect.end, dialect.closing)
        self._marks = [mark for mark in marks if mark]
        self._never = [f"(?s:.*)({'|'.join(map(regex_escaped, self._marks))})(?s:.*)", _CDATA]

    def rules(self) -> list[str]:
        """Return a rule for each parameter, in the schema's order, which calls must follow. Raises `NotNative`."""
        return list(self._rules())

    def _rules(self) -> Iterator[str]:
        allow_only(self._root, {"type", "properties", "required", "additionalProperties"})
        properties, required = self._root.get("properties", {}), self._root.get("required", [])
        if not isinstance(properties, dict) or not is_names(required):
            raise NotNative("such properties")
        others = self._root.get("additionalProperties", True)
        if not properties and isinstance(others, dict) and others.keys() & KEYWORDS:
            raise NotNative("additionalProperties")
        if others not in (True, {}) and not properties.keys() >= {*required}:
            raise NotNative("required names that are not in properties")
        for name in dict.fromkeys([*properties, *required]):
            if not _NAME.fullmatch(name):
                raise NotNative(f"the name {quoted(name)}")
            yield f"({self._gap} {self._rule(name, properties.get(name, {}))}){'' if name in required else '?'}"

    def _rule(self, name: str, schema: Any) -> str:
        if self._dialect.typed:
            return self._typed(name, schema)
        try:
            forms = self._values(name, schema)
        except NotNative:
            if self._reads.may_be_string(name):  # JSON of a string would be read as its text
                raise
            forms = [f"{self._nested(name, schema)} {self._end(name)}"]
        return self._grammar.rule(f"{self._head(name)} {any_of(forms)}")

    def _after(self, name: str) -> str:
        return self._dialect.line + self._dialect.end_of(name)

    def _end(self, name: str) -> str:
        return self._grammar.marker(self._after(name))

    def _head(self, name: str, attribute: str = "") -> str:
        begin = self._grammar.marker(tag(self._dialect.parameter, name, attribute))
        gap = self._gap if self._dialect.value[0] else ""
        return f"{begin} {gap} {self._grammar.marker(self._dialect.value[0] + self._dialect.line)}"

    def _nested(self, name: str, schema: Any) -> str:
        """Return the rule for a list or an object: as elements, if the dialect has them and the schema names what they
        are, else as JSON."""
        if self._dialect.item and "$ref" not in json.dumps(schema):
            try:
                return self._elements(name, schema)
            except NotNative:
                pass  # it is read in JSON, too
        return self._json(name, schema)

    def _elements(self, name: str, schema: Any) -> str:
        """Return the rule for the elements of a list or an object. Raises `NotNative`."""
        item, within = self._dialect.item, schema
        is_list = isinstance(schema, dict) and schema.get("type") == "array"
        if is_list:
            allow_only(schema, {"type", "items", "minItems", "maxItems"})
            within = {"properties": {item: schema.get("items", {})}, "required": [item]}
        elif not isinstance(schema, dict) or schema.get("type") != "object" or not schema.get("properties"):
            raise NotNative("elements without names")
        few, many = (schema.get("minItems", 0), schema.get("maxItems", "")) if is_list else (1, 1)
        if not (is_list and few) and not schema.get("required") and self._reads.may_be_string(name):
            raise NotNative("nothing, which is read as a text")
        rules = TagParameters(self._grammar, self._dialect, within, f"{self._field}: {name}", "").rules()
        elements = self._grammar.rule(" ".join(rules))
        return self._grammar.rule(f"({elements}){{{few},{many}}}") if is_list else elements

    def _json(self, name: str, schema: Any) -> str:
        field = f"{self._field}: {name}"
        if any(mark in json.dumps(schema, ensure_ascii=False) for mark in self._marks):
            raise NotNative("a tag of its calls in them")
        python, never = self._dialect.python, self._never[:1]
        return NativeValues(self._grammar, self._root, field, python=python, but=never).value(schema)

    def _values(self, name: str, schema: Any) -> list[str]:
        """Return a rule for each alternative of the value, with the tag that ends it. All texts are one alternative,
        since the lexer matches one terminal at a time. Raises `NotNative`."""
        found, types = branches(schema, self._references), self._reads.other_types(name)
        as_json = [each for each in found if self._is_json(each)]
        texts = [text for each in found if each not in as_json for text in self._texts(name, each, types, as_json)]
        if any(self._type(each) not in types for each in as_json):
            raise NotNative("types that a text does not show")
        rules = [f"{self._nested(name, each)} {self._end(name)}" for each in as_json]
        if self._dialect.cdata:
            texts += [f'"<![CDATA[" ({text}) "]]>"' for text in texts]
        if texts:
            body = " | ".join(f"({text})" for text in dict.fromkeys(texts))
            rules.append(self._grammar.text(body, until=self._after(name)))
        return rules

    def _is_json(self, schema: Schema) -> bool:
        if schema.keys() & {"const", "enum"}:
            return False
        name = self._type(schema)
        return name in ("object", "array") or (name in NUMBERS and bool(schema.keys() & KEYWORDS - {"type"}))

    def _type(self, schema: Schema) -> str:
        """Return the type of an alternative. Raises `NotNative` if it does not name one."""
        if not isinstance(name := schema.get("type", ""), str) or (not name and schema.keys() & KEYWORDS):
            raise NotNative(min(schema.keys() & KEYWORDS))
        return name

    def _texts(self, name: str, schema: Schema, types: Collection[str], as_json: Collection[Schema]) -> list[str]:
        """Return the terminals of an alternative that is no object or list. `types`: those that are read as such.
        `as_json`: the alternatives that have rules of their own."""
        if schema.keys() & {"const", "enum"}:
            return self._listed(name, schema)
        match self._type(schema):
            case "":  # any value
                return [string_terminal({}, self._never)]
            case "string":
                others = [_READ[each] for each in sorted(types)]
                if any(self._type(each) in NUMBERS for each in as_json):
                    others.append(_NUMBER_BEGINS)
                return [string_terminal(schema, [*dict.fromkeys([*self._never, *others])])]
            case kind if kind not in types:
                raise NotNative("types that a text does not show")
            case ("integer" | "number") as kind:
                return [f"/{NUMBERS[kind]}/"]
            case ("boolean" | "null") as kind:
                allow_only(schema, {"type"})
                return [f"/{'|'.join(WORDS[kind])}/"]
        raise NotNative("such a type")

    def _listed(self, name: str, schema: Schema) -> list[str]:
        """Return the terminals of the values of an `enum` or `const` that are read back as what they are."""
        found = list[str]()
        for value in listed_values(schema):
            for text in (value,) if isinstance(value, str) else in_any_case(value):
                read = self._reads.json_of(name, text, set())
                spells = any(mark in text for mark in self._marks) or re.fullmatch(_CDATA, text)
                if not spells and _is_equal(json.loads(read), value):
                    found.append(literal(text))
        if not found:
            raise NotNative("this enum or const")
        return found

    def _typed(self, name: str, schema: Any) -> str:
        """Return the rule for a parameter whose tag says if its text is a string."""
        texts, others = list[str](), dict[str, list[Any]]()  # others: schemas by their attribute
        try:
            for each in branches(schema, self._references):
                self._add_typed(each, texts, others)
        except NotNative:  # then strings are JSON too
            texts, others = [], {self._attribute("object"): [schema]}
        ways = [
            f"{self._head(name, attribute)} {self._json(name, each)} {self._end(name)}"
            for attribute, schemas in others.items()
            for each in schemas
        ]
        if texts:
            body = " | ".join(f"({text})" for text in dict.fromkeys(texts))
            ways.append(f"{self._head(name, self._of_string)} {self._grammar.text(body, until=self._after(name))}")
        return self._grammar.rule(any_of(ways))

    def _attribute(self, kind: str) -> str:
        return self._of_other.format(type=_TYPED.get(kind, kind))

    def _add_typed(self, schema: Schema, texts: list[str], others: dict[str, list[Any]]) -> None:
        """Add the terminal or the schema of an alternative."""
        if schema.keys() & {"const", "enum"}:
            for value in listed_values(schema):
                if isinstance(value, str) and not any(re.fullmatch(never, value) for never in self._never):
                    texts.append(literal(value))
                else:
                    others.setdefault(self._attribute(values.kind(value)), []).append({"const": value})
        elif schema.get("type") == "string":
            texts.append(string_terminal(schema, self._never))
        elif not schema.keys() & KEYWORDS:  # any value
            texts.append(string_terminal({}, self._never))
            for kind in ("null", "boolean", "number", "array", "object"):
                others.setdefault(self._attribute(kind), []).append({"type": kind})
        else:
            others.setdefault(self._attribute(str(schema.get("type", "object"))), []).append(schema)


def _is_equal(read: Any, value: Any) -> bool:
    return type(read) is type(value) and bool(read == value)
