"""Requests whose history holds what is not supported, and what is made of it."""

from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel

from schemas.messages import AssistantMessage, ToolMessage
from sluice.gateway import ServeSettings
from sluice.interfaces import committed
from sluice.interfaces.messages.body import MessagesBody, validate
from sluice.interfaces.messages.committed import messages as read_committed
from sluice.interfaces.messages.request import chat_request
from sluice.interfaces.responses.conversation import read_conversation
from sluice.interfaces.responses.request import read_response_request
from tests.gateway.gateways import events, serving
from worker.chat.request import read_request as read_by_worker

Body = dict[str, Any]
PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
USER: Body = {"role": "user", "content": "Hi."}
ANSWER: Body = {"role": "assistant", "content": "Yes."}


def chat(*messages: Body, **more: Any) -> tuple[Body, list[str]]:
    body, ignored = committed.chat({"messages": list(messages), **more})
    read_by_worker(body, "default", max_parts=100)
    return body, ignored


def messages(*given: Body, **more: Any) -> tuple[Body, list[str]]:
    body, ignored = read_committed({"model": "default", "max_tokens": 9, "messages": list(given), **more})
    request = chat_request(validate(MessagesBody, body))
    read_by_worker(request, "default", max_parts=100)
    return request, ignored


@pytest.mark.parametrize(
    ("message", "left_out"),
    [
        ({**ANSWER, "thinking_blocks": []}, "messages.thinking_blocks"),
        ({**ANSWER, "usage": {"total_tokens": 3}}, "messages.usage"),
        ({**ANSWER, "mood": "x"}, "messages.mood"),
        ({**USER, "cache_control": {"type": "ephemeral"}}, "messages.cache_control"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}, "content.cache_control"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "input_audio"),
    ],
)
def test_a_chat_s_history_may_hold_what_only_describes(message: Body, left_out: str) -> None:
    assert chat(USER, message, ANSWER, USER)[1] == [left_out]


def test_a_part_that_no_model_reads_is_refused_in_the_newest_message_alone() -> None:
    part = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
    said = chat(part, ANSWER, USER)[0]["messages"][0]["content"]
    assert said == [{"type": "text", "text": "[input_audio: this model cannot read it]"}]
    assert committed.chat({"messages": [ANSWER, part]}) == ({"messages": [ANSWER, part]}, [])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"top_p": 0}, {"temperature": 0}),
        ({"top_k": -1}, {}),
        ({"max_tokens": -1}, {}),
        ({"prompt_cache_retention": "24h"}, {}),
        ({"prompt_cache_options": {}}, {}),
    ],
)
def test_other_spellings_of_options_are_read(given: Body, read: Body) -> None:
    assert chat(USER, **given) == ({"messages": [USER], **read}, list(given))


def test_usage_that_is_asked_for_as_openrouter_has_it_is_sent_at_the_end_of_a_stream() -> None:
    included = {"usage": {"include": True}}
    streamed = {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}}
    assert chat(USER, stream=True, **included) == (streamed, ["usage"])
    assert chat(USER, **included) == ({"messages": [USER]}, ["usage"])
    assert chat(USER, stream=True, usage={}) == ({"messages": [USER], "stream": True}, ["usage"])


def test_a_tool_may_answer_with_an_image_or_with_nothing() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    image = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "a"}, PNG]}
    body, _ = chat(USER, asked, image)
    assert [each["role"] for each in body["messages"]] == ["user", "assistant", "tool", "user"]
    assert body["messages"][-1]["content"][-1] == PNG
    nothing = {"role": "tool", "tool_call_id": "1", "content": None}
    assert chat(USER, asked, nothing)[0]["messages"][-1]["content"] == ""


def test_a_refusal_that_is_sent_back_is_its_text() -> None:
    back = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert chat(USER, back, USER)[0]["messages"][1]["content"] == [{"type": "text", "text": "No."}]


