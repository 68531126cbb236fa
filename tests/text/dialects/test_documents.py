"""docs/models.md shows of each family what is found out about its template, and names every dialect."""

import re
from pathlib import Path

from tests.text.dialects.families import BY_SUITES, FOUND, SHOWN, WITHOUT_CALLS
from worker.engine.vision.load import _KNOWN
from worker.text.dialects.table import DIALECTS

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def row_of(family: str) -> tuple[str, ...]:
    """Return the family's row: its name, calls, thoughts and images."""
    template, types = SHOWN[family]
    dialect, _, thoughts = FOUND[template]
    assert {*types} <= {*_KNOWN}
    begins = "`analysis`" if dialect == "harmony" else thoughts and f"`{thoughts.removesuffix('<|message|>')}`"
    return family, dialect and f"`{dialect}`", begins.replace("|", "\\|"), "yes" if types else ""


def _table(heading: str) -> list[tuple[str, ...]]:
    table = PAGE.read_text(encoding="utf-8").partition(heading)[2].partition("\n\n")[0]
    rows = [re.split(r"(?<!\\)\|", row)[1:-1] for row in table.splitlines()[2:]]
    return [tuple(cell.strip() for cell in row) for row in rows]


def test_the_page_about_models_shows_what_is_found_out_about_each_family() -> None:
    assert _table("| family | calls | thoughts | images |") == [row_of(family) for family in SHOWN]


def test_the_page_about_models_names_each_dialect() -> None:
    shown = {dialect for family in SHOWN for dialect in re.findall(r"`(.+)`", row_of(family)[1])}
    others = PAGE.read_text(encoding="utf-8").partition("By public suites alone:")[2].partition(".\n")[0]
    assert {*re.findall(r"`([\w.]+)`", others)} == BY_SUITES
    assert shown | BY_SUITES == {dialect.name for dialect in DIALECTS} | {"harmony"}


def test_each_dialect_that_is_found_is_that_of_a_family_that_is_shown() -> None:
    assert {dialect for dialect, _, _ in FOUND.values() if dialect} <= {FOUND[each][0] for each, _ in SHOWN.values()}
    assert all(FOUND[template][0] == "" for template in WITHOUT_CALLS)
