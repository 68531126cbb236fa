from collections.abc import AsyncIterator

import pytest
from openai import AsyncOpenAI

from tests.gateway.gateways import HttpGateway


@pytest.fixture
async def openai(real_gateway: HttpGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=real_gateway.base_url, api_key="none", max_retries=0) as client:
        yield client
