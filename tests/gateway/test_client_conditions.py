"""Errors as interfaces: what each client of docs/clients reads in an error, applied to what the gateway really answers.

Each condition was read in the client's own source, in the version and the file that stand above it; JavaScript is
rewritten in Python, and the rest of a client's list of patterns that no server of this kind sends is left out. Where a
client uses an SDK of OpenAI or Anthropic, that SDK's own code decides here if it is installed.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from redis.asyncio import Redis

from sluice.contract.events import Failed, JobError, Usage
from sluice.gateway import ServeSettings
from sluice.gateway.errors import anthropic_response, openai_response
from sluice.gateway.key_file import key_digest
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.interfaces.responses.stream import ResponseState
from tests.gateway.gateways import events, serving
from tests.gateway.responses.events import head
from tests.queue.helpers import listening, settings, working
from worker.errors import JobFailure, prompt_too_large

Body = dict[str, Any]
TOO_LONG = prompt_too_large(40_013, 32_768)
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PNG = "data:image/png;base64,aGk="

GIVES_UP = "gives up"
RETRIES = "retries"
COMPACTS = "compacts its conversation"
DROPS = "drops the image"


@dataclass(frozen=True)
class Answer:
    """An error as a client receives it."""

    path: str
    status: int
    headers: httpx.Headers
    body: Body

    @property
    def error(self) -> Body:
        return dict(self.body["error"])

    @property
    def response(self) -> httpx.Response:
        request = httpx.Request("POST", "http://sluice")
        return httpx.Response(self.status, headers=self.headers, json=self.body, request=request)

    @property
    def raised(self) -> openai.APIStatusError | anthropic.APIStatusError:
        """What the SDK raises."""
        if self.path == MESSAGES:
            of_anthropic = anthropic.Anthropic(api_key="none", base_url="http://sluice")
            return of_anthropic._make_status_error_from_response(self.response)
        of_openai = openai.OpenAI(api_key="none", base_url="http://sluice/v1")
        return of_openai._make_status_error_from_response(self.response)

    @property
    def said(self) -> str:
        """The message of what the SDKs for Node raise: OpenAI's is the status with the message, Anthropic's the status
        with the body. The id of the request is left out: a digit in it could be any pattern."""
        body = {name: value for name, value in self.body.items() if name != "request_id"}
        return f"{self.status} {json.dumps(body) if self.path == MESSAGES else self.error['message']}"


FAILURES = {
    "too long": TOO_LONG,
    "invalid": JobFailure("invalid_request", "temperature: it must be at most 2.", param="temperature"),
    "bad image": JobFailure(
        "invalid_request", "messages[0].content[0].image_url: it is damaged.",
        param="messages[0].content[0].image_url",
    ),
    "no vision": JobFailure(
        "unsupported", "messages: this model does not support images.", param="messages[].content[].image_url"
    ),
    "overloaded": JobFailure("overloaded", "All rows are taken.", retryable=True),
    "late": JobFailure("deadline", "deadline_s has passed.", retryable=True),
    "broken": JobFailure("internal", "It broke.", retryable=True),
}  # fmt: skip


class Failing:
    """A chat that fails as the user's message says."""

    async def chat(self, ctx: dict[Any, Any], request: Body) -> Any:
        content = request["messages"][-1]["content"]
        raise FAILURES[content if isinstance(content, str) else content[-1]["text"]]


def asked(path: str, text: str, **more: Any) -> Body:
    """A request of each interface."""
    if path == RESPONSES:
        return {"model": "tiny", "input": text, **more}
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **limit, **more}


FOUND: dict[tuple[str, str], Answer] = {}  # by interface and error, for all tests of this module


