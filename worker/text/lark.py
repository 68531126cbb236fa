"""A grammar for llguidance, as it is written: rules in its dialect of Lark, and the JSON schemas that they name."""

import json
from collections.abc import Mapping, Sequence
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

    def __init__(self, markers: Mapping[str, int], rewritten: Sequence[Schema] = ()) -> None:
        """`markers`: the tokens of markers that have one each. `rewritten`: the schemas of a grammar that names the
        same ones in the same order."""
        self._markers, self._rewritten = markers, rewritten
        self._rules, self._schemas = list[str](), list[Schema]()

    @property
    def schemas(self) -> Sequence[Schema]:
        """Those that were named, as they are written."""
        return self._schemas

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
        place = len(self._schemas)
        name = f"s{place}"
        if self._rewritten:
            self._schemas.append(self._rewritten[place])
            return f"@{name}"
        try:
            written = held(schema, root)
        except Unheld as error:
            raise Refusal("invalid_request", f"{field}: {error}.") from error
        self._schemas.append({"name": name, "json_schema": {**written, "x-guidance": _HOW}})
        return f"@{name}"

    def marker(self, text: str) -> str:
        """Where the vocabulary has a token for it, that token alone."""
        return f"<[{self._markers[text]}]>" if text in self._markers else literal(text)

    def starting_with(self, rule: str) -> str:
        """The whole of it, as llguidance takes it."""
        rules = "\n".join([f"start: {rule}", *self._rules])
        return _written({"grammars": [{"lark_grammar": rules}, *self._schemas]})


def _written(value: Any) -> str:
    """Return its JSON. What is too long is not written to its end: a part that many names share is repeated there."""
    parts, length = list[str](), 0
    for part in json.JSONEncoder().iterencode(value):
        parts.append(part)
        length += len(part)
        if length > _LONGEST:
            raise Refusal(
                "too_large", f"The request's schemas take over {_LONGEST:,} characters to be held to; shorten them."
            )
    return "".join(parts)


def literal(text: str) -> str:
    return json.dumps(text)


def spaced(pattern: str) -> str:
    """A regular expression whose spaces stand for what JSON may have there."""
    return "/" + pattern.replace(" ", f"(?:{_SPACE})?") + "/"
