"""Leaves out of a function's schema what cannot be enforced, so that one tool's schema ends no agent's session."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from worker.text.grammar.schema.choices import CONDITIONS
from worker.text.grammar.schema.formats import FORMATS
from worker.text.grammar.schema.references import DATA, NAMED
from worker.text.grammar.schema.rewrite import REFUSED, rewrite
from worker.text.grammar.schema.unsupported import Schema, UnsupportedKeyword

_MOST_LEFT_OUT = 40  # places, each of which takes another attempt to rewrite the schema
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
            if len(left_out) == _MOST_LEFT_OUT or (strict and not is_format):
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
        for schema in _schemas(root):
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


def _schemas(root: Schema) -> Iterator[Schema]:
    """Yield each schema within one, itself included."""
    waiting: list[tuple[Any, bool]] = [(root, True)]
    while waiting:
        found, is_schema = waiting.pop()
        if isinstance(found, list):
            waiting += [(each, True) for each in found]
        elif isinstance(found, dict):
            if is_schema:
                yield found
            waiting += [
                (each, not (is_schema and key in NAMED))
                for key, each in found.items()
                if not (is_schema and key in DATA)
            ]