@pytest.fixture
async def found(redis_url: str, db: Redis, tmp_path: Path) -> dict[tuple[str, str], Answer]:
    """The gateway's answers to a request for each error, over HTTP."""
    if FOUND:
        return FOUND
    keys = [
        {"id": "all", "sha256": key_digest("all"), "tenant": "a"},
        {"id": "few", "sha256": key_digest("few"), "tenant": "a", "requests_per_minute": 1, "lanes": ["interactive"]},
    ]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    served = ServeSettings(_env_file=None, keys=tmp_path / "keys.json", max_body_bytes=20_000, no_worker_s=1)
    with serving(redis_url, served) as front:
        async with (
            httpx.AsyncClient(base_url=front.url, timeout=20) as http,
            working(settings(redis_url, model_name="tiny"), Failing().chat),
        ):
            await listening(db)
            await _ask_all(http)
    for path in (CHAT, RESPONSES, MESSAGES):
        slow = ApiError(ErrorForm.TIMEOUT, "The body did not arrive in time; send it faster.")
        answer = anthropic_response(slow, "msg_1") if path == MESSAGES else openai_response(slow)
        _add(path, "slow body", answer.status_code, httpx.Headers(dict(answer.headers)), json.loads(bytes(answer.body)))
    return FOUND


async def _ask_all(http: httpx.AsyncClient) -> None:
    async def ask(path: str, name: str, body: Body, key: str = "all") -> None:
        answer = await http.post(path, json=body, headers={"authorization": f"Bearer {key}"})
        _add(path, name, answer.status_code, answer.headers, answer.json())

    for path in (CHAT, RESPONSES, MESSAGES):
        for text in FAILURES:
            await ask(path, text, asked(path, text))
        await ask(path, "wrong key", asked(path, "invalid"), "wrong")
        await ask(path, "unknown model", asked(path, "invalid", model="gpt-9"))
        await ask(path, "no model", {name: value for name, value in asked(path, "x").items() if name != "model"})
        await ask(path, "too large", asked(path, "x" * 30_000))
        await ask(path, "rate limit", asked(path, "invalid"), "few")
        await ask(path, "rate limit", asked(path, "invalid"), "few")
    for path in (CHAT, RESPONSES):
        await ask(path, "lane", asked(path, "invalid", service_tier="flex"), "few")
    source = {"type": "base64", "media_type": "application/pdf", "data": "aGk="}
    document = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    await ask(MESSAGES, "document", asked(MESSAGES, "x", messages=document))


def _add(path: str, name: str, status: int, headers: httpx.Headers, body: Body) -> None:
    FOUND[path, name] = Answer(path, status, headers, body)


def any_of(*patterns: str) -> Callable[[str], bool]:
    return lambda said: any(re.search(pattern, said, re.IGNORECASE) for pattern in patterns)


def sdk(answer: Answer) -> str:
    """openai 3.57 and anthropic 2.14, `_base_client.py`, `_should_retry`: `x-should-retry`, else the status. Both wait
    for `retry-after`. What they raise has `code`, or `type`, by which their callers decide."""
    client: Any = openai.OpenAI(api_key="none") if answer.path != MESSAGES else anthropic.Anthropic(api_key="none")
    if client._should_retry(answer.response):
        return RETRIES
    return COMPACTS if getattr(answer.raised, "code", None) == "context_length_exceeded" else GIVES_UP


def llm(answer: Answer) -> str:
    """llm 0.36, `cli.py`: the SDK decides, and `click.ClickException(str(ex))` shows what it raises."""
    assert answer.error["message"] in str(answer.raised)
    return sdk(answer)


def openai_agents(answer: Answer) -> str:
    """openai-agents 0.24.0, `agents/models/_openai_retry.py`, `get_openai_retry_advice`."""
    should_retry = answer.headers.get("x-should-retry")
    if should_retry in ("true", "false"):
        return RETRIES if should_retry == "true" else GIVES_UP
    return RETRIES if answer.status in (408, 409, 429) or answer.status >= 500 else GIVES_UP


def open_webui(answer: Answer) -> str:
    """Open WebUI 0.12.4, `routers/openai.py`: it passes status and body on, and shows `error` of the body. It retries
    and compacts nothing."""
    assert "error" in answer.body
    return GIVES_UP


