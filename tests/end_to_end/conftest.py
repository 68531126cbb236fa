import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.end_to_end.test_cli import Command
from tests.end_to_end.toolchains import TOOLCHAINS
from tests.support.stack import TINY_CHAT, WorkerProcess
from worker.app import serve_jobs
from worker.errors import CannotStart
from worker.process.daemon import ExitTimer
from worker.settings import Settings

collect_ignore = [] if TOOLCHAINS else ["test_foreign_producers.py"]


@pytest.fixture
def sluice(redis_url: str, tmp_path: Path) -> Iterator[Command]:
    command = Command(redis_url, tmp_path)
    yield command
    command.db.close()


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Return a function that starts a worker with given settings in this process, and returns why it refuses to."""
    monkeypatch.setattr(ExitTimer, "exit_after", lambda *_: None)  # it would end this process
    caplog.set_level("INFO", "sluice")

    def start(redis_url: str, **given: Any) -> str:
        settings = Settings(_env_file=None, **{"redis_url": redis_url, "model": str(TINY_CHAT), **given})  # type: ignore[call-arg]
        with pytest.raises(CannotStart) as refused:
            asyncio.run(serve_jobs(settings))
        return str(refused.value)

    return start


@pytest.fixture
def alive(worker: WorkerProcess, redis_url: str) -> WorkerProcess:
    """The shared worker, once it has said again that it is there, and that it runs no job of an earlier test."""
    worker.wait_ready()
    with redis.Redis.from_url(redis_url) as db:
        deadline = time.monotonic() + 30
        while db.hget(f"sluice:worker:{worker.name}", "rows") != b"0":
            assert time.monotonic() < deadline, worker.log()
            time.sleep(0.01)
    return worker
