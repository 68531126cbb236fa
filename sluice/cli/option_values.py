"""Parsers of option values, with plain error messages: typer's own quote the library that checks them."""

from collections.abc import Callable
from typing import TypeVar

import typer

from sluice.contract.keys import LANES, Lane

N = TypeVar("N", int, float)


def integer(minimum: int | None = None, maximum: int | None = None) -> Callable[[str | int], int]:
    """Return a parser of whole numbers within these bounds."""

    def read(value: str | int) -> int:
        try:
            return _within(int(value), minimum, maximum)
        except ValueError:
            raise typer.BadParameter(f"it must be a whole number, not {str(value)!r}.") from None

    return read


def number(minimum: float | None = None) -> Callable[[str | float], float]:
    """Return a parser of numbers that are at least `minimum`."""

    def read(value: str | float) -> float:
        try:
            return _within(float(value), minimum, None)
        except ValueError:
            raise typer.BadParameter(f"it must be a number, not {str(value)!r}.") from None

    return read


def lane(value: str) -> Lane:
    """Parse a lane. Raises typer.BadParameter."""
    if value not in LANES:
        raise typer.BadParameter(f"it must be {' or '.join(LANES)}, not {value!r}.")
    return value


def _within(value: N, minimum: N | None, maximum: N | None) -> N:
    if minimum is not None and value < minimum:
        raise typer.BadParameter(f"it must be at least {minimum}, not {value}.")
    if maximum is not None and value > maximum:
        raise typer.BadParameter(f"it must be at most {maximum}, not {value}.")
    return value