@pytest.mark.parametrize(
    "block",
    [PDF, {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}, {"type": "tool_reference"}],
)
def test_a_block_of_anthropic_s_own_in_the_history_becomes_a_text(block: Body) -> None:
    role = "user" if block is PDF else "assistant"
    request, ignored = messages(USER, {"role": role, "content": [block]}, ANSWER, USER)
    assert f"[{block['type']}: this model cannot read it]" in str(request["messages"])
    assert ignored == [block["type"]]


@pytest.mark.parametrize("block", [PDF, {"type": "tool_reference", "tool_name": "x"}])
def test_the_result_of_a_tool_is_never_the_client_s_fault(block: Body) -> None:
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [block]}]}
    request, _ = messages(USER, use, result)
    assert request["messages"][-1]["content"] == f"[{block['type']}: this model cannot read it]"


def test_notes_of_claude_code_and_examples_of_tools_are_left_out() -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}, "input_examples": [{}]}
    noted = {**USER, "output_config": {"effort": "high"}}
    _, ignored = messages(noted, ANSWER, noted, tools=[tool], container=None)
    assert ignored == ["container", "tools.input_examples", "messages.output_config"]


def system(*content: Body, **more: Any) -> Body:
    return {"role": "system", "content": list(content), **more}


def addition(**tool: Any) -> Body:
    return {"type": "tool_addition", "tool": tool}


def test_a_tool_that_is_added_within_a_conversation_is_offered_and_told_at_its_place() -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}, "defer_loading": True}
    later = {"name": "find", "input_schema": {"type": "object"}}
    told = system(
        {"type": "text", "text": "A server has connected."},
        addition(type="tool_reference", name="look"),
        addition(type="tool_definition", definition=later),
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "old"}},
    )
    for given in ([USER, told], [USER, told, ANSWER, USER]):
        request, ignored = messages(*given, tools=[tool])
        assert ignored == []
        assert [each["function"]["name"] for each in request["tools"]] == ["look", "find"]
        assert request["messages"][1]["content"] == (
            "A server has connected.\n\nThe tool look is available from here on.\n\n"
            "The tool find is available from here on.\n\nThe tool old is not available any more."
        )


def test_a_conversation_in_which_a_tool_was_removed_begins_as_before() -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    removal = system({"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}})
    before, _ = messages(USER, tools=[tool])
    after, _ = messages(USER, ANSWER, removal, USER, tools=[tool])
    assert (after["tools"], after["messages"][:1]) == (before["tools"], before["messages"])


def test_a_tool_of_an_mcp_server_is_a_text_in_the_history() -> None:
    added = system(addition(type="mcp_toolset_reference", server_name="x"))
    request, ignored = messages(USER, added, ANSWER, USER)
    assert request["messages"][1]["content"] == "[tool_addition: this model cannot read it]"
    assert ignored == ["tool_addition"]


def test_the_effort_of_the_last_message_that_names_one_holds() -> None:
    stated = system(output_config={"effort": "low"})
    for given in ([USER, stated], [USER, stated, ANSWER, USER]):
        request, ignored = messages(*given, output_config={"effort": "high"})
        assert (request["reasoning_effort"], ignored) == ("low", [])
        assert "system" not in [each["role"] for each in request["messages"]]


def test_a_reminder_is_shown_until_the_next_message_of_the_user() -> None:
    reminder = system({"type": "text", "text": "Hurry."}, clear_at="next_user_message")
    assert messages(USER, reminder)[0]["messages"][-1] == {"role": "system", "content": "Hurry."}
    assert messages(USER, reminder, ANSWER)[0]["messages"][1] == {"role": "system", "content": "Hurry."}
    assert [each["role"] for each in messages(USER, reminder, ANSWER, USER)[0]["messages"]] == [
        "user", "assistant", "user",
    ]  # fmt: skip


@pytest.mark.parametrize("model", [AssistantMessage, ToolMessage])
def test_the_fields_of_a_chat_s_messages_are_the_contract_s(model: type[BaseModel]) -> None:
    (role,) = get_args(model.model_fields["role"].annotation)
    read = {"role", "content", *committed._CHAT_FIELDS[role]}
    assert read == model.model_fields.keys() - {"provider_specific_fields"}  # which only describes


def test_a_search_result_is_its_text() -> None:
    found = {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "C"}]}
    request, _ = messages({"role": "user", "content": [found]})
    assert request["messages"][-1]["content"] == [{"type": "text", "text": "T\nS\nC"}]