def ai_sdk(answer: Answer) -> str:
    """@ai-sdk/provider 4.0.38, `APICallError`: by the status alone. @ai-sdk/openai 4.0.118 and @ai-sdk/anthropic
    4.0.105 read the message by a schema, or else show the status text."""
    error = answer.error
    assert isinstance(error["message"], str)
    if answer.path == MESSAGES:
        assert (answer.body["type"], type(error["type"])) == ("error", str)
    else:
        assert isinstance(error["type"], str)
        assert isinstance(error["code"], str | None)
    return RETRIES if answer.status in (408, 409, 429) or answer.status >= 500 else GIVES_UP


def opencode(answer: Answer) -> str:
    """opencode-ai 1.18.33, in its binary: `a9` finds an overflow, `ga` and its patterns `Rd` what is worth a retry."""
    overflow = any_of(
        "prompt is too long", "request_too_large", "exceeds the context window", "reduce the length of the messages",
        r"maximum context length is \d+ tokens", r"exceeds the limit of \d+", "context[_ ]length[_ ]exceeded",
        "request entity too large",
    )  # fmt: skip
    message = answer.error["message"]
    if overflow(message) or answer.status == 413 or answer.error.get("code") == "context_length_exceeded":
        return COMPACTS
    worth = any_of(
        "429|500|502|503|504|524",
        "rate increased too quickly|rate limit|rate-limit|rate_limit|too many requests",
        "overloaded|service.unavailable|internal.error|internal server error|server.error|provider.returned.error",
        "terminated|fetch failed|network[-_ ]error|connection (?:error|refused|lost)|econnreset|etimedout",
        r"^timeout$|\b(?:request|response|connection|network|stream|read) (?:timeout|timed out|time out)\b",
        "try your request again|retry your request|resource exhausted|resource_exhausted",
        r"\btry again (?:later|in\b)|\b(?:currently|temporarily) at capacity\b",
    )  # fmt: skip
    retries = ai_sdk(answer) == RETRIES or worth(message) or worth(answer.said)
    return RETRIES if retries else GIVES_UP


def pi(answer: Answer) -> str:
    """@mariozechner/pi-ai 0.73.1, `dist/utils/overflow.js`, and pi-coding-agent 0.73.1, `dist/core/agent-session.js`,
    `_isRetryableError`."""
    overflow = any_of(
        "prompt is too long", "request_too_large", "exceeds the context window", "reduce the length of the messages",
        r"maximum context length is \d+ tokens", r"exceeds the limit of \d+", "context[_ ]length[_ ]exceeded",
        "too many tokens", "token limit exceeded", r"^4(?:00|13)\s*(?:status code)?\s*\(no body\)",
    )  # fmt: skip
    said = answer.said
    if not any_of("rate limit", "too many requests")(said) and overflow(said):
        return COMPACTS
    worth = any_of(
        "overloaded|provider.?returned.?error|rate.?limit|too many requests|429|500|502|503|504|service.?unavailable|"
        "server.?error|internal.?error|network.?error|connection.?error|connection.?refused|fetch failed|"
        "timed? out|timeout|terminated|retry delay"
    )
    return RETRIES if worth(said) or sdk(answer) == RETRIES else GIVES_UP


def qwen_code(answer: Answer) -> str:
    """@qwen-code/qwen-code 0.24.4, `packages/core/src/utils/contextLengthError.ts` and `retry.ts` in `chunks/`."""
    patterns = any_of(
        r"\bcontext[_\s-]?length[_\s-]?exceeded\b", r"\bmaximum context length\b", r"\bprompt\s+(?:is\s+)?too long\b",
        r"\btoo many tokens\b", r"\btokens?\s*>\s*[\d,]+\s*(?:maximum|max|limit)\b",
        r"\b(?:input|prompt|messages?|context)\b[^\n]{0,120}\btokens?\b[^\n]{0,120}\bexceed(?:s|ed|ing)?\b",
    )  # fmt: skip
    deadline = any_of(r"\bdeadline exceeded\b", r"\b(?:request|connection|read|context)\s+(?:timed out|timeout)\b")
    if patterns(answer.said) and not deadline(answer.said):
        counts = re.search(r"(\d[\d,]*)\s*tokens?\s*>\s*(\d[\d,]*)", answer.said)
        assert counts is not None
        assert (counts[1], counts[2]) == ("40013", "32768")
        return COMPACTS
    return RETRIES if answer.status >= 500 or answer.status == 429 or sdk(answer) == RETRIES else GIVES_UP


