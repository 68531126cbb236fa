"""Errors that a worker finds, as the clients of each interface get them."""

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
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 9, "model": "default"},
}


class Refusing:
    """A chat that refuses every request because of `param`."""

    param: str | None = None

    def __init__(self) -> None:
        self.refused: list[str] = []  # ids of jobs

    async def chat(self, ctx: dict[Any, Any], request: dict[str, Any]) -> Any:
        self.refused.append(ctx["job"].claim.job_id)
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


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_an_error_of_a_worker_has_the_job_s_id_as_its_request_id(
    http: httpx.AsyncClient, refusing: Refusing, path: str, stream: bool
) -> None:
    answer = await http.post(path, json={**BODIES[path], "stream": stream})
    assert (answer.status_code, [answer.headers["x-request-id"]]) == (400, refusing.refused)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_error_of_several_choices_has_the_first_job_s_id(
    http: httpx.AsyncClient, refusing: Refusing, stream: bool
) -> None:
    answer = await http.post("/v1/chat/completions", json={"messages": MESSAGES, "n": 3, "stream": stream})
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, refusing.refused[0].partition(".")[0])


@pytest.mark.parametrize("again", ["", "/stream"])
async def test_an_error_that_is_retrieved_has_the_job_s_id(
    http: httpx.AsyncClient, refusing: Refusing, again: str
) -> None:
    job_id = (await http.post("/v1/chat/completions", json={"messages": MESSAGES})).headers["x-request-id"]
    answer = await http.get(f"/v1/chat/completions/{job_id}{again}")
    assert (answer.status_code, answer.headers["x-request-id"]) == (400, job_id)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_request_that_was_not_queued_has_an_id_that_is_no_job_s(
    http: httpx.AsyncClient, refusing: Refusing, path: str, stream: bool
) -> None:
    answer = await http.post(path, json={**BODIES[path], "model": "nowhere", "stream": stream})
    assert (answer.status_code, answer.headers["x-request-id"][:4]) == (404, "req-")


async def test_what_belongs_to_a_response_has_its_id_as_the_request_id(
    http: httpx.AsyncClient, fake_worker: None
) -> None:
    made = await http.post("/v1/responses", json={"input": "Hi."})
    path = f"/v1/responses/{made.json()['id']}"
    answers = [made, await http.get(path), await http.get(f"{path}/input_items"), await http.delete(path)]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [answer.headers["x-request-id"] for answer in answers] == [made.json()["id"]] * 4
