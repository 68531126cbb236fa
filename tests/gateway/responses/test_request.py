"""Bodies of requests for responses, as chat completions of the contract."""

import json
from collections.abc import ItemsView
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.chat import ChatRequest
from sluice.interfaces.errors import ApiError
from sluice.interfaces.responses.conversation import enclosed
from sluice.interfaces.responses.record import NewResponse, new_response, parse_record
from sluice.interfaces.responses.request import read_response_request
from sluice.interfaces.tools import CalledTool, RequestTools, flattened, read_tools
from tests.gateway.responses.events import stream_events

Said = dict[str, Any]
WEATHER: Said = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}, "strict": True}
PATCH: Said = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
FILES: Said = {"type": "namespace", "name": "files", "description": "The disk.", "tools": [{**WEATHER, "name": "read"}]}
LARK: Said = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" start?'}
REGEX: Said = {"type": "grammar", "syntax": "regex", "definition": "a+|b"}
USER = {"role": "user", "content": "Hi."}


def chat(input: Any = "Hi.", **body: Any) -> Said:
    """Return the chat completion for a request, which the contract accepts."""
    new = new_response(read_response_request({"input": input, **body}), "resp_1", None)
    made = dict(new.chat)
    ChatRequest.model_validate(made)
    return made


def messages(*input: Said, **body: Any) -> list[Said]:
    found: list[Said] = chat(list(input), **body)["messages"]
    return found


def refused(input: Any = "Hi.", **body: Any) -> ApiError:
    with pytest.raises(ApiError) as refusal:
        new_response(read_response_request({"input": input, **body}), "resp_1", None)
    assert refusal.value.form.status == 400
    return refusal.value


def function_call(number: int, **fields: Any) -> Said:
    return {"type": "function_call", "call_id": f"c{number}", "name": "get_weather", "arguments": "{}", **fields}


def output(number: int, output: Any = "sun") -> Said:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": output}


def tool_call(number: int, name: str = "get_weather", arguments: str = "{}") -> Said:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_string_is_the_user_s_message_and_instructions_are_the_system_s() -> None:
    assert chat("Hi.", instructions="Be brief.")["messages"] == [{"role": "system", "content": "Be brief."}, USER]


def test_messages_have_their_roles_and_text() -> None:
    parts = [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i."}]
    answer = [{"type": "output_text", "text": "Yes?", "annotations": []}]
    found = messages(
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"type": "message", "role": "assistant", "content": answer, "id": "msg_1", "status": "completed"},
        USER,
    )
    assert found == [
        {"role": "developer", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Yes?"},
        USER,
    ]


def test_images_keep_their_place_between_texts() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "original"}
    (found,) = messages({"role": "user", "content": [{"type": "input_text", "text": "See"}, image]})
    url = {"url": "data:image/png;base64,AA==", "detail": "high"}
    assert found["content"] == [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": url}]


def test_reasoning_text_and_parallel_calls_are_one_message_of_the_assistant() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
    answer = {"role": "assistant", "content": "Looking."}
    found = messages(USER, reasoning, answer, function_call(1), function_call(2), output(1), output(2, "rain"))
    assert found[1:] == [
        {"role": "assistant", "reasoning": "r", "content": "Looking.", "tool_calls": [tool_call(1), tool_call(2)]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain"},
    ]


def test_calls_one_after_another_are_turns_of_their_own() -> None:
    found = messages(USER, function_call(1), output(1), function_call(2), output(2))
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "assistant", "tool"]


def test_an_image_of_a_tool_s_output_follows_all_outputs_as_the_user_s() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
    seen = [{"type": "input_text", "text": "attached"}, image]
    found = messages(USER, function_call(1), function_call(2), output(1, seen), output(2))
    assert [(message["role"], message.get("content")) for message in found[2:]] == [
        ("tool", "attached"),
        ("tool", "sun"),
        ("user", [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "auto"}}]),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"summary": [], "content": [{"type": "reasoning_text", "text": "8+3"}]},
        {"summary": [{"type": "summary_text", "text": "8+3"}]},
        {"summary": [], "encrypted_content": enclosed("8+3")},
    ],
)
def test_reasoning_is_read_from_any_of_its_forms(fields: Said) -> None:
    found = messages({"type": "reasoning", "id": "rs_1", **fields}, {"role": "assistant", "content": "11"}, USER)
    assert found[0] == {"role": "assistant", "reasoning": "8+3", "content": "11"}


def test_the_encrypted_reasoning_of_another_server_is_left_out() -> None:
    found = messages({"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB"}, USER)
    assert found == [USER]