def continue_cli(answer: Answer) -> str:
    """@continuedev/cli 1.5.47, `dist/index.js`: `bBt` finds an overflow, `OSr` what is worth a retry."""
    said = answer.said.lower()
    if ("invalid_request_error" in said and "context" in said) or any(
        words in said
        for words in ("maximum context length", "reduce the length of the messages", "context_length_exceeded")
    ):
        return COMPACTS
    retries = (
        answer.status in (429, 502, 503, 504)
        or answer.error["type"] in ("server_error", "rate_limit_exceeded")
        or any(words in said for words in ("premature close", "connection reset", "aborted", "overloaded"))
    )
    return RETRIES if retries or sdk(answer) == RETRIES else GIVES_UP


def cline(answer: Answer) -> str:
    """@cline/llms 0.0.86, `dist/providers.js`: `wo` classifies codes, statuses and messages, `B$` finds retries."""
    codes = {answer.error.get("code"), answer.error["type"]}
    is_overflow = any_of(
        r"\bcontext\s*(?:length|window|limit)\b", r"\bmaximum\s*context\b", r"\b(?:input\s*)?tokens?\s+exceeds?\b",
        r"\btoo\s*many\s*tokens?\b", r"\bprompt\s+is\s+too\s+long\b",
    )  # fmt: skip
    of_rate = any_of(r"rate[\s_-]?limit", r"per[\s_-]?minute\b")
    if "context_length_exceeded" in codes:
        return COMPACTS
    if answer.status in (400, 413, 422) and is_overflow(answer.said) and not of_rate(answer.said):
        return COMPACTS
    if answer.status in (401, 403):
        return GIVES_UP
    return RETRIES if answer.status in (408, 409, 425, 429) or answer.status >= 500 else GIVES_UP


def litellm_class(answer: Answer) -> str:
    """litellm 1.108.7, `litellm_core_utils/exception_mapping_utils.py`: `_map_openai_exception` or
    `_map_anthropic_exception`. The text is that of the SDK's exception, which has the body."""
    said = f"Error code: {answer.status} - {answer.body}"
    is_overflow = "this model's maximum context length is" in said.lower()
    by_status = {
        400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
        408: "Timeout", 413: "BadRequestError", 429: "RateLimitError", 500: "InternalServerError",
        503: "ServiceUnavailableError", 504: "Timeout", 529: "InternalServerError",
    }  # fmt: skip
    if answer.path == MESSAGES:
        if "prompt is too long" in said or is_overflow:
            return "ContextWindowExceededError"
        if "overloaded_error" in said or "Overloaded" in said:
            return "InternalServerError"
        return "AuthenticationError" if "Invalid API Key" in said else by_status[answer.status]
    if (re.search(r"\b429\b", said) and answer.status == 429) or re.search(r"rate[\s_\-]*limit", said.lower()):
        return "RateLimitError"
    if is_overflow:
        return "ContextWindowExceededError"
    if "invalid_request_error" in said and "model_not_found" in said:
        return "NotFoundError"
    if "invalid_request_error" in said and "Incorrect API key provided" not in said:
        return "BadRequestError"
    return by_status[answer.status]


def litellm(answer: Answer) -> str:
    """litellm 1.108.7, `utils.py`, `_should_retry`: by the status of its exception's class."""
    kind = litellm_class(answer)
    if kind == "ContextWindowExceededError":
        return COMPACTS
    retried = ("RateLimitError", "InternalServerError", "ServiceUnavailableError", "Timeout")
    return RETRIES if kind in retried else GIVES_UP


def aider(answer: Answer) -> str:
    """aider-chat 0.86.2, `aider/exceptions.py`: by the class of litellm's exception."""
    retries = {
        "AuthenticationError": False, "BadRequestError": False, "NotFoundError": False, "RateLimitError": True,
        "InternalServerError": True, "ServiceUnavailableError": True, "Timeout": True, "PermissionDeniedError": False,
    }  # fmt: skip
    kind = litellm_class(answer)
    if kind == "ContextWindowExceededError":
        return COMPACTS
    return RETRIES if retries[kind] else GIVES_UP


