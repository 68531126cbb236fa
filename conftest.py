"""A real server for every test that wants one, empty at the start of each."""

import gc
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
import redis.asyncio
from hypothesis import settings

from sluice import Client
from tests.selection import case_of, chosen
from tests.support.stack import Server, WorkerProcess

SERVERS = {"server_url", "redis_url", "worker"}  # fixtures that start one
# Folders in which scripts/test looks for live tests.
LIVE = {"batch", "batch_dir", "client", "end_to_end", "gateway", "queue", "scripts", "tools", "webhooks"}
# Folders whose files build models or tokenizers: a file's tests share a process.
MODELS = {"engine", "models", "scripts", "text", "tools"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every family with every test, and all hypothesis examples")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("all" if config.getoption("all") else "default")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        folders = {*item.path.relative_to(config.rootpath).parts}
        if isinstance(item, pytest.Function) and (SERVERS & {*item.fixturenames} or "end_to_end" in folders):
            item.add_marker("live")
            if not LIVE & folders:
                raise pytest.UsageError(f"{item.nodeid}: uses a server, so it belongs into one of {sorted(LIVE)}")
        if MODELS & folders:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if not config.getoption("all") and not any("::" in arg for arg in config.args):
        _leave_to_all(config, items)


def pytest_collection_finish() -> None:
    """Exempt the modules and collected tests from garbage collections, of which tests and pytest ask for many."""
    gc.collect()
    gc.freeze()


def _leave_to_all(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what only `--all` runs. A test that the command line names by its id always runs."""
    quick = [item for item in items if not item.get_closest_marker("slow")]
    run = {item for item, runs in zip(quick, chosen(map(case_of, quick)), strict=True) if runs}
    config.hook.pytest_deselected(items=[item for item in items if item not in run])
    items[:] = [item for item in items if item in run]


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a server of this test process, or of the one that the environment names."""
    if not (url := os.environ.get("SLUICE_TEST_REDIS_URL")):
        with Server() as own:
            yield own.url
        return
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        pytest.exit("SLUICE_TEST_REDIS_URL: a server serves one test process at a time; run pytest without -n", 4)
    yield url


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    with server() as url:
        yield url


def _scope_of_worker(fixture_name: str, config: pytest.Config) -> Literal["module", "session"]:
    """A shared worker would take the jobs of other tests on the one server that the environment names."""
    return "module" if os.environ.get("SLUICE_TEST_REDIS_URL") else "session"


@pytest.fixture(scope=_scope_of_worker)
def worker() -> Iterator[WorkerProcess]:
    """One worker with the tiny model, on a server of its own, for all tests that need no other settings. Its presence
    comes back after a flush."""
    with server() as url, WorkerProcess(url, lease_s=2) as process:
        yield process


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty server: the one of `worker` for a test that uses it."""
    if "worker" in request.fixturenames:
        url: str = request.getfixturevalue("worker").url
    else:
        url = request.getfixturevalue("server_url")
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
async def db(redis_url: str) -> AsyncIterator["redis.asyncio.Redis"]:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    async with Client(redis_url) as client:
        yield client
