"""Writes what was tried into the table of docs/clients/README.md.

A run replaces the cells that it has, so that the table may be made in pieces; a row has one version of its program.
"""

import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from tests.support.conformance.programs.checks import CHECKS
from tests.support.conformance.programs.programs import PROGRAMS
from tests.support.conformance.programs.table import Cell, Failure, Missing, OwnFault, Passed, Row

_README = "README.md"
_BEGIN, _END = "<!-- by scripts/conformance --write -->\n", "<!-- end -->\n"
_HEAD = "| program | version | on | did not pass |\n|---|---|---|---|\n"
_NOTHING = "–"
_WIDTH = 120  # letters of a line


def write(rows: Sequence[Row], pages: Path, day: date) -> None:
    """Write the rows of a run of `day` into the document of the folder `pages`."""
    readme = pages / _README
    text = readme.read_text("utf-8")
    readme.write_text(with_table(text, merge(read_rows(text), rows, day)), "utf-8")


def read_rows(readme: str) -> dict[str, Row]:
    """Return the rows of the table, in the order of `PROGRAMS`. The reason of a failure is not kept."""
    lines = readme.partition(_BEGIN)[2].partition(_END)[0].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    rows = dict[str, Row]()
    for name, version, day, others in table[2:]:
        if name in PROGRAMS:
            rows[name] = Row(name, version, _cells(name, others), day=date.fromisoformat(day))
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
    lines = "".join(f"| {row.program} | {row.version} | {row.day} | {_others(row)} |\n" for row in rows.values())
    faults = defaultdict[tuple[str, str], list[str]](list)
    for row in rows.values():
        for check, cell in row.cells.items():
            if isinstance(cell, OwnFault):
                faults[check, cell.reason].append(row.program)
    told = "".join(_wrapped(f"- {check}, {', '.join(names)}: {why}") for (check, why), names in faults.items())
    return f"{before}{_BEGIN}{_HEAD}{lines}\n{told}{_END}{after}"


def _others(row: Row) -> str:
    """Return the checks that a program did not pass, by kind, as `own fault: gateway; without: images`."""
    kinds = {"own fault": OwnFault, "without": Missing, "fails": Failure, "not tried": type(None)}
    found = {
        kind: [check for check in CHECKS if isinstance(row.cells.get(check), of_kind)]
        for kind, of_kind in kinds.items()
    }
    return "; ".join(f"{kind}: {', '.join(checks)}" for kind, checks in found.items() if checks) or _NOTHING


def _cells(program: str, others: str) -> dict[str, Cell]:
    """Return the cells of a row; a check that it does not name was passed."""
    cells: dict[str, Cell | None] = {check: Passed() for check in CHECKS}
    for part in others.split("; ") if others != _NOTHING else ():
        kind, _, checks = part.partition(": ")
        cells.update({check: _cell(program, check, kind) for check in checks.split(", ")})
    return {check: cell for check, cell in cells.items() if cell is not None}


def _cell(program: str, check: str, kind: str) -> Cell | None:
    match kind:
        case "own fault" if check in PROGRAMS[program].faults:
            return OwnFault(PROGRAMS[program].faults[check].why)
        case "fails":
            return Failure("")
        case "without":
            return Missing()
        case _:
            return None


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False) + "\n"
