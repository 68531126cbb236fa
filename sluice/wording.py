"""Parts of messages: numbers with nouns, sentences, and what is wrong with a text that should be JSON, or a setting."""

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from json import JSONDecodeError
from typing import Any


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: `1 line`, `2,000 lines`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def full_sentence(text: str) -> str:
    """Return the text with a capital first letter and an end mark."""
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "?", "!")) else ".")


def json_problem(error: ValueError | RecursionError) -> str:
    """Return the clause that says why a text is not JSON: for a mistake of syntax the place, and what stands there."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, JSONDecodeError):
        return str(error)
    around = 20  # characters on each side of the mistake: enough to find it, and too few to fill a message
    before = error.doc[max(error.pos - around, 0) : error.pos]
    there = error.doc[error.pos : error.pos + around]
    place = f"line {error.lineno:,} column {error.colno:,}"
    after = f", after {before!a}" if before else ""
    return f"{error.msg.removesuffix(' at')} at {place}: {ascii(there) if there else 'the text ends'}{after}"


_CANCELLED = {
    "requested": "The job was cancelled, as requested.",
    "disconnected": "The job was cancelled, since its client has left.",
}


def cancelled_sentence(reason: str) -> str:
    """Return the message for a job that ended as `cancelled`, by the reason in its event."""
    return _CANCELLED.get(reason) or f"The job was cancelled, for this reason: {reason}."


_WRONG_VALUES = {  # by pydantic's name of the error
    "int_parsing": "it must be a whole number",
    "int_parsing_size": "it must be a whole number with fewer digits",
    "int_from_float": "it must be a whole number",
    "float_parsing": "it must be a number",
    "finite_number": "it must be a finite number",
    "bool_parsing": "it must be true or false",
    "greater_than": "it must be more than {gt}",
    "greater_than_equal": "it must be at least {ge}",
    "less_than_equal": "it must be at most {le}",
    "literal_error": "it must be {expected}",
    "string_pattern_mismatch": "it must match {pattern}",
    "string_too_short": "it must not be empty",
    "value_error": "{error}",
}


def value_problem(error: Mapping[str, Any]) -> str:
    """Return what is wrong with the value of a setting, without the value. `error`: one of pydantic's `errors()`."""
    bounds = {name: f"{each:g}" if isinstance(each, float) else each for name, each in error.get("ctx", {}).items()}
    return _WRONG_VALUES.get(error["type"], "it is not valid; see .env.example").format(**bounds)


def unknown_setting(name: str, known: Collection[str]) -> str:
    """Return the message for a variable that is not one of the known settings."""
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "see .env.example for the names."
    return f"{name} is not a setting; {hint}"