def claude_code(answer: Answer) -> str:
    """@anthropic-ai/claude-code 2.1.332, in its binary: `nyo`, `aPe` (prompt), `Could not process image`, `Xqn` (413),
    `Y$` (529), `H` (429), and `shouldRetry` of the SDK within it."""
    said = answer.said
    if "prompt is too long" in said.lower():
        counts = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", said, re.IGNORECASE)
        assert counts is not None
        assert (counts[1], counts[2]) == ("40013", "32768")
        return COMPACTS
    if answer.status == 400 and ("Could not process image" in said or "The PDF specified was not valid" in said):
        return DROPS
    if answer.status == 413:
        assert answer.error["type"] == "request_too_large"
        return DROPS
    if answer.status == 404:
        assert '"model: ' in said
        assert answer.error["type"] == "not_found_error"
    if answer.status == 529:
        assert '"type": "overloaded_error"' in said
    return sdk(answer)


def codex(answer: Answer) -> str:
    """@openai/codex 0.171.0, in its binary: a 400 with these words drops the image. That it waits out a 429 and asks
    again after a 5xx was seen; no text of the rule is in the binary, and none of `x-should-retry`."""
    if answer.status == 400 and "The image data you provided does not represent a valid image" in str(answer.body):
        return DROPS
    return RETRIES if answer.status >= 500 or answer.status == 429 else GIVES_UP


USUAL = {
    "wrong key": GIVES_UP,
    "unknown model": GIVES_UP,
    "no model": GIVES_UP,
    "lane": GIVES_UP,
    "invalid": GIVES_UP,
    "bad image": GIVES_UP,
    "no vision": GIVES_UP,
    "document": GIVES_UP,
    "too large": GIVES_UP,
    "too long": COMPACTS,
    "rate limit": RETRIES,
    "overloaded": RETRIES,
    "late": RETRIES,
    "broken": RETRIES,
    "slow body": RETRIES,
}
OPENAI = (CHAT, RESPONSES)
ALL = (*OPENAI, MESSAGES)
AS_A_RULE: dict[str, str] = {}
NO_OVERFLOW = {"too long": GIVES_UP}
DROPS_IMAGES = {"bad image": DROPS, "no vision": DROPS, "document": DROPS, "too large": DROPS}


@pytest.mark.parametrize(
    ("client", "paths", "but"),
    [
        (sdk, OPENAI, AS_A_RULE),
        (sdk, (MESSAGES,), NO_OVERFLOW),
        (llm, (CHAT,), AS_A_RULE),
        (openai_agents, (RESPONSES,), NO_OVERFLOW),
        (open_webui, (CHAT,), dict.fromkeys(USUAL, GIVES_UP)),
        (ai_sdk, ALL, NO_OVERFLOW),
        (opencode, ALL, {"too large": COMPACTS}),
        (pi, (CHAT,), AS_A_RULE),
        (pi, (MESSAGES,), {"too large": COMPACTS}),
        (qwen_code, (CHAT,), AS_A_RULE),
        (continue_cli, (CHAT,), AS_A_RULE),
        (cline, ALL, AS_A_RULE),
        (litellm, ALL, AS_A_RULE),
        (aider, (CHAT,), AS_A_RULE),
        (claude_code, (MESSAGES,), DROPS_IMAGES),
        (codex, (RESPONSES,), {"bad image": DROPS, "too long": GIVES_UP, "slow body": GIVES_UP}),
    ],
)
async def test_a_client_decides_as_it_should(
    found: dict[tuple[str, str], Answer], client: Callable[[Answer], str], paths: Sequence[str], but: dict[str, str]
) -> None:
    answers = {key: answer for key, answer in found.items() if key[0] in paths}
    assert len(answers) > 13 * len(paths)
    decided = {key: client(answer) for key, answer in answers.items()}
    assert decided == {key: {**USUAL, **but}[key[1]] for key in answers}


