"""Custom tools and allowed tools of chat completions: the worker sees functions, and the client its own tools."""

import json
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion

from sluice.gateway.chat import read_chat_request
from sluice.interfaces.errors import ApiError
from sluice.interfaces.tools import CustomCalls, read_tools
from tests.gateway.gateways import events
from worker.chat.request import read_request as read_by_worker

Body = dict[str, Any]
GRAMMAR = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}}
SHELL: Body = {"type": "custom", "custom": {"name": "shell", "description": "Runs it."}}
WORD: Body = {"type": "custom", "custom": {"name": "word", "format": GRAMMAR}}
LOOK: Body = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
USER: Body = {"role": "user", "content": "Hi."}


def read(**more: Any) -> Body:
    body = read_chat_request({"messages": [USER], **more}, 100, 10_000).body
    read_by_worker(body, "default", max_parts=100)
    return body


def names(body: Body) -> list[str]:
    return [tool["function"]["name"] for tool in body["tools"]]


def test_a_custom_tool_is_a_function_with_one_string_for_the_worker() -> None:
    body = read(tools=[SHELL, LOOK])
    assert names(body) == ["shell", "look"]
    assert body["tools"][0]["function"]["parameters"]["required"] == ["input"]
    assert body["tools"][1] == LOOK


def test_a_forced_custom_tool_is_held_to_its_grammar() -> None:
    body = read(tools=[WORD, LOOK], tool_choice={"type": "custom", "custom": {"name": "word"}})
    assert body["tool_choice"] == {"type": "function", "function": {"name": "word"}}
    assert body["tools"][0]["function"]["parameters"]["properties"]["input"]["pattern"] == "^(?:[a-z]+)$"


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_are_the_only_ones_that_the_worker_is_offered(mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "look"}}]}
    body = read(tools=[LOOK, SHELL], tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert (names(body), body["tool_choice"]) == (["look"], mode)


def test_a_request_with_functions_alone_is_the_worker_s_to_check() -> None:
    given = {"messages": [USER], "tools": [{"type": "function", "function": {"name": "look", "mood": 1}}]}
    assert read_chat_request(given, 100, 10_000).body == given


def test_a_call_in_the_history_is_one_of_the_function() -> None:
    call = {"id": "1", "type": "custom", "custom": {"name": "shell", "input": 'ls "a"'}}
    told = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "b"}]
    function = read(messages=told, tools=[SHELL])["messages"][1]["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("shell", {"input": 'ls "a"'})


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tools": [SHELL, {"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools[0].custom.name"),
        ({"tools": [SHELL], "tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice.custom.name"),
        (
            {
                "tools": [SHELL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}},
            },
            "tool_choice.allowed_tools.mode",
        ),
    ],
)
def test_a_mistake_is_named_at_its_place(more: Body, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_chat_request({"messages": [USER], **more}, 100, 10_000)
    assert refused.value.param == param


def streamed(*pieces: str, name: str = "shell") -> list[Body]:
    """The deltas of a call that the model writes in pieces, as the client receives them."""
    calls = CustomCalls(read_tools([SHELL, LOOK]))

    def chunk(delta: Body, reason: str | None = None) -> Body:
        return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    first = {"index": 0, "id": "1", "type": "function", "function": {"name": name, "arguments": ""}}
    given = [chunk({"tool_calls": [first]})]
    given += [chunk({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}) for piece in pieces]
    chunks = [calls.in_chunk(each) for each in [*given, chunk({}, "tool_calls")]]
    return [call for each in chunks for call in each["choices"][0]["delta"].get("tool_calls", ())]


def test_the_input_is_streamed_as_it_is_written() -> None:
    begin, *rest = streamed('{"inp', 'ut": "l', "s \\u00", 'e4"}')
    assert begin == {"index": 0, "id": "1", "type": "custom", "custom": {"name": "shell", "input": ""}}
    assert [each["custom"]["input"] for each in rest] == ["l", "s ", "ä"]


def test_arguments_of_another_form_are_the_input_at_the_end() -> None:
    assert streamed('{"cmd": "ls"}')[1:] == [{"index": 0, "custom": {"input": '{"cmd": "ls"}'}}]


def test_a_call_of_a_function_stays_one() -> None:
    assert [each["function"]["arguments"] for each in streamed('{"a"', ": 1}", name="look")] == ["", '{"a"', ": 1}"]


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_client_receives_its_own_tools_calls(http: httpx.AsyncClient, fake_worker: None, choices: int) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"input": "ls -l"}'}}
    asked = {"messages": [USER], "tools": [SHELL], "n": choices, "calls": [call]}
    whole = await http.post("/v1/chat/completions", json=asked)
    completion = ChatCompletion.model_validate(whole.json())
    custom = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}
    assert [choice.message.to_dict()["tool_calls"] for choice in completion.choices] == [[custom]] * choices
    stream = await http.post("/v1/chat/completions", json={**asked, "stream": True})
    inputs = [""] * choices
    for chunk in events(stream.text):
        for choice in chunk["choices"]:
            for each in choice["delta"].get("tool_calls", ()):
                inputs[choice["index"]] += each["custom"]["input"]
    assert inputs == ["ls -l"] * choices
