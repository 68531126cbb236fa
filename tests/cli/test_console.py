"""Consoles whose width nobody knows."""

import io

import pytest

from sluice.cli.terminal.view import console


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("00", 80), ("100", 100)])
def test_no_width_is_taken_for_80_columns(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    printed = console()
    printed.file = io.StringIO()
    printed.print("word " * 100)
    assert max(map(len, printed.file.getvalue().splitlines())) <= width
    assert len(printed.file.getvalue().splitlines()) == -(-500 // width)
