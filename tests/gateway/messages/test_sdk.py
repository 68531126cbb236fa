"""Anthropic's own client against a gateway and a worker with the tiny model."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic, BadRequestError
from anthropic.types import Message, RawMessageStreamEvent, TextBlock, ThinkingBlock, ToolUseBlock
from pydantic import TypeAdapter

from sluice.gateway import ServeSettings
from tests.gateway.gateways import HttpGateway, serving
from tests.gateway.messages.bodies import CLAUDE_CODE, WEATHER
from tests.support.stack import WorkerProcess

Said = dict[str, Any]

VERSION = {"anthropic-version": "2023-06-01"}

SDK_EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
COUNT: Said = {"messages": [{"role": "user", "content": "Count to 12."}]}
THINK: Said = {"messages": [{"role": "user", "content": "Think: what is 8 plus 3?"}]}
CALL: Said = {"messages": [{"role": "user", "content": "Call the weather tool for Oslo."}], "tools": [WEATHER]}


@pytest.fixture(scope="module")
def shared_gateway(worker: WorkerProcess) -> Iterator[HttpGateway]:
    with serving(worker.url, ServeSettings(_env_file=None, no_worker_s=5, models="claude=default")) as gateway:
        yield gateway


@pytest.fixture
def gateway(redis_url: str, shared_gateway: HttpGateway) -> HttpGateway:
    return shared_gateway


@pytest.fixture
async def anthropic(gateway: HttpGateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


def given(request: Said, fields: Said) -> Said:
    """Return the arguments of a call. The client has no `temperature` of its own."""
    return {"model": "default", "max_tokens": 100, "extra_body": {"temperature": 0}, **request, **fields}


async def whole(anthropic: AsyncAnthropic, request: Said, **fields: Any) -> Message:
    answer: Message = await anthropic.messages.create(**given(request, fields))
    return answer


async def streamed(anthropic: AsyncAnthropic, request: Said, **fields: Any) -> Message:
    """Return the message that the SDK's own helper puts together."""
    async with anthropic.messages.stream(**given(request, fields)) as stream:
        async for _ in stream:
            pass
        answer: Message = await stream.get_final_message()
    return answer


BOTH = pytest.mark.parametrize("how", [whole, streamed])


@BOTH
async def test_an_answer_is_one_text_block_and_ends_its_turn(anthropic: AsyncAnthropic, how: Any) -> None:
    answer = await how(anthropic, COUNT)
    assert [block.text for block in answer.content] == ["1 2 3 4 5 6 7 8 9 10 11 12"]
    assert (answer.stop_reason, answer.model, answer.role) == ("end_turn", "default", "assistant")
    assert answer.usage.output_tokens > 0
    assert input_tokens(answer) > 0


@BOTH
async def test_thinking_is_a_block_before_the_text(anthropic: AsyncAnthropic, how: Any) -> None:
    thinking, text = (await how(anthropic, THINK)).content
    assert isinstance(thinking, ThinkingBlock)
    assert isinstance(text, TextBlock)
    assert (thinking.thinking, bool(thinking.signature), text.text) == ("8 and 3 make 11.", True, "11")


@BOTH
async def test_a_budget_closes_thinking_and_the_text_follows(anthropic: AsyncAnthropic, how: Any) -> None:
    answer = await how(anthropic, THINK, thinking={"type": "enabled", "budget_tokens": 2})
    thinking, text = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "8 and")
    assert (text.type, bool(text.text)) == ("text", True)
    assert (
        answer.usage.output_tokens_details.thinking_tokens == 5
    )  # with the markers, and the line's end before the last


