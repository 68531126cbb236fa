"""Chat completions over real sockets, from a worker whose answers the request itself dictates."""

import json
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("fake_worker")

Said = dict[str, Any]


def request(*words: str, **fields: Any) -> Said:
    return {"messages": [{"role": "user", "content": "Hi."}], "say": list(words), **fields}


def data_of(body: str) -> list[Any]:
    """Return the data of each event of a stream."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_a_whole_answer_is_the_result_and_its_id_is_the_job_s(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=request("1", " 2"))
    assert (answer.status_code, answer.json()["said"]) == (200, "1 2")
    assert len(answer.headers["x-request-id"]) == 32


async def test_a_streamed_answer_ends_with_done(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", json=request("1", " 2", stream=True))
    *chunks, done = data_of(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert [each["choices"][0]["delta"].get("content") for each in chunks] == [None, "1", " 2", None]


async def test_a_body_that_is_no_object_is_refused_in_openai_s_form(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/chat/completions", content=b"[1")
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.headers["x-should-retry"] == "false"
