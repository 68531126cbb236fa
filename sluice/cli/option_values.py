"""Readers of options' values, with errors in plain words: typer's own quote the library that checks them."""

from collections.abc import Callable
from typing import TypeVar

import typer

from sluice.wire import LANES, Lane

N = TypeVar("N", int, float)


def whole(least: int | None = None, most: int | None = None) -> Callable[[str | int], int]:
    """Return a reader of whole numbers."""

    def read(given: str | int) -> int:
        try:
            return _within(int(given), least, most)
        except ValueError:
            raise typer.BadParameter(f"it must be a whole number, not {str(given)!r}.") from None

    return read


def number(least: float | None = None) -> Callable[[str | float], float]:
    """Return a reader of numbers."""

    def read(given: str | float) -> float:
        try:
            return _within(float(given), least, None)
        except ValueError:
            raise typer.BadParameter(f"it must be a number, not {str(given)!r}.") from None

    return read


def lane(given: str) -> Lane:
    """Return the lane. Raises typer.BadParameter."""
    if given not in LANES:
        raise typer.BadParameter(f"it must be {' or '.join(LANES)}, not {given!r}.")
    return given


def _within(value: N, least: N | None, most: N | None) -> N:
    if least is not None and value < least:
        raise typer.BadParameter(f"it must be at least {least}, not {value}.")
    if most is not None and value > most:
        raise typer.BadParameter(f"it must be at most {most}, not {value}.")
    return value
