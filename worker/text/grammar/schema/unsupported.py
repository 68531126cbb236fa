"""A client's JSON Schema: the error for one that cannot be enforced, the limit of the work on it, and equality of
values as JSON has it: 1 equals 1.0, and neither equals true."""

import json
from collections.abc import Callable, Hashable
from typing import Any

Schema = dict[str, Any]


class UnsupportedKeyword(ValueError):
    """A keyword cannot be enforced. `place`: its JSON pointer. `reason`: what is wrong, and what to do."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(place, reason)
        self.place, self.reason = place, reason

    def __str__(self) -> str:
        is_short = len(self.place) <= 120
        return f"{self.place if is_short else '…' + self.place[-120:]}: {self.reason}"


def quoted(value: object) -> str:
    """Return a client's value in a form that is short and printable enough for an error message."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    most = 60  # characters
    if isinstance(value, int) and abs(value) >= 10**most:
        return f"a whole number of over {most} digits"
    text = value if isinstance(value, str) else json.dumps(value)
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:200])
    return text if len(text) <= most else text[:most] + "…"


class BudgetExceeded(Exception):
    """The limit of a schema's steps is reached."""


class Budget:
    """Steps left for one schema. Every loop over a client's list takes one step for each member that it visits."""

    def __init__(self, steps: int = 300_000, error: Callable[[], Exception] = BudgetExceeded) -> None:
        """`steps`: the default takes some 0.3 s. `error`: returns what is raised if too few are left."""
        self._left, self._error = steps, error

    def take(self, count: int = 1) -> None:
        """Subtract `count` steps. Raises `BudgetExceeded`, or the other `error`, if fewer are left."""
        self._left -= count
        if self._left < 0:
            raise self._error()


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


def key(value: Any, budget: Budget) -> Hashable:
    """Return a hashable key that is equal for values that are equal in JSON. Takes a step for each value within."""
    budget.take()
    match value:
        case list():
            return "array", tuple(key(each, budget) for each in value)
        case dict():
            return "object", frozenset((name, key(each, budget)) for name, each in value.items())
        # Large integers are compared by their digits: a client could choose many that have the same hash.
        case int() | float() if abs(value) >= 2**53 and is_integer(value):
            return "integer", str(int(value))
    return kind(value), value
