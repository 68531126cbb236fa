"""Writes a grammar for llguidance: rules in its dialect of Lark, and the JSON schemas that they refer to."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from worker.errors import JobFailure
from worker.text.grammar.schema.rewrite import rewrite
from worker.text.grammar.schema.unsupported import Schema, UnsupportedKeyword

# Space within JSON is limited to what people and programs write: without a limit a weak model may emit it forever.
_SPACE = r" {1,2}|\n {0,40}|\n\t{0,10}"
# Without \u, which could spell a property's name in a form that its schema does not match.
_OPTIONS = {"whitespace_pattern": _SPACE, "json_allowed_escapes": r"nrbtf\""}


class Grammar:
    """A grammar under construction. Its methods return the names of rules, for use in other rules."""

    def __init__(self, markers: Mapping[str, int], rewritten: Sequence[Schema] = ()) -> None:
        """`markers`: the tokens that occur in markers, by their text. `rewritten`: the schemas of a grammar that names
        the same ones in the same order."""
        self._markers, self._rewritten = markers, rewritten
        self._tokens = pattern_of_markers(markers)
        self._rules = list[str]()
        self._known = dict[tuple[str, str], str]()  # terminals and rules for text, by their body and their end
        self.schemas = list[Schema]()  # those that were added, in llguidance's form
        self.texts = list[tuple[str, str]]()  # arguments of `text`

    def rule(self, body: str) -> str:
        """Add a rule."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Return a terminal, which the lexer matches as a whole."""
        if (body, "") not in self._known:
            name = self._known[body, ""] = f"T{len(self._rules)}"
            self._rules.append(f"{name}: {body}")
        return self._known[body, ""]

    def text(self, terminal: str, until: str) -> str:
        """Return a rule for text that matches the terminal, and ends with the first `until`."""
        if (terminal, until) not in self._known:
            self.texts.append((terminal, until))
            self._known[terminal, until] = self._text(terminal, until)
        return self._known[terminal, until]

    def _text(self, terminal: str, until: str) -> str:
        first, *rest = filter(None, self._tokens.split(until))
        if first in self._markers:
            return self.rule(f"{self.terminal(terminal)} {self.marker(until)}")
        if rest:  # a token ends the text, and what precedes the token belongs to it
            return self.rule(f"{self.terminal(f'({terminal}) {literal(first)}')} {self.marker(''.join(rest))}")
        body = self.terminal(terminal)
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={literal(until)}]: {body}")
        return name

    def json(self, schema: Schema, field: str, root: Schema | None = None) -> str:
        """Add a JSON schema. Raises `JobFailure`, which names `field`, for a schema that cannot be enforced.

        `root`: the schema that references are resolved in, if not this one.
        """
        place = len(self.schemas)
        if self._rewritten:
            self.schemas.append(self._rewritten[place])
            return f"@s{place}"
        try:
            return self.rewritten(rewrite(schema, root))
        except UnsupportedKeyword as error:
            raise JobFailure("invalid_request", f"{field}: {error}.", param=param_of(field)) from error

    def rewritten(self, schema: Schema) -> str:
        """Add a JSON schema in llguidance's form."""
        name = f"s{len(self.schemas)}"
        self.schemas.append({"name": name, "json_schema": {**schema, "x-guidance": _OPTIONS}})
        return f"@{name}"

    def marker(self, text: str) -> str:
        """Return the symbols of a marker, which a terminal cannot contain: its tokens, and the text between them."""
        return " ".join(
            f"<[{self._markers[part]}]>" if part in self._markers else literal(part)
            for part in self._tokens.split(text)
            if part
        )

    def starting_with(self, rule: str) -> str:
        """Return the whole grammar in llguidance's JSON form. Raises `JobFailure` if it is too long."""
        rules = "\n".join([f"start: {rule}", *self._rules])
        return _written({"grammars": [{"lark_grammar": rules}, *self.schemas]})


def pattern_of_markers(markers: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern whose group is one of the markers, by which a text is split at them."""
    longest_first = sorted(markers, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def param_of(place: str) -> str:
    """Return the field of the request that a place such as `tools: weather` belongs to."""
    return place.partition(":")[0]


def _written(value: Any) -> str:
    """Return the value's JSON. Stops at the limit, since parts that many names share are written repeatedly."""
    parts, length = list[str](), 0
    limit = 500_000  # characters; llguidance parses them in about 20 ms, and holds the interpreter's lock meanwhile
    for part in json.JSONEncoder().iterencode(value):
        parts.append(part)
        length += len(part)
        if length > limit:
            raise JobFailure(
                "too_large",
                f"The request's schemas need a grammar of over {limit:,} characters; shorten them.",
            )
    return "".join(parts)


def literal(text: str) -> str:
    """Return a literal of the grammar, in quotes."""
    return json.dumps(text)


def spaced(pattern: str) -> str:
    """Return a regular expression in which each space of `pattern` allows the space that JSON may have there."""
    return "/" + pattern.replace(" ", f"(?:{_SPACE})?") + "/"
