"""A validation error as sentences: which field, what was wrong, what would be right."""

from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from schemas.chat import ChatRequest

_MOST = 3  # a body that is wrong all over is not worth a page
_NUMBER = "a number"
_VERBS = ("is ", "must ", "has ")

_SENTENCES = {
    "missing": "is missing",
    "string_type": "must be a string, not {got}",
    "string_too_short": "must not be empty",
    "string_too_long": "is longer than {max_length} characters",
    "string_pattern_mismatch": "{input} does not match {pattern}",
    "bool_type": "must be true or false, not {got}",
    "int_type": "must be a whole number, not {got}",
    "int_from_float": "must be a whole number, not {got}",
    "float_type": "must be a number, not {got}",
    "finite_number": "must be a finite number",
    "list_type": "must be a list, not {got}",
    "dict_type": "must be an object, not {got}",
    "model_type": "must be an object, not {got}",
    "model_attributes_type": "must be an object, not {got}",
    "too_short": "is empty; it needs at least {min_length} entry",
    "too_long": "has {actual_length} entries; at most {max_length} are taken",
    "literal_error": "{input} is not one of {expected}",
    "union_tag_invalid": "{tag!r} is not supported; use one of {expected_tags}",
    "union_tag_not_found": "has no {discriminator}",
    "greater_than": "{input} is too small; it must be greater than {gt}",
    "greater_than_equal": "{input} is too small; the least is {ge}",
    "less_than": "{input} is too large; it must be less than {lt}",
    "less_than_equal": "{input} is too large; the most is {le}",
    "value_error": "{error}",
}


def explain(error: ValidationError) -> str:
    """One sentence a problem, the first three of them. Never echoes more than a few words of the input."""
    problems = error.errors(include_url=False)
    said = [_sentence(problem) for problem in problems[:_MOST]]
    if len(problems) > _MOST:
        said.append(f"and {len(problems) - _MOST} more")
    return "; ".join(said) + "."


def _sentence(problem: ErrorDetails) -> str:
    where = field_path(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{where} is not a field we know{_hint(problem['loc'])}"
    template = _SENTENCES.get(problem["type"])
    if template is None:
        said = problem["msg"]
    else:
        known = {**problem.get("ctx", {}), "input": _short(problem["input"]), "got": _kind(problem["input"])}
        said = template.format(**known)
    if not where:
        return said if problem["type"] == "value_error" else f"the request {said}"
    return f"{where} {said}" if said.startswith(_VERBS) else f"{where}: {said}"


def field_path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content[1].text`: as the sender would write it, without pydantic's union tags."""
    path = ""
    for i, step in enumerate(loc):
        if _is_tag(loc, i):
            continue
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _is_tag(loc: tuple[int | str, ...], i: int) -> bool:
    """Messages, parts and formats are unions: pydantic puts the chosen tag into the path after them."""
    step, before = loc[i], loc[i - 1] if i else None
    if not isinstance(step, str) or before is None:
        return False
    if isinstance(before, int):
        return "tools" not in loc[i - 2 : i] and "tool_calls" not in loc[i - 2 : i]
    return before in ("content", "tool_choice", "response_format")


def _hint(loc: tuple[int | str, ...]) -> str:
    if len(loc) > 1:
        return ""
    near = get_close_matches(str(loc[0]), ChatRequest.model_fields, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _kind(value: Any) -> str:
    kinds = {str: "a string", bool: "true or false", int: _NUMBER, float: _NUMBER, list: "a list", dict: "an object"}
    return kinds.get(type(value), "null" if value is None else type(value).__name__)
