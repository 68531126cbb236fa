"""A grammar for llguidance, as it is written: rules in its dialect of Lark, and the JSON schemas that they name."""

import json
from collections.abc import Callable
from typing import Any

from worker.errors import Refusal
from worker.text.schema.held import held
from worker.text.schema.unheld import Unheld

Schema = dict[str, Any]

# Where JSON may have space: as people and programs write it, and no more, since a weak model never leaves off.
_SPACE = r" {1,2}|\n {0,40}|\n\t{0,10}"
# Without \u, which can spell a property's name in a way that its schema does not know.
_HOW = {"whitespace_pattern": _SPACE, "json_allowed_escapes": r"nrbtf\""}
_LONGEST = 500_000  # characters: llguidance reads so many in some 20 ms, in which nothing else runs


class Grammar:
    """Rules go by the names that the methods return."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._rules, self._schemas = list[str](), list[Schema]()

    def rule(self, body: str) -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def terminal(self, body: str) -> str:
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def text(self, terminal: str, until: str) -> str:
        """What the terminal allows, up to and with the first `until`."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}[suffix={literal(until)}]: {self.terminal(terminal)}")
        return name

    def json(self, schema: Schema, field: str, root: Schema | None = None) -> str:
        """`field` of the request brought the schema; `root` is what its references lead into, if not itself."""
        try:
            written = held(schema, root)
        except Unheld as error:
            raise Refusal("invalid_request", f"{field}: {error}.") from error
        name = f"s{len(self._schemas)}"
        self._schemas.append({"name": name, "json_schema": {**written, "x-guidance": _HOW}})
        return f"@{name}"

    def marker(self, text: str) -> str:
        """Where the vocabulary has a token for it, that token alone."""
        tokens = self._encode(text)
        return f"<[{tokens[0]}]>" if len(tokens) == 1 else literal(text)

    def starting_with(self, rule: str) -> str:
        """The whole of it, as llguidance takes it."""
        rules = "\n".join([f"start: {rule}", *self._rules])
        text = json.dumps({"grammars": [{"lark_grammar": rules}, *self._schemas]})
        if (over := len(text) - _LONGEST) > 0:
            raise Refusal("too_large", f"The request's schemas are {over:,} characters too long to be held to.")
        return text


def literal(text: str) -> str:
    return json.dumps(text)


def spaced(pattern: str) -> str:
    """A regular expression whose spaces stand for what JSON may have there."""
    return "/" + pattern.replace(" ", f"(?:{_SPACE})?") + "/"