def test_a_custom_tool_is_a_function_with_one_string_and_so_are_its_calls() -> None:
    called = {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'a"b'}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    made = chat([USER, called, result], tools=[PATCH])
    (tool,) = made["tools"]
    assert tool["function"]["name"] == "apply_patch"
    assert list(tool["function"]["parameters"]["properties"]) == ["input"]
    assert made["messages"][1]["tool_calls"] == [tool_call(1, "apply_patch", '{"input": "a\\"b"}')]
    assert made["messages"][2] == {"role": "tool", "tool_call_id": "c1", "content": "done"}


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [(REGEX, "^(?:a+|b)$"), ({**LARK, "definition": 'start: "a"+ b?\nb: /[b-c]/'}, "^(?:(?:a)+(?:(?:[b-c]))?)$")],
)
def test_a_forced_call_is_held_to_its_tool_s_grammar(grammar: Said, pattern: str) -> None:
    patch = {**PATCH, "format": grammar}
    free, held = (chat(tools=[WEATHER, patch], tool_choice=choice)["tools"][1] for choice in ("auto", "required"))
    assert grammar["definition"] in free["function"]["description"]
    assert "pattern" not in free["function"]["parameters"]["properties"]["input"]
    assert held["function"]["parameters"]["properties"]["input"]["pattern"] == pattern


def test_a_recursive_grammar_is_described_and_refused_where_it_would_be_forced() -> None:
    patch = {**PATCH, "format": LARK}
    (tool,) = chat(tools=[patch])["tools"]
    assert LARK["definition"] in tool["function"]["description"]
    assert refused(tools=[WEATHER, patch], tool_choice="required").param == "tools[1].format"
    assert refused(tools=[patch], tool_choice={"type": "custom", "name": "apply_patch"}).param == "tools[0].format"
    assert chat(tools=[WEATHER, patch], tool_choice={"type": "function", "name": "get_weather"})


def test_a_namespace_is_flattened_for_the_tools_and_for_earlier_calls() -> None:
    made = chat([USER, function_call(1, namespace="files", name="read"), output(1)], tools=[WEATHER, FILES])
    assert [tool["function"]["name"] for tool in made["tools"]] == ["get_weather", "files__read"]
    assert made["messages"][1]["tool_calls"] == [tool_call(1, "files__read")]


def test_the_names_of_namespaces_are_short_valid_and_unlike_other_names() -> None:
    long = flattened("n" * 124, "read")
    assert len(long) == 128
    assert long != flattened("n" * 124, "road")
    assert flattened("mcp__disk__", "read") == "mcp__disk__read"
    tools = read_tools([{**WEATHER, "name": "files__read"}, FILES])
    assert len(tools.functions) == 2
    assert {target.namespace for target in tools.targets.values()} == {None, "files"}
    assert tools.function("files", "read") != "files__read"


def test_hosted_tools_are_dropped_and_so_are_their_calls() -> None:
    search = {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "sun"}}
    request = read_response_request({"input": [USER, search], "tools": [{"type": "web_search"}, WEATHER]})
    new = new_response(request, "resp_1", None)
    assert new.dropped == ("web_search", "web_search_call")
    assert [tool["function"]["name"] for tool in new.chat["tools"]] == ["get_weather"]
    assert new.chat["messages"] == [USER]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "web_search_preview"}, "tool_choice"),
        ({"type": "function", "name": "nothing"}, "tool_choice.name"),
        ({"type": "custom", "name": "get_weather"}, "tool_choice.name"),
        ({"type": "other"}, "tool_choice.type"),
        ("always", "tool_choice"),
    ],
)
def test_a_choice_that_no_tool_can_answer_is_refused(choice: Any, param: str) -> None:
    assert refused(tools=[WEATHER, {"type": "web_search_preview"}], tool_choice=choice).param == param


def test_required_is_refused_if_only_hosted_tools_are_left() -> None:
    refusal = refused(tools=[{"type": "web_search"}], tool_choice="required")
    assert refusal.param == "tool_choice"
    assert "web_search" in refusal.message


@pytest.mark.parametrize(
    ("choice", "names", "chosen"),
    [
        ("required", ["get_weather", "files__read"], "required"),
        (
            {"type": "function", "name": "read", "namespace": "files"},
            ["get_weather", "files__read"],
            {"type": "function", "function": {"name": "files__read"}},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
            ["get_weather"],
            "required",
        ),
    ],
)
def test_a_choice_names_the_function(choice: Any, names: list[str], chosen: Any) -> None:
    made = chat(tools=[WEATHER, FILES], tool_choice=choice)
    assert [tool["function"]["name"] for tool in made["tools"]] == names
    assert made["tool_choice"] == chosen


def test_settings_have_their_names_in_the_contract() -> None:
    made = chat(
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
        reasoning={"effort": "high"},
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_logprobs=2,
        metadata={"a": "b"},
        user="u",
        safety_identifier="s",
        prompt_cache_key="k",
        seed=3,
        store=False,
        parallel_tool_calls=False,
        client_metadata={"session": "1"},
        prompt_cache_retention="24h",
        truncation="disabled",
    )
    del made["messages"]
    assert made == {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "verbosity": "low",
        "reasoning_effort": "high",
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "seed": 3,
        "store": False,
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"messages": []}, "messages"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": True}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a" * 65: "1"}}, "metadata"),
        ({"include": ["all"]}, "include[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"style": "x"}}, "text.style"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"background": True, "store": False}, "background"),
        ({"stream": "yes"}, "stream"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "robot"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{**FILES, "tools": [{"type": "web_search"}]}]}, "tools[0].tools[0].type"),
        (
            {"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "ebnf", "definition": ""}}]},
            "tools[0].format.syntax",
        ),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "system", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "sluice1:?"}]},
            "input[0].encrypted_content",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(body: Said, param: str) -> None:
    refusal = refused(**body)
    assert refusal.param == param
    assert refusal.message.startswith(f"{param}: ")


