from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.stack import WorkerProcess
from tests.end_to_end.test_cli import Command
from tests.end_to_end.toolchains import TOOLCHAINS

collect_ignore = [] if TOOLCHAINS else ["test_foreign_producers.py"]


@pytest.fixture
def sluice(redis_url: str, tmp_path: Path) -> Iterator[Command]:
    command = Command(redis_url, tmp_path)
    yield command
    command.db.close()


@pytest.fixture
def alive(worker: WorkerProcess, redis_url: str) -> WorkerProcess:
    """The module's worker, once it has said again that it is there."""
    worker.wait_ready()
    return worker
