"""OpenAI's own client against the gateway, with a real server and a worker with the tiny model."""

import asyncio
import json
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from redis.asyncio import Redis

from sluice.contract import keys
from tests.waiting import until

Said = dict[str, Any]

STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
COUNT = "Count to 12."
TWELVE = "1 2 3 4 5 6 7 8 9 10 11 12"
THINK = "Think: what is 8 plus 3?"
CALL = "Call the weather tool for Oslo."
WEATHER: Said = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
ENDLESS = {"logit_bias": {"0": -100, "2": -100}, "max_output_tokens": 20_000}  # a bias against every end of the answer


async def create(openai: AsyncOpenAI, input: Any = COUNT, **fields: Any) -> Any:
    extra = {name: fields.pop(name) for name in list(fields) if name == "logit_bias"}
    return await openai.responses.create(model="default", input=input, temperature=0, extra_body=extra, **fields)


async def streamed(openai: AsyncOpenAI, input: Any = COUNT, **fields: Any) -> list[Any]:
    events = [event async for event in await create(openai, input, stream=True, **fields)]
    for event in events:
        STREAM_EVENT.validate_python(event.to_dict())
    return events


def without_times(response: Response) -> Said:
    return {name: value for name, value in response.to_dict().items() if name not in ("created_at", "completed_at")}


async def test_an_answer_is_its_output_text_and_is_retrieved_as_it_was(openai: AsyncOpenAI) -> None:
    response = await create(openai, metadata={"a": "b"}, instructions="Answer.")
    assert (response.output_text, response.status) == (TWELVE, "completed")
    assert (response.metadata, response.instructions, response.model) == ({"a": "b"}, "Answer.", "default")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 12
    Response.model_validate(response.to_dict())
    assert await openai.responses.retrieve(response.id) == response


async def test_a_stream_ends_with_the_response_that_is_retrieved(openai: AsyncOpenAI) -> None:
    events = await streamed(openai)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == TWELVE
    assert events[-1].type == "response.completed"
    assert await openai.responses.retrieve(events[-1].response.id) == events[-1].response


async def test_the_sdk_s_helper_puts_the_stream_together(openai: AsyncOpenAI) -> None:
    async with openai.responses.stream(model="default", input=COUNT, temperature=0) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == TWELVE


async def test_reasoning_is_an_item_of_its_own(openai: AsyncOpenAI) -> None:
    response = await create(openai, THINK, include=["reasoning.encrypted_content"])
    reasoning, message = response.output
    assert reasoning.content[0].text == "8 and 3 make 11."
    assert message.content[0].text == "11"
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    again = [{"role": "user", "content": THINK}, *(item.to_dict() for item in response.output)]
    more = await create(openai, [*again, {"role": "user", "content": COUNT}])
    assert more.output_text == TWELVE


async def test_a_budget_closes_reasoning_and_the_message_follows(openai: AsyncOpenAI) -> None:
    response = await create(openai, THINK, reasoning={"max_tokens": 2})
    reasoning, message = response.output
    assert (reasoning.content[0].text, bool(message.content[0].text)) == ("8 and", True)
    assert response.usage.output_tokens_details.reasoning_tokens == 5
    assert (await openai.responses.retrieve(response.id)).usage == response.usage


async def test_a_tool_is_called_and_its_output_is_answered(openai: AsyncOpenAI) -> None:
    first = await create(openai, CALL, tools=[WEATHER])
    (call,) = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "get_weather", {"city": "Oslo"})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = await create(openai, [output], tools=[WEATHER], previous_response_id=first.id)
    assert second.status == "completed"
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize(("syntax", "definition"), [("regex", "(yes|no)"), ("lark", 'start: "yes" | "no"')])
async def test_the_input_of_a_forced_custom_tool_follows_its_grammar(
    openai: AsyncOpenAI, syntax: str, definition: str
) -> None:
    tool = {"type": "custom", "name": "say", "format": {"type": "grammar", "syntax": syntax, "definition": definition}}
    events = await streamed(openai, tools=[tool], tool_choice={"type": "custom", "name": "say"})
    (call,) = events[-1].response.output
    assert (call.type, call.name, call.input in ("yes", "no")) == ("custom_tool_call", "say", True)
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == call.input