async def test_litellm_names_each_error_for_what_it_is(found: dict[tuple[str, str], Answer]) -> None:
    names = {
        "wrong key": "AuthenticationError", "unknown model": "NotFoundError", "lane": "PermissionDeniedError",
        "rate limit": "RateLimitError", "too long": "ContextWindowExceededError", "late": "Timeout",
        "slow body": "Timeout", "invalid": "BadRequestError",
    }  # fmt: skip
    named = {key: litellm_class(answer) for key, answer in found.items() if key[1] in names}
    assert named == {key: names[key[1]] for key in named}


async def test_a_rate_limit_says_how_long_to_wait_as_each_client_reads_it(
    found: dict[tuple[str, str], Answer],
) -> None:
    for path in ALL:
        answer = found[path, "rate limit"]
        in_words = re.search(r"(?i)try again in\s*(\d+(?:\.\d+)?)\s*(s|ms|seconds?)", answer.error["message"])  # Codex
        assert in_words is not None
        assert float(answer.headers["retry-after"]) == float(in_words[1]) <= 60  # longer ones are not waited for
        assert answer.error.get("code", "rate_limit_exceeded") == "rate_limit_exceeded"


async def test_an_overflow_names_the_field_of_its_interface(found: dict[tuple[str, str], Answer]) -> None:
    params = {path: found[path, "too long"].error["param"] for path in OPENAI}
    assert params == {CHAT: "messages", RESPONSES: "input"}


def test_a_prompt_that_is_too_long_ends_a_stream_of_a_response_as_codex_and_the_libraries_know_it() -> None:
    state = ResponseState(head())
    error = JobError(TOO_LONG.type, TOO_LONG.message, False, "messages")
    ended = Failed(type="failed", id="x", seq=0, attempt=1, ts=0.0, usage=Usage(0, 0, 0), error=error)
    failure, final = state.add(ended)
    assert (failure["type"], final["type"]) == ("error", "response.failed")
    # @openai/codex 0.171.0, codex-rs/codex-api/src/sse/responses.rs: `is_context_window_error`, of the final event.
    assert final["response"]["error"]["code"] == "context_length_exceeded"
    # opencode 1.18.33, `n9`, and langchain-openai 1.7.4, `_handle_openai_api_error`.
    assert failure["error"]["code"] == failure["code"] == "context_length_exceeded"
    assert "exceeds the context window" in failure["message"]


@pytest.mark.parametrize(
    ("kind", "code"),
    [("internal", "server_error"), ("overloaded", "server_error"), ("invalid_request", "invalid_prompt")],
)
def test_a_stream_of_a_response_fails_with_codes_of_which_opencode_and_codex_know_what_to_retry(
    kind: str, code: str
) -> None:
    state = ResponseState(head())
    error = JobError(kind, "Why.", kind != "invalid_request", None)
    (final,) = state.add(Failed(type="failed", id="x", seq=0, attempt=1, ts=0.0, usage=Usage(0, 0, 0), error=error))
    assert final["response"]["error"]["code"] == code


@pytest.mark.parametrize("param", ["max_tokens", "messages[0].content[1].image_url", "tools"])
async def test_what_a_shorter_conversation_would_not_mend_is_no_overflow(param: str) -> None:
    state = ResponseState(head())
    error = JobError("too_large", "It is too large.", False, param)
    (final,) = state.add(Failed(type="failed", id="x", seq=0, attempt=1, ts=0.0, usage=Usage(0, 0, 0), error=error))
    assert final["response"]["error"]["code"] == "invalid_prompt"


async def test_clients_of_responses_are_told_so_in_the_stream(
    http: httpx.AsyncClient, redis_url: str, db: Redis
) -> None:
    async with working(settings(redis_url, model_name="tiny"), Failing().chat):
        await listening(db)
        stream = await http.post(RESPONSES, json=asked(RESPONSES, "too long", stream=True))
        refused = await http.post(CHAT, json=asked(CHAT, "too long", stream=True))
    assert events(stream.text)[-1]["response"]["error"]["code"] == "context_length_exceeded"
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