def test_a_pdf_of_the_newest_message_is_left_to_be_refused() -> None:
    body = {"messages": [ANSWER, {"role": "user", "content": [PDF]}]}
    assert read_committed(body) == (body, [])


def test_tools_in_the_input_of_a_response_are_offered() -> None:
    tool = {"type": "function", "name": "look", "parameters": {}}
    given = {"input": [{"type": "additional_tools", "role": "developer", "tools": [tool]}, USER]}
    body, _ = committed.responses(given)
    assert list(read_response_request(body).tools.functions) == ["look"]
    assert body["input"] == [USER]


def test_an_unknown_item_becomes_a_text_in_the_history_alone() -> None:
    item = {"type": "compaction", "id": "1"}
    body, ignored = committed.responses({"input": [item, ANSWER, USER, item]})
    request = read_response_request(body)
    assert read_conversation(request.items[:-1], request.tools)[0]["content"].startswith("[compaction: ")
    assert (body["input"][-1], ignored) == (item, ["compaction"])


LEFT_OUT = {
    "/v1/chat/completions": {"messages": [USER, {**ANSWER, "usage": {}}, USER]},
    "/v1/messages": {"model": "default", "max_tokens": 9, "messages": [USER, {**ANSWER, "usage": {}}, USER]},
    "/v1/responses": {"input": [{"type": "compaction", "id": "1"}, ANSWER, USER]},
}


@pytest.mark.parametrize("path", LEFT_OUT)
async def test_whole_and_streamed_answers_name_what_was_left_out(
    http: httpx.AsyncClient, fake_worker: None, path: str
) -> None:
    body = {**LEFT_OUT[path], "say": ["Hi"]} if path == "/v1/chat/completions" else LEFT_OUT[path]
    name = "compaction" if path == "/v1/responses" else "messages.usage"
    stream = await http.post(path, json={**body, "stream": True})
    first, *rest = [event.get("message") or event.get("response") or event for event in events(stream.text)]
    assert first["sluice"] == {"ignored": [name]}
    named = [each for each in rest if "sluice" in each]
    assert all(each["sluice"] == first["sluice"] for each in named)
    assert len(named) == (2 if path == "/v1/responses" else 0)
    if path == "/v1/chat/completions":
        return  # the answer of a worker without a model is no completion
    whole = await http.post(path, json=body)
    assert whole.json()["sluice"]["ignored"] == [name]


async def test_the_answer_names_what_was_left_out(http: httpx.AsyncClient, fake_worker: None) -> None:
    answer = await http.post("/v1/chat/completions", json=LEFT_OUT["/v1/chat/completions"])
    assert answer.json()["sluice"]["ignored"] == ["messages.usage"]


async def test_an_item_of_a_stored_response_is_found(http: httpx.AsyncClient, fake_worker: None) -> None:
    first = (await http.post("/v1/responses", json={"input": "Hi."})).json()
    (stored,) = (await http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    reference = {"type": "item_reference", "id": stored["id"]}
    second = await http.post("/v1/responses", json={"input": [reference, USER]})
    assert second.status_code == 200
    items = (await http.get(f"/v1/responses/{second.json()['id']}/input_items")).json()["data"]
    assert stored in items
    absent = {"type": "item_reference", "id": "msg_0_0"}
    assert (await http.post("/v1/responses", json={"input": [absent, USER]})).status_code == 404


async def test_a_strict_gateway_refuses_it(redis_url: str, fake_worker: None) -> None:
    with serving(redis_url, ServeSettings(_env_file=None, strict=True)) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            answer = await http.post(
                "/v1/messages",
                json={"model": "default", "max_tokens": 9, "messages": [{**USER, "output_config": {}}, ANSWER, USER]},
            )
    assert answer.status_code == 400
