"""Before its first claim a worker imports what `import mlx_lm` brings, and hardly anything else: imports are most of a
start."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.stack import WorkerProcess

# All that a worker needs of other people's packages, besides the modules that `import mlx_lm` brings.
NEEDED = {
    *("arq", "redis", "hiredis", "cronsim"),
    *("jwt", "cryptography", "_cffi_backend", "_openssl"),  # by redis 5.3, for tokens that only Azure uses
    *("pydantic", "pydantic_core", "pydantic_settings", "annotated_types", "typing_inspection", "dotenv"),
    *("mlx_lm.models", "mlx_lm.tool_parsers", "transformers.models.qwen3_5"),  # the tiny model's
}
# Packages of this project and of others that an ordinary chat never needs.
HEAVY = {
    "llguidance",
    "mlx_vlm",
    "prometheus_client",
    "rich",
    "sluice.cli",
    "sluice.client",
    "sluice.gateway",
    "typer",
    "worker.batch_dir",
    "worker.images.fetch",
    "worker.monitoring.metrics",
    "worker.text.grammar",
}
OURS = {"schemas", "sluice", "tests", "worker"}


def imported_by(statement: str) -> set[str]:
    command = [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules, sep='\\n')"]
    return {*subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()}


def modules_at_first_claim(url: str, file: Path) -> set[str]:
    env = {"MODULES_FILE": str(file)}
    worker = WorkerProcess(url, module="tests.end_to_end.modules_at_claim", more_env=env).start(wait=False)
    try:
        deadline = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < deadline, worker.log()
            time.sleep(0.02)
        return {*file.read_text().split()}
    finally:
        worker.stop()


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.fixture(scope="module")
def before_first_claim(server_url: str, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    return modules_at_first_claim(server_url, tmp_path_factory.mktemp("start") / "modules")


@pytest.fixture(scope="module")
def with_mlx_lm() -> set[str]:
    return imported_by("import mlx_lm")


def test_a_worker_imports_nothing_heavy_before_its_first_claim(
    before_first_claim: set[str], with_mlx_lm: set[str]
) -> None:
    assert [name for name in before_first_claim - with_mlx_lm if within(name, HEAVY)] == []


def test_a_worker_imports_hardly_more_than_mlx_lm_before_its_first_claim(
    before_first_claim: set[str], with_mlx_lm: set[str]
) -> None:
    more = before_first_claim - with_mlx_lm
    known = NEEDED | OURS | sys.stdlib_module_names
    assert [name for name in more if not within(name, known) and not name.startswith("_sysconfigdata")] == []
