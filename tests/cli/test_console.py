"""Consoles whose width nobody knows, and what is said on a terminal alone."""

import io

import pytest
from rich.console import Console

from sluice.cli.terminal import view
from sluice.cli.terminal.view import console, say_that_it_reads


@pytest.mark.parametrize(("columns", "width"), [("0", 80), ("00", 80), ("100", 100)])
def test_no_width_is_taken_for_80_columns(monkeypatch: pytest.MonkeyPatch, columns: str, width: int) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    printed = console()
    printed.file = io.StringIO()
    printed.print("word " * 100)
    assert max(map(len, printed.file.getvalue().splitlines())) <= width
    assert len(printed.file.getvalue().splitlines()) == -(-500 // width)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_alone_is_told_what_the_next_seconds_are_for(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    printed = io.StringIO()
    monkeypatch.setattr(view, "notes", Console(file=printed, force_terminal=is_terminal, width=80))
    say_that_it_reads("models/tiny-chat")
    assert ("reading models/tiny-chat" in printed.getvalue()) == is_terminal
    assert bool(printed.getvalue()) == is_terminal
