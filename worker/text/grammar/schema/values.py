"""Compares values as JSON does: 1 equals 1.0, and neither equals true."""

from collections.abc import Callable, Hashable
from typing import Any

Take = Callable[[], None]

# Integers from here on are compared by their digits: a client could choose many that have the same hash.
_SPELLED = 2**53
KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})


def kind(value: Any) -> str:
    """Return the value's JSON type, one of `KINDS`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def is_integer(value: Any) -> bool:
    """True for a number without a fraction, such as 2 or 2.0."""
    return kind(value) == "number" and (isinstance(value, int) or value.is_integer())


def key(value: Any, take: Take) -> Hashable:
    """Return a hashable key that is equal for values that are equal in JSON. Calls `take` for each value within."""
    take()
    match value:
        case list():
            return "array", tuple(key(each, take) for each in value)
        case dict():
            return "object", frozenset((name, key(each, take)) for name, each in value.items())
        case int() | float() if abs(value) >= _SPELLED and is_integer(value):
            return "integer", str(int(value))
    return kind(value), value
