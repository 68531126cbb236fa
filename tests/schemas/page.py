"""What docs/contract.md says, taken apart."""

import json
import re
from typing import Any

from tests.schemas.bodies import DOCS

TEXT = (DOCS / "contract.md").read_text()
_JSON_LINES = [
    json.loads(line) for block in re.findall(r"```json\n(.*?)```", TEXT, re.S) for line in block.splitlines()
]

EVENTS: dict[str, dict[str, Any]] = {said["type"]: said for said in _JSON_LINES if "type" in said}
(RESULT,) = [said for said in _JSON_LINES if "type" not in said]


def section(title: str) -> str:
    """From a heading of that title to the next one."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", TEXT, re.S | re.M)
    assert found is not None, f"docs/contract.md has no section {title!r}"
    return found[1]


def rows(title: str) -> list[list[str]]:
    """The cells of all tables of a section, without their headings."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def names(cell: str) -> list[str]:
    """What stands in code quotes."""
    return re.findall(r"`([^`]+)`", cell)
