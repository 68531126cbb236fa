"""Bodies of Anthropic's Messages become requests of the contract, or are refused with the place."""

import json
import logging
from typing import Any

import pytest

from schemas import ChatRequest
from sluice.interfaces.errors import ApiError
from sluice.interfaces.messages.body import CountBody, MessagesBody, validate
from sluice.interfaces.messages.request import chat_request, prompt_fields
from tests.gateway.messages.bodies import CLAUDE_CODE, HOSTED, WEATHER

HELLO: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello"}]}
PIXEL = {"type": "base64", "media_type": "image/png", "data": "aGk="}
PDF = {"type": "base64", "media_type": "application/pdf", "data": ""}
IMAGE = {"type": "image", "source": PIXEL}
IMAGE_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def translated(**fields: Any) -> dict[str, Any]:
    request = chat_request(validate(MessagesBody, {**HELLO, **fields}))
    ChatRequest.model_validate(request)  # a worker accepts it
    return request


def messages(*given: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = translated(messages=list(given), **fields)["messages"]
    return found


def refusal(**fields: Any) -> tuple[int, str]:
    with pytest.raises(ApiError) as refused:
        translated(**fields)
    return refused.value.form.status, refused.value.message


def test_a_short_body_has_no_more_fields_than_it_needs() -> None:
    assert translated() == {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9}


def test_sampling_and_stop_sequences_are_the_contract_s() -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "stop_sequences": ["END"]}
    request = translated(**given)
    assert {name: request[name] for name in ("temperature", "top_p", "top_k", "stop")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "stop": ["END"],
    }  # fmt: skip


@pytest.mark.parametrize(
    "system", ["Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]]
)
def test_the_system_prompt_is_the_first_message(system: Any) -> None:
    assert messages({"role": "user", "content": "Hi"}, system=system)[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("blocks", [True, False])
def test_claude_code_s_attribution_is_no_instruction(blocks: bool) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=cli;"
    texts = [line, "You are an agent.", "x-anthropic-billing-header: is what begins it."]
    system: Any = [{"type": "text", "text": text} for text in texts] if blocks else "\n\n".join(texts)
    first, _ = translated(system=system)["messages"]
    assert first == {"role": "system", "content": "\n\n".join(texts[1:])}
    (only,) = translated(system=line)["messages"]
    assert only["role"] == "user"


def test_images_keep_their_place_between_texts() -> None:
    url = {"type": "image", "source": {"type": "url", "url": "https://pictures.example/cat.png"}}
    (message,) = messages({"role": "user", "content": [{"type": "text", "text": "A"}, IMAGE, url]})
    assert message["content"] == [
        {"type": "text", "text": "A"},
        IMAGE_PART,
        {"type": "image_url", "image_url": {"url": "https://pictures.example/cat.png"}},
    ]


def test_a_plain_text_document_is_text_with_its_title() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Snow."}
    (message,) = messages({"role": "user", "content": [{"type": "document", "source": source, "title": "Weather"}]})
    assert message["content"] == [{"type": "text", "text": "Weather\n\nSnow."}]


def test_tool_results_come_before_the_rest_of_their_turn_and_their_images_after_them() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Look:"}, IMAGE]},
        {"type": "tool_result", "tool_use_id": "b", "content": "No such file", "is_error": True},
        {"type": "tool_result", "tool_use_id": "c"},
    ]
    assert messages({"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]}) == [
        {"role": "tool", "tool_call_id": "a", "content": "Look:"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: No such file"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "The images of the result a:"},
                IMAGE_PART,
                {"type": "text", "text": "And now?"},
            ],
        },
    ]


def test_an_earlier_answer_keeps_its_thinking_text_and_calls() -> None:
    blocks = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Tromsø"}},
    ]
    (message,) = messages({"role": "assistant", "content": blocks})
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Tromsø"}'}}
    assert message == {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "tool_calls": [call]}


def test_an_answer_of_calls_alone_has_no_content() -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    (message,) = messages({"role": "assistant", "content": [call]})
    assert message["content"] is None


