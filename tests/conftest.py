"""A real server for every test that wants one, empty at the start of each."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
from hypothesis import settings

from scripts.stack import Server, WorkerProcess
from sluice import Client

# An example may take longer on a busy machine, so none has a deadline; the suite has its own limit. On CI the examples
# are the same in every run, so a change is judged by its own failures; every other run looks for new ones.
settings.register_profile("sluice", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("sluice")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and ("server_url" in item.fixturenames or "end_to_end" in item.path.parts):
            item.add_marker("live")


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    if url := os.environ.get("SLUICE_TEST_REDIS_URL"):
        yield url
        return
    with Server() as server:
        yield server.url


@pytest.fixture
def redis_url(server_url: str) -> str:
    with redis.Redis.from_url(server_url) as client:
        client.flushdb()
    return server_url


@pytest.fixture
async def db(redis_url: str) -> AsyncIterator["redis.asyncio.Redis"]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    async with Client(redis_url) as client:
        yield client


@pytest.fixture(scope="module")
def worker(server_url: str) -> Iterator[WorkerProcess]:
    """One worker with the tiny model for all tests of a module. Its presence comes back after a flush."""
    with WorkerProcess(server_url, lease_s=1) as process:
        yield process
