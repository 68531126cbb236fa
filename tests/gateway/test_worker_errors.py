"""Errors that a worker finds, as the clients of each surface get them."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from tests.queue.helpers import listening, settings, working
from worker.errors import JobFailure

MESSAGES = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi."},
}


class Refusing:
    """A chat that refuses every request because of `param`."""

    param: str | None = None

    async def chat(self, ctx: dict[Any, Any], request: dict[str, Any]) -> Any:
        raise JobFailure("invalid_request", "It is wrong.", param=self.param)


@pytest.fixture
async def refusing(redis_url: str, db: Redis) -> AsyncIterator[Refusing]:
    refusing = Refusing()
    async with working(settings(redis_url), refusing.chat):
        await listening(db)
        yield refusing


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "param", "shown"),
    [
        ("/v1/chat/completions", "tools[0].function.parameters", "tools[0].function.parameters"),
        ("/v1/chat/completions", None, None),
        ("/v1/responses", "messages[3].content[1].image_url", "input"),
        ("/v1/responses", "response_format", "text.format"),
        ("/v1/responses", "tools", "tools"),
    ],
)
async def test_the_field_that_a_worker_names_is_the_param_of_the_error(
    http: httpx.AsyncClient, refusing: Refusing, path: str, param: str | None, shown: str | None, stream: bool
) -> None:
    refusing.param = param
    answer = await http.post(path, json={**BODIES[path], "stream": stream})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, shown)
