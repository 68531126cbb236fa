"""Reads the tables and examples of docs/contract.md."""

import json
import re
from typing import Any

from tests.schemas.bodies import DOCS

TEXT = (DOCS / "contract.md").read_text()
_JSON_LINES = [
    json.loads(line) for block in re.findall(r"```json\n(.*?)```", TEXT, re.S) for line in block.splitlines()
]

EVENTS: dict[str, dict[str, Any]] = {said["type"]: said for said in _JSON_LINES if "type" in said}
RESULT, COUNT, EMBEDDINGS = [said for said in _JSON_LINES if "type" not in said]


def section(title: str) -> str:
    """Return the text from the heading with this title to the next heading."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.S | re.M)
    assert found is not None, f"docs/contract.md has no section {title!r}"
    return found[1]


def rows(title: str) -> list[list[str]]:
    """Return the cells of all tables of a section, without the headings."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    """Return the texts in backquotes."""
    return re.findall(r"`([^`]+)`", cell)
