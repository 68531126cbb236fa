"""A real server for every test that wants one, empty at the start of each."""

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio
from hypothesis import settings

from scripts.stack import Server, WorkerProcess
from sluice import Client
from tests.selection import case_of, chosen


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every family with every test, and all hypothesis examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.getoption("all") else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and ("server_url" in item.fixturenames or "end_to_end" in item.path.parts):
            item.add_marker("live")
    if not config.getoption("all") and not any("::" in arg for arg in config.args):
        _leave_to_all(config, items)


def _leave_to_all(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what only `--all` runs. A test that the command line names by its id always runs."""
    run = [not item.get_closest_marker("slow") for item in items]
    run = [each and first for each, first in zip(run, chosen(map(case_of, items)), strict=True)]
    config.hook.pytest_deselected(items=[item for item, runs in zip(items, run, strict=True) if not runs])
    items[:] = [item for item, runs in zip(items, run, strict=True) if runs]


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
