import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from sluice import Client
from sluice.batch import dispatcher
from sluice.gateway import ServeSettings
from tests.batch.helpers import feed_folder
from tests.gateway.gateways import HttpGateway, serving


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "_POLL_S", 0.02)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "runs"
    made.mkdir()
    return made


@pytest.fixture
def gateway(redis_url: str, folder: Path) -> Iterator[HttpGateway]:
    with serving(redis_url, ServeSettings(_env_file=None, batch_dir=folder)) as gateway:
        yield gateway


@pytest.fixture
async def openai(gateway: HttpGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def feeder(client: Client, folder: Path) -> AsyncIterator[None]:
    """A feeder that looks into the folder all the time."""

    async def feed() -> None:
        while True:
            await feed_folder(client, folder, take=True, models={})
            await asyncio.sleep(0.05)

    async with AsyncExitStack() as stack:
        feeding = asyncio.create_task(feed())
        stack.callback(feeding.cancel)
        yield
