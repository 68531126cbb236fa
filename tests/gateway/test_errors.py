"""The codes of the gateway's errors, in its code and in its documentation."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

from sluice import openai
from tests.support.stack import ROOT

Answer = tuple[int, str]


def value(node: ast.expr, module: ModuleType) -> Any:
    """The value of an argument that is a constant, or the name of one; else None."""
    if isinstance(node, ast.Name):
        return getattr(module, node.id, None)
    return node.value if isinstance(node, ast.Constant) else None


def answers(module: ModuleType, source: str) -> Iterator[tuple[Any, Any]]:
    """The status and the code of each error that a module makes."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name | ast.Attribute):
            continue
        codes = [value(each.value, module) for each in call.keywords if each.arg == "code"]
        positional = [value(each, module) for each in call.args]
        match ast.unparse(call.func):
            case "ApiError" | "super().__init__" if codes:
                yield positional[0], codes[0]
            case "refusal" | "fields.refusal" if len(positional) > 1:
                yield 400, codes[0] if codes else "invalid_value"
            case "_reply":
                yield positional[0], positional[1]


def all_answers() -> set[Answer]:
    files = [*(ROOT / "sluice" / "gateway").rglob("*.py"), ROOT / "sluice" / "openai.py"]
    found = {(status, code) for code, status in openai._STATUS.items()}
    for file in files:
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found |= set(answers(import_module(name), file.read_text()))
    return {(status, code) for status, code in found if isinstance(status, int) and isinstance(code, str)}


def documented() -> set[Answer]:
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
    assert len(all_answers()) > 20
    assert documented() == all_answers()
