"""Locates an error in a request, in the sender's terms: follows pydantic's path through the JSON schema."""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from schemas.chat import ChatRequest

LocatedSchema = dict[str, Any]

_MAX_QUOTED = 40


@dataclass(frozen=True, slots=True)
class ErrorLocation:
    """Location in a request."""

    path: str  # messages[0].content[1].text; empty for the request itself
    known: tuple[str, ...]  # names of the fields there


@cache  # generating it takes 20 ms, which only a request with an error needs
def _request() -> LocatedSchema:
    return ChatRequest.model_json_schema()


def locate(loc: tuple[int | str, ...]) -> ErrorLocation:
    """Return the location that pydantic's `loc` stands for."""
    path, here = "", _request()
    for step in loc:
        if (chosen := _chosen(here, step)) is not None:
            here = chosen  # pydantic's name of a union's member, which is not in the request
        else:
            path, here = _longer(path, step), _inside(here, step)
    return ErrorLocation(path, tuple(name for option in _options(here) for name in option.get("properties", ())))


def _options(schema: LocatedSchema) -> list[LocatedSchema]:
    """Return the schemas that a value may match, with references resolved. A tagged union is one of them."""
    if "$ref" in schema:
        return _options(_request()["$defs"][schema["$ref"].removeprefix("#/$defs/")])
    if "anyOf" in schema:
        return [option for each in schema["anyOf"] for option in _options(each)]
    return [schema]


def _chosen(schema: LocatedSchema, tag: int | str) -> LocatedSchema | None:
    """Return the member of a tagged union, or None if there is no such union."""
    for union in _options(schema):
        if tag in union.get("discriminator", {}).get("mapping", ()):
            return {"$ref": union["discriminator"]["mapping"][tag]}
        for member in union.get("oneOf", ()):
            if any(option.get("type") == tag for option in _options(member)):
                return dict(member)
    return None


def _inside(schema: LocatedSchema, step: int | str) -> LocatedSchema:
    """Return the schema of a field or an item. Empty if any value is allowed, or none."""
    for option in _options(schema):
        found = option.get("items") if isinstance(step, int) else option.get("properties", {}).get(step)
        if found is not None:
            return dict(found)
    return {}


def _longer(path: str, step: int | str) -> str:
    if isinstance(step, int):
        return f"{path}[{step}]"
    name = step if re.fullmatch(r"[\w$-]{1,40}", step, re.ASCII) else quoted(step)
    return f"{path}.{name}" if path else name


def quoted(text: str) -> str:
    """Return the text in quotes, on one line, and cut if it is long."""
    text_repr = repr(text[:_MAX_QUOTED])
    return text_repr if len(text_repr) <= _MAX_QUOTED else f"{text_repr[: _MAX_QUOTED - 4]}...{text_repr[0]}"
