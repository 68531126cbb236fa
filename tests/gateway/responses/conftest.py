from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from tests.gateway.fronts import Front


@pytest.fixture
async def openai(real_front: Front) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=real_front.base_url, api_key="none", max_retries=0) as client:
        yield client
