"""Writes what was tried into docs/clients: the table of its README.md, and a paragraph of each page.

A run replaces the cells that it has, so that the table may be made in pieces; a row has one version of its program.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from tests.support.conformance.programs.checks import CHECKS
from tests.support.conformance.programs.programs import PROGRAMS
from tests.support.conformance.programs.table import Cell, Failure, Missing, OwnFault, Passed, Row

_README = "README.md"
_BEGIN, _END = "<!-- by scripts/conformance --write -->\n", "<!-- end -->\n"
_TRIED = "**Tried**"  # the beginning of a paragraph on a page
_WIDTH = 120  # letters of a line


def write(rows: Sequence[Row], pages: Path, day: date) -> None:
    """Write the rows of a run of `day` into the documents of the folder `pages`."""
    readme = pages / _README
    text = readme.read_text("utf-8")
    known = merge(read_rows(text), rows, day)
    readme.write_text(with_table(text, known), "utf-8")
    for page in sorted(page_of(name) for name in known):
        file = pages / f"{page}.md"
        file.write_text(with_paragraphs(file.read_text("utf-8"), _of_page(known, page)), "utf-8")


def page_of(program: str) -> str:
    """Return the name of the program's page."""
    return PROGRAMS[program].page or program


def read_rows(readme: str) -> dict[str, Row]:
    """Return the rows of the table, in the order of `PROGRAMS`. The reason of a failure is not kept."""
    lines = readme.partition(_BEGIN)[2].partition(_END)[0].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    rows = dict[str, Row]()
    for name, version, day, *signs in table[2:]:
        if name not in PROGRAMS:
            continue
        cells = {check: _cell(name, check, sign) for check, sign in zip(table[0][3:], signs, strict=True)}
        told = {check: cell for check, cell in cells.items() if cell is not None}
        rows[name] = Row(name, version, told, day=date.fromisoformat(day))
    return rows


def merge(known: Mapping[str, Row], rows: Sequence[Row], day: date) -> dict[str, Row]:
    """Return the known rows with the cells of a run of `day`; those of another version are dropped."""
    merged = dict(known)
    for row in rows:
        if row.problem is not None:
            continue
        before = known.get(row.program)
        cells = before.cells if before is not None and before.version == row.version else {}
        merged[row.program] = Row(row.program, row.version, {**cells, **row.cells}, day=day)
    return {name: merged[name] for name in PROGRAMS if name in merged}


def with_table(readme: str, rows: Mapping[str, Row]) -> str:
    """Return the text with the table of these rows, and the faults of programs below it."""
    before, _, rest = readme.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    head = f"| program | version | on | {' | '.join(CHECKS)} |\n|---|---|---|{':-:|' * len(CHECKS)}\n"
    lines = "".join(_line(row) for row in rows.values())
    faults = [
        _wrapped(f"- {row.program}, {check}: {cell.reason}", "  ")
        for row in rows.values()
        for check, cell in row.cells.items()
        if isinstance(cell, OwnFault)
    ]
    return f"{before}{_BEGIN}{head}{lines}\n{''.join(faults)}{_END}{after}"


def with_paragraphs(page: str, rows: Sequence[Row]) -> str:
    """Return the text of a page that ends with what was tried."""
    text = re.sub(rf"\n{re.escape(_TRIED)}(.+\n)+", "", page)
    return text + "".join(f"\n{_wrapped(_paragraph(row, named=len(rows) > 1))}" for row in rows)


def _line(row: Row) -> str:
    signs = " | ".join(_sign(row.cells.get(check)) for check in CHECKS)
    return f"| {row.program} | {row.version} | {row.day} | {signs} |\n"


def _of_page(rows: Mapping[str, Row], page: str) -> list[Row]:
    return [row for row in rows.values() if page_of(row.program) == page]


def _paragraph(row: Row, *, named: bool) -> str:
    by = {
        kind: [check for check in CHECKS if isinstance(row.cells.get(check), kind)]
        for kind in (Passed, OwnFault, Failure)
    }
    told = [f"{_TRIED} with {row.program + ' ' if named else ''}{row.version} on {row.day}: {', '.join(by[Passed])}."]
    faults = PROGRAMS[row.program].faults
    told += [f"By its own fault not {check}: {faults[check].why}." for check in by[OwnFault]]
    if by[Failure]:
        told.append(f"What fails: {', '.join(by[Failure])}.")
    return " ".join(told)


def _cell(program: str, check: str, sign: str) -> Cell | None:
    match sign:
        case "✓":
            return Passed()
        case "own" if check in PROGRAMS[program].faults:
            return OwnFault(PROGRAMS[program].faults[check].why)
        case "✗":
            return Failure("")
        case "–":
            return Missing()
        case _:
            return None


def _sign(cell: Cell | None) -> str:
    match cell:
        case Passed():
            return "✓"
        case OwnFault():
            return "own"
        case Failure():
            return "✗"
        case Missing():
            return "–"
        case None:
            return ""


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) + "\n"