def test_more_tools_than_a_request_may_have_are_refused_by_name() -> None:
    inner = [{**WEATHER, "name": f"f{number}"} for number in range(1_000)]
    assert len(chat(tools=[{**FILES, "tools": inner}])["tools"]) == 1_000
    assert refused(tools=[{**FILES, "tools": inner}, WEATHER]).param == "tools"


@pytest.mark.parametrize(
    ("grammars", "limit"),
    [
        (["a"] * 32, None),
        (["a"] * 33, "32 grammars"),
        (["a" * 10_000] * 2, None),
        ([*["a" * 10_000] * 2, "b"], "20,000 characters of grammars"),
    ],
)
def test_all_grammars_of_a_forced_call_have_one_limit(grammars: list[str], limit: str | None) -> None:
    tools = [
        {**PATCH, "name": f"t{number}", "format": {**REGEX, "definition": each}} for number, each in enumerate(grammars)
    ]
    assert len(chat(tools=tools)["tools"]) == len(tools)  # nothing is enforced
    one = {"type": "custom", "name": "t0"}
    assert len(chat(tools=tools, tool_choice=one)["tools"]) == len(tools)
    if limit is None:
        assert len(chat(tools=tools, tool_choice="required")["tools"]) == len(tools)
    else:
        error = refused(tools=tools, tool_choice="required")
        assert (error.param, limit in error.message) == ("tools", True)


def test_grammars_whose_expressions_are_long_together_are_refused() -> None:
    rules = "\n".join(f"a{k}: a{k + 1} a{k + 1}" for k in range(10))
    definition = f'start: a0\n{rules}\na10: "0123456789abcdef"'  # 16 * 1024 characters
    tools = [{**PATCH, "name": f"t{k}", "format": {**LARK, "definition": definition}} for k in range(3)]
    assert len(chat(tools=tools[:2], tool_choice="required")["tools"]) == 2
    assert refused(tools=tools, tool_choice="required").param == "tools"


@pytest.mark.parametrize("grammar", [LARK, REGEX])
def test_a_long_grammar_is_refused_by_name(grammar: Said) -> None:
    tool = {**PATCH, "format": {**grammar, "definition": "a" * 10_001}}
    assert str(refused(tools=[tool]).param).endswith(".format.definition")


def test_the_functions_of_a_conversation_s_calls_are_found_without_a_scan_for_each() -> None:
    class Targets(dict[str, CalledTool]):
        scans = 0

        def items(self) -> ItemsView[str, CalledTool]:  # type: ignore[override]
            self.scans += 1
            return ItemsView(self)

    targets = Targets(first=CalledTool("read", "files"), second=CalledTool("read", "files"), third=CalledTool("read"))
    tools = RequestTools(targets=targets)
    assert [tools.function("files", "read"), tools.function(None, "read")] * 5 == ["first", "third"] * 5
    assert [tools.function("files", "write") for _ in range(9)] == ["files__write"] * 9
    assert targets.scans == 1


# Names and values that a body may have at any place, right or wrong.
NAMES = st.sampled_from(
    "arguments call_id content definition description detail effort encrypted_content format id image_url input "
    "instructions mode name namespace output parameters previous_response_id reasoning role schema strict summary "
    "syntax text tool_choice tools type".split()
)
WORDS = st.sampled_from(
    "allowed_tools assistant auto custom function function_call function_call_output grammar input_image input_text "
    "json_schema lark message namespace none output_text reasoning regex required user web_search \ud83d".split()
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 2) | WORDS,
    lambda value: st.lists(value, max_size=3) | st.dictionaries(NAMES, value, max_size=5),
    max_leaves=12,
)


@given(st.fixed_dictionaries({"input": VALUES}, optional=dict.fromkeys(("tools", "tool_choice", "text"), VALUES)))
def test_any_body_is_read_or_refused(body: Said) -> None:
    new = made_or_refused(body)
    if isinstance(new, ApiError):
        assert new.form.status == 400
        new.message.encode()  # names in it may hold half a surrogate pair
        return
    parsed = parse_record(new.written)
    assert parsed is not None
    assert parsed.to_json() == new.written
    for event in stream_events(new.record.head, []):
        json.dumps(event)


def made_or_refused(body: Said) -> NewResponse | ApiError:
    try:
        return new_response(read_response_request(body), "resp_1", None)
    except ApiError as refusal:
        return refusal
