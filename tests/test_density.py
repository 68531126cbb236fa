"""A line holds one idea: no conditional expression within another, and no tuple assignment of three or more targets."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "examples", "models", "schemas", "scripts", "sluice", "tests/support", "worker")


def nested_conditionals(tree: ast.AST) -> list[int]:
    """Return the lines of conditional expressions that hold another one."""
    outer = [node for node in ast.walk(tree) if isinstance(node, ast.IfExp)]
    return [node.lineno for node in outer if sum(isinstance(each, ast.IfExp) for each in ast.walk(node)) > 1]


def wide_assignments(tree: ast.AST) -> list[int]:
    """Return the lines that assign a tuple, written out, to three or more targets."""
    assignments = [
        node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
    ]
    wide = [node for node in assignments if any(isinstance(to, ast.Tuple) and len(to.elts) > 2 for to in node.targets)]
    return [node.lineno for node in wide]


def breaking(rule: Callable[[ast.AST], list[int]]) -> dict[str, list[int]]:
    """Return the modules that break a rule, each with the lines."""
    files = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))
    found = {str(file.relative_to(ROOT)): rule(ast.parse(file.read_text())) for file in files}
    return {file: lines for file, lines in found.items() if lines}


@pytest.mark.parametrize("rule", [nested_conditionals, wide_assignments])
def test_no_module_has_dense_lines(rule: Callable[[ast.AST], list[int]]) -> None:
    assert breaking(rule) == {}


@pytest.mark.parametrize(
    ("rule", "line", "breaks"),
    [
        (nested_conditionals, "a if b else c", False),
        (nested_conditionals, "a if b else c if d else e", True),
        (nested_conditionals, "(a if b else c) if d else e", True),
        (nested_conditionals, "[a if b else c] if d else e", True),
        (nested_conditionals, "f(a if b else c, a if d else c)", False),
        (wide_assignments, "a, b = 1, 2", False),
        (wide_assignments, "a, b, c = 1, 2, 3", True),
        (wide_assignments, "a, b, c = found", False),
        (wide_assignments, "a = b, c, d", False),
        (wide_assignments, "x.a, x.b, c = 1, *found", True),
    ],
)
def test_a_dense_line_is_found(rule: Callable[[ast.AST], list[int]], line: str, breaks: bool) -> None:
    assert bool(rule(ast.parse(line))) == breaks
