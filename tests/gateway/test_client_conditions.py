"""Errors as interfaces: the conditions by which real clients decide, applied to the errors of each interface.

The conditions of pi, LiteLLM, LangChain and Codex were read in their sources, in the versions named here. That of
Claude Code is the one that the gateway has followed before; its source was not read.
"""

import re
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from redis.asyncio import Redis

from sluice.contract.events import Failed, JobError, Usage
from sluice.errors import JobFailed, NoWorker, QueueFull
from sluice.gateway.errors import from_client, openai_body
from sluice.gateway.keys.limits import Balance, Exceeded, refusal
from sluice.gateway.messages.errors import error_body, status_of
from sluice.gateway.responses.stream import ResponseState
from tests.gateway.gateways import events
from tests.gateway.responses.events import head
from tests.queue.helpers import listening, settings, working
from worker.errors import JobFailure, prompt_too_large

Body = dict[str, Any]
TOO_LONG = prompt_too_large(40_013, 32_768)
PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi."}]},
    "/v1/responses": {"input": "Hi."},
}


def any_of(*patterns: str) -> Callable[[str], bool]:
    return lambda said: any(re.search(pattern, said, re.IGNORECASE) for pattern in patterns)


# @mariozechner/pi-ai 0.73.1, dist/utils/overflow.js, those for OpenAI's and Anthropic's APIs. opencode's are said to be
# adapted from them.
pi = any_of(
    "prompt is too long", "request_too_large", "exceeds the context window", "reduce the length of the messages",
    r"maximum context length is \d+ tokens", "context[_ ]length[_ ]exceeded",
)  # fmt: skip
pi_excludes = any_of("rate limit", "too many requests")


def litellm(said: str) -> bool:
    """1.110.2, `ExceptionCheckers.is_error_str_context_window_exceeded`."""
    return "this model's maximum context length is" in said.lower() or "prompt is too long" in said.lower()


def langchain(error: openai.APIError) -> bool:
    """langchain-openai 1.7.4, `_handle_openai_bad_request` and, for streams, `_handle_openai_api_error`."""
    if isinstance(error, openai.BadRequestError):
        return "context_length_exceeded" in str(error) or "prompt is too long" in error.message
    return "exceeds the context window" in str(error)


def codex(event: Body) -> bool:
    """codex-rs/codex-api/src/sse/responses.rs, `is_context_window_error`: of the final event alone."""
    return event["type"] == "response.failed" and event["response"]["error"]["code"] == "context_length_exceeded"


def claude_code(status: int, body: Body) -> bool:
    """A 400 whose message begins so."""
    return status == 400 and body["error"]["message"].lower().startswith("prompt is too long")


def raised(body: Body, status: int = 400) -> openai.APIStatusError:
    """What OpenAI's library raises for a body."""
    request = httpx.Request("POST", "http://sluice/v1/chat/completions")
    client = openai.OpenAI(api_key="none", base_url="http://sluice/v1")
    return client._make_status_error_from_response(httpx.Response(status, json=body, request=request))


def failed(failure: JobFailure) -> JobFailed:
    return JobFailed(JobError(failure.type, failure.message, failure.retryable, failure.param))


@pytest.mark.parametrize("exact", [True, False])
def test_a_prompt_that_is_too_long_has_openai_s_code_and_words(exact: bool) -> None:
    error = from_client(failed(prompt_too_large(40_013, 32_768, exact=exact)))
    body = openai_body(error)
    assert (error.status, error.headers["x-should-retry"]) == (400, "false")
    assert [body["error"][name] for name in ("type", "code", "param")] == [
        "invalid_request_error", "context_length_exceeded", "messages",
    ]  # fmt: skip
    said = body["error"]["message"]
    assert said.startswith("This model's maximum context length is 32768 tokens. However, your messages resulted in ")
    assert pi(said)
    assert not pi_excludes(said)
    assert litellm(said)
    assert langchain(raised(body))
    assert langchain(openai.APIError(said, httpx.Request("POST", "http://sluice"), body=body["error"]))
    assert re.search(r"max.*?(\d+) tokens.*?(\d+) ", said)


