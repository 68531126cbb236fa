"""The table of errors, what makes them, and their documentation."""

import re
from collections.abc import Iterable
from pathlib import Path

from sluice.http_errors import ErrorForm
from tests.support.stack import ROOT


def documented() -> set[tuple[int, str]]:
    page = (ROOT / "docs" / "gateway.md").read_text()
    table = page.partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d, ]+) \| (`.*?`) \|", table, re.MULTILINE)
    return {
        (int(status), code)
        for statuses, codes in rows
        for status in statuses.split(", ")
        for code in re.findall(r"`(\w+)`", codes)
        if code != "null"
    }


def test_the_page_has_every_code_with_its_status_and_no_other() -> None:
    assert documented() == {(form.status, form.code) for form in ErrorForm if form.code is not None}


def _files(package: str) -> Iterable[Path]:
    return (ROOT / "sluice" / package).rglob("*.py")


def test_the_gateway_or_the_client_makes_each_error_of_the_table() -> None:
    files = [*_files("gateway"), *_files("interfaces"), ROOT / "sluice" / "openai.py"]
    used = {name for file in files for name in re.findall(r"\bErrorForm\.([A-Z_]+)", file.read_text())}
    assert used == {form.name for form in ErrorForm}


def test_a_code_is_spelled_in_the_table_alone() -> None:
    codes = {form.code for form in ErrorForm} - {None, "cancelled", "timeout", "internal"}  # words of other things too
    files = [*_files("gateway"), *_files("interfaces"), ROOT / "sluice" / "openai.py"]
    spelled = [
        (file.name, code) for file in files for code in codes if f'code="{code}"' in (text := file.read_text())
        or f'"code": "{code}"' in text
    ]  # fmt: skip
    assert spelled == []
