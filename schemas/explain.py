"""Turns a validation error into sentences: the field, what is wrong, what is accepted."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from schemas.chat import ChatRequest
from schemas.embeddings import EmbeddingRequest

LocatedSchema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _ErrorLocation:
    """Location in a request."""

    path: str  # messages[0].content[1].text; empty for the request itself
    known: tuple[str, ...]  # names of the fields there


@cache  # generating it takes 20 ms, which only a request with an error needs
def _request(title: str = ChatRequest.__name__) -> LocatedSchema:
    """Return the schema of a kind of request, by the name of its class."""
    kinds = {kind.__name__: kind for kind in (ChatRequest, EmbeddingRequest)}
    return kinds.get(title, ChatRequest).model_json_schema()


def locate(loc: tuple[int | str, ...], title: str = ChatRequest.__name__) -> _ErrorLocation:
    """Return the location that pydantic's `loc` stands for in a request of the class `title`."""
    path, here = "", _request(title)
    for step in loc:
        if (chosen := _chosen(here, step)) is not None:
            here = chosen  # pydantic's name of a union's member, which is not in the request
        else:
            path, here = _longer(path, step), _inside(here, step)
    return _ErrorLocation(path, tuple(name for option in _options(here) for name in option.get("properties", ())))


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
    name = step if re.fullmatch(r"[\w$-]{1,40}", step, re.ASCII) else short_repr(step)
    return f"{path}.{name}" if path else name


def short_repr(text: str, max_characters: int = 40) -> str:
    """Return the text in quotes, on one line, and cut if it is long."""
    text_repr = repr(text[:max_characters])
    return text_repr if len(text_repr) <= max_characters else f"{text_repr[: max_characters - 4]}...{text_repr[0]}"


_SENTENCES = {
    "missing": "{where} is missing",
    "extra_forbidden": "{where}: unknown field",
    "wrong_type": "{where} {message}, not {got}",
    "string_type": "{where} must be a string, not {got}",
    "string_unicode": "{where} holds half of a surrogate pair, which is no character: {input}",
    "string_too_short": "{where} must not be empty",
    "string_too_long": "{where} is longer than {max_length} characters",
    "string_pattern_mismatch": "{where}: {input} does not match {pattern}",
    "bool_type": "{where} must be true or false, not {got}",
    "int_type": "{where} must be a whole number, not {got}",
    "float_type": "{where} must be a number, not {got}",
    "float_too_large": "{where}: {input} is too large",
    "finite_number": "{where} must be a finite number, not {got}",
    "list_type": "{where} must be a list, not {got}",
    "dict_type": "{where} must be an object, not {got}",
    "model_type": "{where} must be an object, not {got}",
    "model_attributes_type": "{where} must be an object, not {got}",
    "none_required": "{where} is not supported; leave it out",
    "too_short": "{where} must not be empty",
    "too_long": "{where} has {actual_length} entries; at most {max_length} are taken",
    "literal_error": "{where}: {input} is not supported; use {expected}",
    "union_tag_not_found": "{where} is missing",
    "union_tag_invalid": "{where}: {input} is not supported; use {expected_tags}",
    "greater_than": "{where}: {input} is too small; it must be more than {gt}",
    "greater_than_equal": "{where}: {input} is too small; the least is {ge}",
    "less_than_equal": "{where}: {input} is too large; the most is {le}",
    "value_error": "{where} {error}",
    "disagreement": "{message}",
}
_OTHERWISE = "{where}: {input} is not accepted; see docs/contract.md"


# (length of a common prefix, difflib's least ratio): with a longer prefix the names may differ more.
_LIKENESS = ((0, 0.88), (1, 0.85), (3, 0.76))


