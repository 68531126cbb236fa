"""docs/models.md names every dialect, and no other."""

import re
from pathlib import Path

from worker.text.dialects.table import DIALECTS

PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_page_about_models_names_each_dialect() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| dialect | for example |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([\w.]+)`", row.split("|")[1])}
    assert named == {dialect.name for dialect in DIALECTS} | {"harmony"}