def test_a_prompt_that_is_too_long_ends_a_stream_of_a_response_as_codex_and_the_libraries_know_it() -> None:
    state = ResponseState(head())
    error = JobError(TOO_LONG.type, TOO_LONG.message, False, "messages")
    ended = Failed(type="failed", id="x", seq=0, attempt=1, ts=0.0, usage=Usage(0, 0, 0), error=error)
    made = state.add(ended)
    assert [event["type"] for event in made] == ["error", "response.failed"]
    assert codex(made[-1])
    assert made[0]["error"]["code"] == made[0]["code"] == "context_length_exceeded"


def test_a_prompt_that_is_too_long_begins_as_claude_code_knows_it() -> None:
    error = from_client(failed(TOO_LONG))
    assert claude_code(status_of(error), error_body(error, "msg_1"))
    assert pi(error_body(error, "msg_1")["error"]["message"])


@pytest.mark.parametrize("param", ["max_tokens", "messages[0].content[1].image_url", "tools"])
def test_what_a_shorter_conversation_would_not_mend_is_no_overflow(param: str) -> None:
    error = from_client(failed(JobFailure("too_large", "It is too large.", param=param)))
    assert (error.status, error.code) == (400, "too_large")
    assert not pi(error.message)
    assert not claude_code(status_of(error), error_body(error, "msg_1"))


def test_a_limit_of_a_key_is_retried_after_the_time_that_clients_read() -> None:
    error = refusal(Exceeded(Balance(10, 0, 0, 0), "requests", 2.4))
    assert (error.status, error.code, error.headers["retry-after"]) == (429, "rate_limit_exceeded", "3")
    assert re.search(r"(?i)try again in\s*(\d+(?:\.\d+)?)\s*(s|ms|seconds?)", error.message)  # Codex
    assert isinstance(raised(openai_body(error), 429), openai.RateLimitError)
    assert error_body(error, "msg_1")["error"]["type"] == "rate_limit_error"
    assert not pi(error.message)


def test_an_overloaded_queue_is_retried_by_each_client() -> None:
    error = from_client(QueueFull(9, 9, 7.0))
    assert (error.status, status_of(error), error.headers["retry-after"]) == (503, 529, "7")
    assert error_body(error, "msg_1")["error"]["type"] == "overloaded_error"
    assert isinstance(raised(openai_body(error), 503), openai.InternalServerError)


def test_an_unknown_model_is_one_for_each_client() -> None:
    error = from_client(NoWorker("gpt-9", ["default"]))
    body = openai_body(error)
    # LiteLLM looks for both words.
    assert (body["error"]["type"], body["error"]["code"]) == ("invalid_request_error", "model_not_found")
    assert isinstance(raised(body, error.status), openai.NotFoundError)
    assert error_body(error, "msg_1")["error"]["type"] == "not_found_error"


class TooLong:
    """A chat whose context every prompt exceeds."""

    async def chat(self, ctx: dict[Any, Any], request: Body) -> Any:
        raise TOO_LONG


@pytest.mark.parametrize("path", PATHS)
async def test_clients_are_told_so_over_http(http: httpx.AsyncClient, redis_url: str, db: Redis, path: str) -> None:
    async with working(settings(redis_url), TooLong().chat):
        await listening(db)
        whole = await http.post(path, json=PATHS[path])
        stream = await http.post(path, json={**PATHS[path], "stream": True})
    param = "input" if path == "/v1/responses" else "messages"
    assert (whole.status_code, whole.json()["error"]["param"]) == (400, param)
    assert whole.json()["error"]["code"] == "context_length_exceeded"
    if path == "/v1/responses":
        assert codex(events(stream.text)[-1])
    else:
        assert (stream.status_code, stream.json()["error"]["code"]) == (400, "context_length_exceeded")
