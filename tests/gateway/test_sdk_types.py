"""Answers and events against the types of OpenAI's and Anthropic's SDKs, which are made from their descriptions: the
fields, their types and their values. What goes beyond the types is listed here and in the document."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, ModelInfo, RawMessageStreamEvent
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_item_list import ResponseItemList
from openai.types.shared import ErrorObject
from pydantic import BaseModel, TypeAdapter

from tests.gateway.gateways import events
from tests.gateway.openai_required import ERROR, lacking
from tests.support.stack import ROOT

Said = dict[str, Any]

# Fields that the types do not have, by type.
BEYOND = {
    "ChatCompletion": {"sluice"},
    "ChatCompletionMessage": {"reasoning"},
    "ChoiceDelta": {"reasoning"},
    "Model": {"max_model_len", "sluice"},
    "Response": {"store", "presence_penalty", "frequency_penalty"},
    "ResponseCustomToolCall": {"status"},
    "ResponseFunctionCallArgumentsDoneEvent": {"name"},
    "Logprob": {"bytes"},
    "LogprobTopLogprob": {"bytes"},
}
TOOL: Said = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
COUNT, THINK, CALL = "Count to 3.", "Think: what is 8 plus 3?", "Call the weather tool for Oslo."
VERSION = {"anthropic-version": "2023-06-01"}


def user(text: str) -> list[Said]:
    return [{"role": "user", "content": text}]


CHATS: dict[str, Said] = {
    "text": {"messages": user(COUNT)},
    "choices with logprobs": {"messages": user(COUNT), "n": 2, "logprobs": True, "top_logprobs": 2},
    "reasoning": {"messages": user(THINK)},
    "a call": {"messages": user(CALL), "tools": [{"type": "function", "function": TOOL}]},
    "a cut": {"messages": user(COUNT), "max_tokens": 2},
}
RESPONSES: dict[str, Said] = {
    "text": {"input": COUNT, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "reasoning": {"input": THINK, "include": ["reasoning.encrypted_content"]},
    "a summary": {"input": THINK, "reasoning": {"summary": "auto"}},
    "a call": {"input": CALL, "tools": [{"type": "function", **TOOL}]},
    "a custom call": {
        "input": COUNT,
        "tools": [
            {
                "type": "custom",
                "name": "say",
                "format": {"type": "grammar", "syntax": "regex", "definition": "(yes|no)"},
            }
        ],
        "tool_choice": {"type": "custom", "name": "say"},
    },
    "a cut": {"input": COUNT, "max_output_tokens": 2},
    "the background": {"input": COUNT, "background": True},
}
MESSAGES: dict[str, Said] = {
    "text": {"messages": user(COUNT)},
    "thinking": {"messages": user(THINK)},
    "a call": {"messages": user(CALL), "tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}]},
    "a cut": {"messages": user(COUNT), "max_tokens": 2},
    "a stop": {"messages": user(COUNT), "stop_sequences": [" 2"]},
}


def beyond(value: object) -> Iterator[tuple[str, str]]:
    """Yield the type and the name of each field that the types do not have."""
    if isinstance(value, list | tuple):
        for each in value:
            yield from beyond(each)
    if isinstance(value, BaseModel):
        yield from ((type(value).__name__, name) for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from beyond(getattr(value, name))


def check(kind: Any, data: object) -> None:
    """Check JSON against a type of an SDK. Raises ValidationError and AssertionError."""
    read = TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
    assert [(kind, name) for kind, name in beyond(read) if name not in BEYOND.get(kind, ())] == []


def check_openai(kind: Any, data: object) -> None:
    """Check JSON against a type of OpenAI's SDK, and for the fields that its description requires."""
    check(kind, data)
    assert list(lacking(data)) == []


async def post(http: httpx.AsyncClient, path: str, body: Said) -> Any:
    answer = await http.post(path, json={"model": "default", **body}, headers=VERSION)
    assert answer.status_code == 200, answer.text
    return events(answer.text) if body.get("stream") else answer.json()


@pytest.mark.parametrize("name", CHATS)
async def test_a_chat_completion_and_its_chunks_are_of_openai_s_types(real_http: httpx.AsyncClient, name: str) -> None:
    check_openai(ChatCompletion, await post(real_http, "/v1/chat/completions", CHATS[name]))
    streamed = {**CHATS[name], "stream": True, "stream_options": {"include_usage": True}}
    for chunk in await post(real_http, "/v1/chat/completions", streamed):
        check_openai(ChatCompletionChunk, chunk)


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_response_and_its_events_are_of_openai_s_types(real_http: httpx.AsyncClient, name: str) -> None:
    response = await post(real_http, "/v1/responses", RESPONSES[name])
    check_openai(Response, response)
    check_openai(ResponseItemList, (await real_http.get(f"/v1/responses/{response['id']}/input_items")).json())
    for event in await post(real_http, "/v1/responses", {**RESPONSES[name], "stream": True}):
        check_openai(ResponseStreamEvent, event)


@pytest.mark.parametrize("name", MESSAGES)
async def test_a_message_and_its_events_are_of_anthropic_s_types(real_http: httpx.AsyncClient, name: str) -> None:
    body = {"max_tokens": 50, **MESSAGES[name]}
    check(Message, await post(real_http, "/v1/messages", body))
    for event in await post(real_http, "/v1/messages", {**body, "stream": True}):
        check(RawMessageStreamEvent, event)


async def test_models_and_counts_are_of_the_sdk_s_types(real_http: httpx.AsyncClient) -> None:
    check_openai(list[Model], (await real_http.get("/v1/models")).json()["data"])
    check(list[ModelInfo], (await real_http.get("/v1/models", headers=VERSION)).json()["data"])
    check(MessageTokensCount, await post(real_http, "/v1/messages/count_tokens", {"messages": user(COUNT)}))


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_are_of_the_sdk_s_types(real_http: httpx.AsyncClient, stream: bool) -> None:
    said = {"messages": user(COUNT), "max_tokens": 5, "stream": stream}
    bodies = {"/v1/chat/completions": {**said, "top_p": 7}, "/v1/responses": {"input": COUNT, "top_p": 7}}
    for path, body in bodies.items():
        error = (await real_http.post(path, json={"model": "default", **body})).json()["error"]
        check(ErrorObject, error)
        assert error.keys() == set(ERROR.split())
    check(ErrorResponse, (await real_http.post("/v1/messages", json={"model": "default", **said, "top_p": 7})).json())


def test_a_missing_field_and_an_unknown_value_are_found() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}
    good = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    check(ChatCompletion, good)
    lacking = {name: value for name, value in good.items() if name != "created"}
    for bad in (lacking, {**good, "choices": [{**choice, "finish_reason": "done"}]}, {**good, "other": 1}):
        with pytest.raises((ValueError, AssertionError)):
            check(ChatCompletion, bad)


def test_a_required_field_that_may_be_null_is_missed() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}
    answer = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    assert list(lacking(answer)) == ["chat.completion.choices.logprobs", "chat.completion.choices.message.refusal"]
    part = {"type": "output_text", "text": "Hi.", "logprobs": []}
    event = {
        "type": "response.content_part.done",
        "sequence_number": 1,
        "item_id": "i",
        "output_index": 0,
        "part": part,
    }
    assert list(lacking(event)) == ["response.content_part.done.content_index", "output_text.annotations"]


def test_the_document_lists_the_fields_beyond_the_types() -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    section = page.partition("### Fields beyond OpenAI's")[2].partition("\n#")[0]
    assert {name for names in BEYOND.values() for name in names} <= set(re.findall(r"`(\w+)`", section))
