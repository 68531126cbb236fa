from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI

from scripts.stack import WorkerProcess
from sluice.gateway import ServeSettings
from tests.gateway.fronts import Front, serving


@pytest.fixture
def real_front(worker: WorkerProcess, redis_url: str) -> Iterator[Front]:
    """A front for the worker with the tiny model."""
    worker.wait_ready()
    with serving(redis_url, ServeSettings(_env_file=None)) as front:
        yield front


@pytest.fixture
async def openai(real_front: Front) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=real_front.base_url, api_key="none", max_retries=0) as client:
        yield client