async def test_a_schema_binds_the_text(openai: AsyncOpenAI) -> None:
    properties = {"a": {"enum": [1]}}
    schema = {"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False}
    text: Said = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    response = await create(openai, text=text)
    assert json.loads(response.output_text) == {"a": 1}


async def test_an_answer_that_reaches_its_limit_is_incomplete(openai: AsyncOpenAI) -> None:
    response = await create(openai, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_conversation_is_continued_by_the_id_of_a_response(openai: AsyncOpenAI) -> None:
    first = await create(openai, "My name is Ada.")
    second = await create(openai, COUNT, previous_response_id=first.id)
    third = await create(openai, "What is my name?", previous_response_id=second.id)
    assert "Ada" in third.output_text
    items = [item async for item in openai.responses.input_items.list(third.id, order="asc", limit=2)]
    assert [item.type for item in items] == ["message"] * 5
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
    latest = await openai.responses.input_items.list(third.id, limit=1)
    assert (latest.data[0].content[0].text, latest.has_more) == ("What is my name?", True)


async def test_an_unknown_previous_response_is_not_found(openai: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError) as refused:
        await create(openai, previous_response_id="resp_unknown")
    assert refused.value.param == "previous_response_id"


@pytest.mark.parametrize(
    ("body", "param"), [({"truncation": "auto"}, "truncation"), ({"conversation": "conv_1"}, "conversation")]
)
async def test_what_the_gateway_refuses_is_a_bad_request(openai: AsyncOpenAI, body: Said, param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        await create(openai, **body)
    assert refused.value.param == param


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_worker_refuses_is_a_bad_request_too_and_leaves_nothing(
    openai: AsyncOpenAI, db: Redis, stream: bool
) -> None:
    with pytest.raises(BadRequestError):
        await create(openai, top_p=7, stream=stream)
    assert [key async for key in db.scan_iter("sluice:serve:response:*")] == []


async def test_a_response_in_the_background_is_waited_for_by_retrieving(openai: AsyncOpenAI) -> None:
    response = await create(openai, background=True)
    assert (response.status, response.output) == ("queued", [])
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        response = await openai.responses.retrieve(response.id)
    assert response.output_text == TWELVE


async def test_a_stream_of_a_stored_response_continues_after_any_event(openai: AsyncOpenAI) -> None:
    events = await streamed(openai, background=True)
    for after in (0, 3, len(events) - 2):
        rest = await openai.responses.retrieve(events[-1].response.id, stream=True, starting_after=after)
        assert [event async for event in rest] == events[after + 1 :]
    whole = await openai.responses.retrieve(events[-1].response.id, stream=True)
    assert [event async for event in whole] == events


async def test_a_background_response_outlives_its_reader_and_is_cancelled_by_its_id(openai: AsyncOpenAI) -> None:
    stream = await create(openai, stream=True, background=True, **ENDLESS)
    first = await anext(aiter(stream))
    await stream.close()
    response = await openai.responses.retrieve(first.response.id)
    assert response.status in ("queued", "in_progress")
    cancelled = await openai.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert await openai.responses.retrieve(response.id) == cancelled


async def test_a_response_in_the_foreground_is_cancelled_when_its_reader_leaves(openai: AsyncOpenAI, db: Redis) -> None:
    stream = await create(openai, stream=True, **ENDLESS)
    first = await anext(aiter(stream))
    await stream.close()
    key = keys.job(first.response.id)
    await until(lambda: _state(db, key, b"cancelled"))


async def test_a_whole_response_is_cancelled_when_its_client_leaves(openai: AsyncOpenAI, db: Redis) -> None:
    leaving, found = asyncio.create_task(create(openai, **ENDLESS)), list[bytes]()

    async def is_submitted() -> bool:
        found.extend([key async for key in db.scan_iter("sluice:job:*")])
        return bool(found)

    await until(is_submitted)
    leaving.cancel()
    await until(lambda: _state(db, found[0].decode(), b"cancelled"))


async def _state(db: Redis, key: str, state: bytes) -> bool:
    return bool(await db.hget(key, "state") == state)


async def test_a_deleted_response_is_gone(openai: AsyncOpenAI) -> None:
    response = await create(openai)
    await openai.responses.delete(response.id)
    for call in (openai.responses.retrieve, openai.responses.cancel, openai.responses.delete):
        with pytest.raises(NotFoundError):
            await call(response.id)


async def test_a_response_that_is_not_to_be_stored_is_not(openai: AsyncOpenAI, db: Redis) -> None:
    response = await create(openai, store=False)
    assert response.output_text == TWELVE
    assert [key async for key in db.scan_iter("sluice:serve:response:*")] == []
    with pytest.raises(NotFoundError):
        await openai.responses.retrieve(response.id)


async def test_without_its_events_a_response_can_only_be_retrieved(openai: AsyncOpenAI, db: Redis) -> None:
    response = await create(openai)
    await db.delete(keys.log(response.id))
    assert await openai.responses.retrieve(response.id) == response
    with pytest.raises(BadRequestError) as refused:
        await openai.responses.retrieve(response.id, stream=True)
    assert (refused.value.param, refused.value.code) == ("stream", "stream_expired")


async def test_a_background_response_without_events_is_made_from_its_result(openai: AsyncOpenAI, db: Redis) -> None:
    events = await streamed(openai, CALL, tools=[WEATHER], background=True)
    response = events[-1].response
    await db.delete(keys.log(response.id), f"sluice:serve:response:{response.id}:final")
    assert without_times(await openai.responses.retrieve(response.id)) == without_times(response)
    await db.delete(f"sluice:serve:response:{response.id}:final", keys.result(response.id))
    with pytest.raises(APIStatusError) as expired:
        await openai.responses.retrieve(response.id)
    assert expired.value.status_code == 404
