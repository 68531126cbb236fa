"""Every exception is caught by name, except at the borders that CONTRIBUTING.md names."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BROAD = {"Exception", "BaseException"}
BORDERS = {"sluice/gateway/monitoring/access.py": 1}  # of the client, the command and the gateway: a request


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
