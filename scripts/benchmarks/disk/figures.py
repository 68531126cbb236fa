"""A figure of a benchmark, and its bar."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its bar."""

    measured: str
    value: float
    text: str  # the value as it is printed
    bar: str = ""
    holds: bool | None = None  # None without a bar


def at_most(measured: str, value: float, bar: float, detail: str = "") -> Figure:
    """Return the figure of a value that has to be at most `bar`."""
    return Figure(measured, value, f"{value:.2f}{detail}", f"≤ {bar:g}", value <= bar)