@pytest.mark.parametrize(
    ("choice", "fields"),
    [
        (None, {}),
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        (
            {"type": "tool", "name": "get_weather"},
            {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        ),
    ],
)
def test_tools_and_their_choice_are_the_contract_s(choice: Any, fields: dict[str, Any]) -> None:
    request = translated(tools=[WEATHER], tool_choice=choice)
    function = {
        "name": WEATHER["name"],
        "description": WEATHER["description"],
        "parameters": WEATHER["input_schema"],
    }
    assert request["tools"] == [{"type": "function", "function": function}]
    names = ("tool_choice", "parallel_tool_calls")
    assert {name: request[name] for name in names if name in request} == fields


@pytest.mark.parametrize("characters", [64, 65, 128])
def test_a_name_may_be_as_long_as_mcp_allows(characters: int) -> None:
    name = "mcp__" + "a" * (characters - 5)
    request = translated(tools=[{**WEATHER, "name": name}])
    assert request["tools"][0]["function"]["name"] == name


def test_hosted_tools_that_are_offered_are_left_out_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sluice.gateway"):
        request = translated(tools=[HOSTED, WEATHER, {"type": "bash_20250124", "name": "bash"}])
    assert [tool["function"]["name"] for tool in request["tools"]] == ["get_weather"]
    assert [record.getMessage() for record in caplog.records] == [
        "left out tools that only Anthropic's servers have: 'web_search, bash'"
    ]
    assert "tools" not in translated(tools=[HOSTED], tool_choice={"type": "auto"})


def test_the_name_of_a_hosted_tool_begins_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sluice.gateway"):
        translated(tools=[{"type": "bash_20250124", "name": "bash\n2026 a forged line \x1b[31m"}, WEATHER])
    assert [message for message in caplog.messages if "\n" in message or "\x1b" in message] == []
    assert "bash" in caplog.messages[0]


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([HOSTED, WEATHER], {"type": "tool", "name": "web_search"}),
        ([HOSTED], {"type": "any"}),
        ([], {"type": "any"}),
        ([WEATHER], {"type": "tool", "name": "other"}),
    ],
)
def test_a_choice_that_no_tool_can_satisfy_is_refused(tools: list[Any], choice: dict[str, str]) -> None:
    status, message = refusal(tools=tools, tool_choice=choice)
    assert (status, message.partition(":")[0]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("thinking", "variables", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True, "thinking": True}, 2048),
        ({"type": "adaptive"}, {"enable_thinking": True, "thinking": True}, None),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False}, None),
        (None, None, None),
    ],
)
def test_thinking_sets_the_budget_and_the_variables_that_templates_read(
    thinking: Any, variables: Any, budget: Any
) -> None:
    made = translated(thinking=thinking)
    assert (made.get("chat_template_kwargs"), made.get("max_reasoning_tokens")) == (variables, budget)


@pytest.mark.parametrize("place", ["output_format", "output_config"])
def test_an_output_format_is_a_response_format(place: str) -> None:
    wanted = {"type": "json_schema", "schema": {"type": "object"}}
    fields = {"output_format": wanted} if place == "output_format" else {"output_config": {"format": wanted}}
    schema = {"name": "output", "schema": {"type": "object"}}
    assert translated(**fields)["response_format"] == {"type": "json_schema", "json_schema": schema}


@pytest.mark.parametrize(("user_id", "length"), [("u-1", 3), ("u" * 128, 128), ("u" * 129, 64)])
def test_a_user_id_is_the_user_and_a_long_one_its_hash(user_id: str, length: int) -> None:
    assert len(translated(metadata={"user_id": user_id})["user"]) == length


def test_the_service_tier_is_the_contract_s() -> None:
    assert [translated(service_tier=tier)["service_tier"] for tier in ("auto", "standard_only")] == ["auto", "default"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mood": "good"}, "mood: Extra inputs are not permitted"),
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": "9"}, "max_tokens: Input should be a valid integer"),
        ({"messages": []}, "messages: List should have at least 1 item after validation, not 0"),
        ({"temperature": 3}, "temperature: Input should be less than or equal to 2"),
        ({"stop_sequences": [""]}, "stop_sequences.0: String should have at least 1 character"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: Field required"),
        ({"system": [{"type": "text", "text": 1}]}, "system.0.text: Input should be a valid string"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema: Field required"),
        ({"mcp_servers": []}, "mcp_servers: Extra inputs are not permitted"),
    ],
)
def test_an_invalid_field_is_named_in_anthropic_s_words(fields: dict[str, Any], message: str) -> None:
    assert refusal(**fields) == (400, message)


@pytest.mark.parametrize(
    ("block", "place"),
    [
        ({"type": "image", "source": {**PIXEL, "media_type": "image/bmp"}}, "source.media_type"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "source"),
        ({"type": "document", "source": PDF}, "source.type"),
        ({"type": "text", "text": "a", "mood": "b"}, "mood"),
        ({"type": "text", "text": "\ud83d"}, "text"),
        ({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text"}]}, "content.0.text"),
        ({"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}, ""),
    ],
)
def test_an_invalid_block_is_named_by_its_place(block: dict[str, Any], place: str) -> None:
    _, message = refusal(messages=[HELLO["messages"][0], {"role": "user", "content": [block]}])
    assert message.partition(": ")[0] == f"messages.1.content.0.{place}".rstrip(".")


def test_a_count_takes_the_prompt_s_fields_alone() -> None:
    body = {name: value for name, value in HELLO.items() if name != "max_tokens"}
    counted = prompt_fields(validate(CountBody, {**body, "system": "Be brief.", "tools": [WEATHER]}))
    assert counted == {
        name: value
        for name, value in translated(system="Be brief.", tools=[WEATHER]).items()
        if name in ("model", "messages", "tools")
    }
    with pytest.raises(ApiError) as refused:
        validate(CountBody, HELLO)
    assert refused.value.param == "max_tokens"


@pytest.mark.parametrize("name", CLAUDE_CODE)
def test_the_requests_of_claude_code_are_accepted(name: str) -> None:
    body = json.loads(json.dumps(CLAUDE_CODE[name]))
    request = chat_request(validate(MessagesBody, body))
    ChatRequest.model_validate(request)
    assert request["messages"][0]["role"] == "system"
