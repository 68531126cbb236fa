"""Every exception is caught by name, except at the borders that CONTRIBUTING.md names, and every text file is read and
written with an encoding, since that of the locale may be another."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BROAD = {"Exception", "BaseException"}
BORDERS = {"sluice/gateway/monitoring.py": 1}  # of the client, the command and the gateway: a request


def broad_handlers(source: str) -> Iterator[int]:
    """Yield the lines of handlers that catch every exception."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            caught = {name.id for name in ast.walk(node.type) if isinstance(name, ast.Name)} if node.type else BROAD
            if caught & BROAD:
                yield node.lineno


def test_the_producer_s_side_catches_everything_at_one_border_only() -> None:
    files = {str(file.relative_to(ROOT)): file for file in (ROOT / "sluice").rglob("*.py")}
    found = {name: len(list(broad_handlers(file.read_text()))) for name, file in files.items()}
    assert {name: count for name, count in found.items() if count} == BORDERS


@pytest.mark.parametrize(
    ("handler", "broad"),
    [("except:", True), ("except Exception:", True), ("except (OSError, BaseException) as e:", True),
     ("except ValueError:", False), ("except* Exception:", True)],
)  # fmt: skip
def test_a_broad_handler_is_found(handler: str, broad: bool) -> None:
    assert bool(list(broad_handlers(f"try:\n    f()\n{handler}\n    g()\n"))) == broad


def without_encoding(source: str) -> Iterator[int]:
    """Yield the lines of calls that read or write a text in the locale's encoding."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="read_text"), args=[], keywords=options):
                pass
            case ast.Call(func=ast.Attribute(attr="write_text"), args=[_], keywords=options):
                pass
            case ast.Call(func=ast.Name("open"), args=[_] | [_, ast.Constant("r" | "w" | "a")], keywords=options):
                pass
            case ast.Call(
                func=ast.Attribute(attr="open"), args=[ast.Constant("r" | "w" | "a" | "a+")], keywords=options
            ):
                pass
            case _:
                continue
        if all(option.arg != "encoding" for option in options):
            yield node.lineno


def test_no_text_file_has_the_encoding_of_the_locale() -> None:
    sources = {
        str(file.relative_to(ROOT)): file.read_text("utf-8")
        for top in ("docs", "schemas", "scripts", "sluice", "tests/support", "worker")
        for file in (ROOT / top).rglob("*.py")
        if not file.is_relative_to(ROOT / "scripts" / "tests")
    }
    found = {name: list(without_encoding(source)) for name, source in sources.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("call", "found"),
    [("path.read_text()", True), ("path.read_text('utf-8')", False), ("path.write_text(text)", True),
     ("path.write_text(text, encoding='utf-8')", False), ("open(path)", True), ("open(path, 'rb')", False),
     ("path.open('w')", True), ("path.open('w', encoding='utf-8')", False), ("store.open()", False)],
)  # fmt: skip
def test_a_text_file_without_encoding_is_found(call: str, found: bool) -> None:
    assert bool(list(without_encoding(call))) == found
