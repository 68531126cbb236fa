from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.batch import dispatcher
from tests.batch.helpers import Chat
from tests.queue.helpers import settings, working


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_POLL_S", 0.02)
    monkeypatch.setattr(dispatcher, "_MAX_WAIT_S", 0.05)
    monkeypatch.setattr(dispatcher, "_WORKERS_S", 0.5)


@pytest.fixture
async def chat(redis_url: str) -> AsyncIterator[Chat]:
    chat = Chat()
    async with working(settings(redis_url, max_rows=8, reserved_rows=0), chat.chat):
        yield chat


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"
