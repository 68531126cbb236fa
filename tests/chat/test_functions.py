"""The older form of function calling becomes tools, and nothing of it is lost."""

from typing import Any

from schemas import ChatRequest
from schemas.chat import NamedFunction, NamedTool
from worker.chat.request import with_tools

ASK = {"role": "user", "content": "How is the weather?"}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}}


def translated(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return with_tools(ChatRequest.model_validate({"messages": list(messages), **fields}))


def called(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}}


def answered(name: str, content: str | None) -> dict[str, Any]:
    return {"role": "function", "name": name, "content": content}


def ids(request: ChatRequest) -> list[str]:
    """Return the id of each call and of each result, in order."""
    dumped = (message.model_dump() for message in request.messages)
    return [
        each
        for message in dumped
        for each in [*(call["id"] for call in message.get("tool_calls") or ()), message.get("tool_call_id")]
        if each
    ]


def test_functions_are_offered_as_tools() -> None:
    request = translated(ASK, functions=[WEATHER])
    assert [tool.model_dump(exclude_none=True) for tool in request.offered_tools] == [
        {"type": "function", "function": WEATHER}
    ]
    assert (request.functions, request.function_call, request.tool_choice) == (None, None, None)


def test_a_named_function_is_a_forced_tool() -> None:
    request = translated(ASK, functions=[WEATHER], function_call={"name": "get_weather"})
    assert request.tool_choice == NamedTool(type="function", function=NamedFunction(name="get_weather"))


def test_a_function_call_of_none_offers_nothing() -> None:
    assert translated(ASK, functions=[WEATHER], function_call="none").offered_tools == []


def test_a_result_answers_the_call_before_it() -> None:
    request = translated(ASK, called("get_weather", '{"city": "Ulm"}'), answered("get_weather", "Rain."), ASK)
    call, result = request.messages[1].model_dump(), request.messages[2].model_dump()
    assert call["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Ulm"}'}
    assert (call["function_call"], call["content"]) == (None, None)
    assert (result["role"], result["name"], result["content"]) == ("tool", "get_weather", "Rain.")
    assert ids(request) == ["function_1", "function_1"]


def test_results_of_one_name_answer_the_calls_in_order() -> None:
    said = [called("a"), called("a"), called("b"), answered("b", "1"), answered("a", "2"), answered("a", None)]
    assert ids(translated(*said)) == [
        "function_0",
        "function_1",
        "function_2",
        "function_2",
        "function_0",
        "function_1",
    ]


def test_a_result_without_a_call_has_an_id_of_its_own() -> None:
    assert ids(translated(called("a"), answered("b", "1"))) == ["function_0", "function_1"]


def test_a_request_of_today_s_form_stays_as_it_is() -> None:
    body = {"messages": [ASK], "tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"}
    request = ChatRequest.model_validate(body)
    assert with_tools(request) == request
