"""Values as JSON compares them: 1 is 1.0, and neither is true."""

from collections.abc import Callable, Hashable
from typing import Any

Take = Callable[[], None]

# Whole numbers from here on are compared by their digits: many of them can be chosen to have the same hash.
_SPELLED = 2**53
KINDS = frozenset({"null", "boolean", "number", "string", "array", "object"})


def kind(value: Any) -> str:
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
    return kind(value) == "number" and (isinstance(value, int) or value.is_integer())


def key(value: Any, take: Take) -> Hashable:
    """Return what two values have in common if JSON has them equal. Calls `take` for each value within."""
    take()
    match value:
        case list():
            return "array", tuple(key(each, take) for each in value)
        case dict():
            return "object", frozenset((name, key(each, take)) for name, each in value.items())
        case int() | float() if abs(value) >= _SPELLED and is_integer(value):
            return "integer", str(int(value))
    return kind(value), value
