"""The layout stays small enough to hold in the head: packages, modules and functions have a largest size."""

import ast
import re
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.test_imports import imported, modules

MAX_MODULES_IN_A_PACKAGE = 20
MAX_LINES_OF_A_MODULE = 500
MAX_LINES_OF_A_FUNCTION = 50

# Ideas that a reader has to hold, of the whole product: lower a limit when there are fewer.
MAX_MODULES = 380
MAX_MODULES_WITH_ONE_IMPORTER = 70
MAX_PUBLIC_CLASSES = 645
MAX_NUMBERS = 154  # that a module names


def dependencies() -> dict[str, set[str]]:
    """The modules of this project that each module imports by name."""
    known = modules()
    graph = dict[str, set[str]]()
    for module, file in known.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        names = imported(file.read_text(), package)
        graph[module] = {found for name in names if (found := owner(name, known)) and found != module}
    return graph


def owner(name: str, known: dict[str, Path]) -> str | None:
    """The module that an imported name is, or that defines it: `worker.jobs.chat` is of `worker.jobs`."""
    if name in known:
        return name
    package = name.rpartition(".")[0]
    return package if package in known else None


def cycle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_module_imports_itself_through_others() -> None:
    assert cycle(dependencies()) == []


def test_a_cycle_is_found() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_a_package_holds_few_modules() -> None:
    files = [file for file in modules().values() if file.name not in ("__init__.py", "__main__.py")]
    sizes = Counter(str(file.parent) for file in files)
    assert {package: size for package, size in sizes.items() if size > MAX_MODULES_IN_A_PACKAGE} == {}


def test_a_module_and_its_functions_are_short() -> None:
    sources = {module: file.read_text() for module, file in modules().items()}
    lines = {module: len(source.splitlines()) for module, source in sources.items()}
    assert {module: count for module, count in lines.items() if count > MAX_LINES_OF_A_MODULE} == {}
    functions = (
        (module, node)
        for module, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert [(module, each.name) for module, each in functions if lines_of_body(each) > MAX_LINES_OF_A_FUNCTION] == []


def lines_of_body(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines below the signature: the options of a command are one parameter a line."""
    return (function.end_lineno or 0) - function.body[0].lineno + 1


def test_the_product_has_few_modules_and_classes() -> None:
    graph = dependencies()
    importers = Counter(imported for imports in graph.values() for imported in imports)
    own = [module for module, file in modules().items() if file.name not in ("__init__.py", "__main__.py")]
    trees = [ast.parse(file.read_text()) for file in modules().values()]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(graph) <= MAX_MODULES
    assert len([module for module in own if importers[module] == 1]) <= MAX_MODULES_WITH_ONE_IMPORTER
    assert len([node for node in classes if not node.name.startswith("_")]) <= MAX_PUBLIC_CLASSES
    assert sum(names_a_number(node) for tree in trees for node in tree.body) <= MAX_NUMBERS


def names_a_number(node: ast.stmt) -> bool:
    """Return True for a constant that is a number, or computed from numbers alone: `_LONGEST_S = 5 * 60`."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    if not all(isinstance(target, ast.Name) and target.id.isupper() for target in targets):
        return False
    parts = [each for each in ast.walk(node.value) if isinstance(each, ast.expr)]
    numbers = [each.value for each in parts if isinstance(each, ast.Constant)]
    others = [each for each in parts if not isinstance(each, ast.Constant | ast.BinOp | ast.UnaryOp)]
    return bool(numbers) and not others and all(type(each) in (int, float) for each in numbers)


def test_names_of_all_loggers_begin_with_sluice() -> None:
    assigned = re.compile(r"^logger = logging\.getLogger\((.*)\)$", re.MULTILINE)
    found = [(module, name) for module, file in modules().items() for name in assigned.findall(file.read_text())]
    assert len(found) > 20
    assert [(module, name) for module, name in found if not re.fullmatch(r'"sluice(\.\w+)*"', name)] == []
