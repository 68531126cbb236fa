"""Requests in the shapes of guidellm and AIPerf, which have fields besides OpenAI's."""

from typing import Any

import httpx

from tests.gateway.gateways import events

# guidellm's, of an answer with a set number of tokens.
MEASURED: dict[str, Any] = {
    "model": "default",
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_completion_tokens": 40,
    "ignore_eos": True,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Count to 3."}]}],
}


async def test_the_check_before_a_benchmark_passes(real_http: httpx.AsyncClient) -> None:
    assert (await real_http.get("/health")).status_code == 200


async def test_an_answer_has_the_number_of_tokens_that_is_asked_for(real_http: httpx.AsyncClient) -> None:
    chunks = events((await real_http.post("/v1/chat/completions", json=MEASURED)).text)
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 40
    response = {"model": "default", "input": "Count to 3.", "max_output_tokens": 40, "ignore_eos": True}
    answer = (await real_http.post("/v1/responses", json=response)).json()
    assert answer["usage"]["output_tokens"] == 40


async def test_a_schema_ends_an_answer_whose_end_is_to_be_ignored(real_http: httpx.AsyncClient) -> None:
    format = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7]}}}
    body = {**MEASURED, "stream": False, "stream_options": None, "response_format": format}
    (choice,) = (await real_http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("7", "stop")
