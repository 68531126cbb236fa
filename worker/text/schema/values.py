"""Values as JSON compares them: 1 is 1.0, and neither is true."""

from collections.abc import Hashable
from typing import Any

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


def key(value: Any) -> Hashable:
    """Return what two values have in common if JSON has them equal."""
    match value:
        case list():
            return "array", tuple(map(key, value))
        case dict():
            return "object", frozenset((name, key(each)) for name, each in value.items())
    return kind(value), value
