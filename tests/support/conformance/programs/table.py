"""The table of programs and checks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date

from rich import box
from rich.table import Table

from tests.support.conformance.programs.checks import CHECKS


@dataclass(frozen=True, slots=True)
class Passed:
    """The check passed."""


@dataclass(frozen=True, slots=True)
class Missing:
    """The program has nothing that the check drives."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The check failed."""

    reason: str


@dataclass(frozen=True, slots=True)
class OwnFault:
    """The check failed as it is known to, by the program's own fault."""

    reason: str


Cell = Passed | Missing | Failure | OwnFault


@dataclass(slots=True)
class Row:
    """The cells of a program. `problem`: why it could not be driven. `day`: of the run, in a table of the documents."""

    program: str
    version: str = "-"
    cells: dict[str, Cell] = field(default_factory=dict)
    problem: str | None = None
    day: date | None = None

    @property
    def passed(self) -> bool:
        """True if nothing failed by ours."""
        return self.problem is None and not any(isinstance(cell, Failure) for cell in self.cells.values())


def table(rows: Sequence[Row]) -> Table:
    """Return the table: a row for each program, and a column for each check."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("program", no_wrap=True)
    columns = [name for name in CHECKS if any(name in row.cells for row in rows)]
    for name in columns:
        shown.add_column(name, justify="center")
    for row in rows:
        named = f"{row.program} [dim]{row.version}[/]"
        shown.add_row(named, *(_shown(row.cells.get(name, Missing())) for name in columns))
    return shown


def _shown(cell: Cell) -> str:
    match cell:
        case Passed():
            return "[green]pass[/]"
        case Failure():
            return "[bold red]FAIL[/]"
        case OwnFault():
            return "[yellow]own fault[/]"
        case Missing():
            return "[dim]·[/]"


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return a line for each cell that did not pass, and for each program that could not be driven."""
    lines = [f"{row.program}: {row.problem}" for row in rows if row.problem]
    for row in rows:
        for name, cell in row.cells.items():
            match cell:
                case Failure(reason):
                    lines.append(f"{row.program}, {name}: {reason}")
                case OwnFault(reason):
                    lines.append(f"{row.program}, {name}: client's own fault: {reason}")
    return lines