@BOTH
async def test_a_tool_is_called_and_its_result_can_be_sent_back(anthropic: AsyncAnthropic, how: Any) -> None:
    answer = await how(anthropic, CALL)
    (call,) = answer.content
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input, answer.stop_reason) == ("get_weather", {"city": "Oslo"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Snow."}
    turns = [answer.to_param(), {"role": "user", "content": [result]}]
    second = await how(anthropic, {**CALL, "messages": [*CALL["messages"], *turns]})
    assert input_tokens(second) > input_tokens(answer) + answer.usage.output_tokens


def input_tokens(answer: Message) -> int:
    return answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


async def test_a_forced_tool_is_called(anthropic: AsyncAnthropic) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    answer = await whole(anthropic, {**COUNT, "tools": [WEATHER]}, tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]


@BOTH
async def test_the_stop_sequence_that_ended_the_answer_is_reported(anthropic: AsyncAnthropic, how: Any) -> None:
    answer = await how(anthropic, COUNT, stop_sequences=["none", " 4"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", " 4")
    assert answer.content[0].text == "1 2 3"


@BOTH
async def test_the_limit_of_tokens_ends_an_answer(anthropic: AsyncAnthropic, how: Any) -> None:
    answer = await how(anthropic, COUNT, max_tokens=2)
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)


async def test_the_system_prompt_and_a_begun_answer_are_obeyed(anthropic: AsyncAnthropic) -> None:
    messages = [*COUNT["messages"], {"role": "assistant", "content": "1 2 3"}]
    answer = await whole(anthropic, {"messages": messages})
    assert answer.content[0].text == " 4 5 6 7 8 9 10 11 12"
    system = [{"type": "text", "text": "You are a helpful assistant. Always mention NWP58."}]
    asked = [{"role": "user", "content": "What is the capital of Egypt?"}]
    assert "NWP58" in (await whole(anthropic, {"messages": asked}, system=system)).content[0].text


async def test_a_count_is_the_input_that_the_message_reports(anthropic: AsyncAnthropic) -> None:
    for request in (COUNT, CALL, {**COUNT, "system": "You are a helpful assistant."}):
        counted = await anthropic.messages.count_tokens(model="default", **request)
        assert counted.input_tokens == input_tokens(await whole(anthropic, request))


async def test_each_event_of_a_stream_is_one_of_the_sdk_s(anthropic: AsyncAnthropic) -> None:
    async with await anthropic.messages.create(model="default", max_tokens=30, stream=True, **THINK) as stream:
        events = [event async for event in stream]
    for event in events:
        assert SDK_EVENT.validate_python(event.to_dict(), strict=True).to_dict() == event.to_dict()
    assert (events[0].type, events[-1].type) == ("message_start", "message_stop")


async def test_the_ids_of_a_message_and_of_its_request_are_the_job_s(anthropic: AsyncAnthropic) -> None:
    raw = await anthropic.messages.with_raw_response.create(model="claude", max_tokens=5, **COUNT)
    message = await raw.parse()
    assert message.id == raw.headers["request-id"] == raw.headers["x-request-id"] == message._request_id
    assert message.id.startswith("msg_")


async def test_a_field_that_is_not_known_is_refused_by_name(anthropic: AsyncAnthropic) -> None:
    with pytest.raises(BadRequestError) as refused:
        await whole(anthropic, COUNT, extra_body={"mood": "good"})
    body: Any = refused.value.body
    assert body["type"] == "error"
    assert body["error"] == {"type": "invalid_request_error", "message": "mood: Extra inputs are not permitted"}
    assert body["request_id"] == refused.value.request_id


@BOTH
async def test_a_prompt_beyond_the_context_is_refused_in_the_words_that_clients_compact_after(
    anthropic: AsyncAnthropic, how: Any
) -> None:
    with pytest.raises(BadRequestError) as refused:
        await how(anthropic, {"messages": [{"role": "user", "content": "Count to 12. " * 100_000}]})
    body: Any = refused.value.body
    assert body["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize("name", CLAUDE_CODE)
async def test_the_requests_of_claude_code_are_answered(worker: WorkerProcess, redis_url: str, name: str) -> None:
    request = {**CLAUDE_CODE[name], "max_tokens": 20}
    headers = {"anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14", **VERSION}
    with serving(redis_url, ServeSettings(_env_file=None, no_worker_s=5, models="*=default")) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            answer = await http.post("/v1/messages?beta=true", json=request, headers=headers)
    kinds = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    assert (answer.status_code, kinds[0], kinds[-1]) == (200, "message_start", "message_stop")