def explain(error: ValidationError) -> str:
    """Return a sentence for each of the first three problems. Echoes only a few words of the input."""
    problems = _relevant(error.errors(include_url=False))
    # More are no help if a body is wrong everywhere.
    sentences = [_sentence(problem, error.title) for problem in problems[:3]]
    if unnamed := len(problems[3:]):
        sentences.append(f"And {unnamed} more")
    return " ".join(each if each.endswith("?") else f"{each}." for each in sentences)


def field_of(error: ValidationError) -> str | None:
    """Return the field of the first problem, or None if that is the request itself."""
    return _where(_relevant(error.errors(include_url=False))[0], error.title) or None


def _relevant(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop the problems in other fields of an object whose `type` is wrong."""
    others = {each["loc"][:-1] for each in problems if each["type"] == "literal_error" and each["loc"][-1] == "type"}
    return [each for each in problems if each["loc"][-1:] == ("type",) or each["loc"][:-1] not in others]


def _sentence(problem: ErrorDetails, title: str) -> str:
    kind = problem["type"]
    value = problem["input"]
    context = problem.get("ctx", {})
    if _lacks_tag(problem):
        value = value.get(_tag(problem))
    if kind == "float_type" and type(value) is int:
        kind = "float_too_large"
    sentence = _SENTENCES.get(kind, _OTHERWISE).format(
        **{name: _readable(name, each) for name, each in context.items()},
        where=_where(problem, title) or "the request",
        input=_shown(value),
        got="a string" if isinstance(value, str) else _shown(value),
        message=" ".join(problem["msg"].split())[:120],
    )
    return sentence + _hint(problem["loc"], title) if kind == "extra_forbidden" else sentence


def _where(problem: ErrorDetails, title: str) -> str:
    """Return the place of the problem; empty for the request itself."""
    if problem["type"] == "disagreement":
        return str(problem["ctx"]["field"])
    path = locate(_loc(problem), title).path
    return f"{path}.{_tag(problem)}" if _lacks_tag(problem) else path


def _lacks_tag(problem: ErrorDetails) -> bool:
    """True if the object has no valid `type`, or whatever tells the kinds of such objects apart."""
    return problem["type"].startswith("union_tag") and isinstance(problem["input"], dict)


def _tag(problem: ErrorDetails) -> str:
    return str(problem["ctx"]["discriminator"]).strip("'")


def _loc(problem: ErrorDetails) -> tuple[int | str, ...]:
    """Return the path of the problem. For a wrong name, pydantic appends the name and "[key]", which are removed."""
    loc = problem["loc"]
    by_name = len(loc) > 2 and loc[-1] == "[key]" and problem["type"] != "extra_forbidden"
    return loc[:-2] if by_name else loc


def _hint(loc: tuple[int | str, ...], title: str) -> str:
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", str(loc[-1])[:40]).lower()
    meant = _meant(snake, locate(loc[:-1], title).known)
    return f"; did you mean {meant}?" if meant else "; leave it out"


def _meant(name: str, known: Sequence[str]) -> str | None:
    """Return the known field that is spelled similarly, or that begins with the name.

    A field that only shares letters, as max_tokens does with min_tokens, would mislead the client.
    """
    for same, cutoff in _LIKENESS:
        alike = [field for field in known if field[:same] == name[:same]]
        if near := get_close_matches(name, alike, n=1, cutoff=cutoff):
            return near[0]
    longer = [field for field in known if field.rpartition("_")[0] == name or name in (f"{field}s", f"{field}ing")]
    return longer[0] if len(longer) == 1 else None


def _readable(name: str, context: object) -> str:
    """Format bounds without a needless ".0", and choices with "or" before the last."""
    if name == "expected_tags":
        return " or ".join(str(context).rsplit(", ", 1))
    return f"{context:g}" if isinstance(context, float) else str(context)


def _shown(value: object) -> str:
    if isinstance(value, str):
        return short_repr(value)
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and value.bit_length() > 100:
        return f"a number of some {value.bit_length() * 30103 // 100_000 + 1} digits"
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return type(value).__name__
