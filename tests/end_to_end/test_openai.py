"""OpenAI's own client against the gateway, mounted as in docs/backends.md: answers, tools, reasoning and errors."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import httpx
import pytest
from openai import APIError, AsyncOpenAI, BadRequestError, NotFoundError
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from redis.asyncio import Redis

from sluice import Client
from tests.client.test_openai import surprises
from tests.end_to_end.test_pages import OPENAI_BACKEND
from tests.support.stack import ROOT, WorkerProcess, free_port

Said = dict[str, Any]

COUNT: Said = {"messages": [{"role": "user", "content": "Count to 12."}]}
THINK: Said = {"messages": [{"role": "user", "content": "Think: what is 8 plus 3?"}]}
WEATHER: Said = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL: Said = {
    "messages": [{"role": "user", "content": "Call the weather tool for Oslo."}],
    "tools": [{"type": "function", "function": WEATHER}],
}
ENDLESS = {"0": -100, "2": -100}  # a bias against every end of the answer


@pytest.fixture(scope="module")
def backend(worker: WorkerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    folder, port = tmp_path_factory.mktemp("backend"), free_port()
    (folder / "main.py").write_text(OPENAI_BACKEND.replace("redis://localhost:6379", worker.url))
    command = [sys.executable, "-m", "uvicorn", "main:app", "--port", str(port), "--log-level", "warning"]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_until_it_answers(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def wait_until_it_answers(address: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            httpx.get(address)
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
async def openai(backend: str, worker: WorkerProcess, redis_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=backend, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_the_example_for_each_sdk_prints_the_answer(backend: str, capsys: pytest.CaptureFixture[str], sdk: str) -> None:
    page = (ROOT / "docs" / "gateway.md").read_text()
    (source,) = re.findall(rf"```python\n(from {sdk} import .*?)```", page, re.DOTALL)
    exec(source.replace("http://127.0.0.1:8000", backend.removesuffix("/v1")), {})
    assert capsys.readouterr().out == "1 2 3 4 5 6 7 8 9 10 11 12"


async def whole(openai: AsyncOpenAI, request: Said, **fields: Any) -> ChatCompletion:
    answer: ChatCompletion = await openai.chat.completions.create(model="default", temperature=0, **request, **fields)
    return answer


async def streamed(openai: AsyncOpenAI, request: Said, **fields: Any) -> ChatCompletion:
    """Put together again by OpenAI's own helper."""
    async with openai.chat.completions.stream(model="default", temperature=0, **request, **fields) as stream:
        async for event in stream:
            if event.type == "chunk":
                assert_known(ChatCompletionChunk.model_validate(event.chunk.to_dict(), strict=True))
        answer: ChatCompletion = await stream.get_final_completion()
    return answer


async def read_to_the_end(stream: AsyncIterator[object]) -> None:
    async for _ in stream:
        pass


def assert_known(value: BaseModel) -> None:
    """No fields that OpenAI's types do not know, but for what is documented."""
    assert surprises(value) <= {"reasoning", "sluice"}


def message(answer: ChatCompletion) -> Said:
    """As the client would send it back. The helper adds what it has parsed."""
    said = answer.choices[0].message.to_dict()
    return {name: value for name, value in said.items() if value is not None and name != "parsed"}


@pytest.mark.parametrize("how", [whole, streamed])
async def test_an_answer_is_text_and_stops(openai: AsyncOpenAI, how: Any) -> None:
    answer = await how(openai, COUNT)
    assert message(answer) == {"role": "assistant", "content": "1 2 3 4 5 6 7 8 9 10 11 12"}
    assert (answer.choices[0].finish_reason, answer.model) == ("stop", "default")


@pytest.mark.parametrize("how", [whole, streamed])
async def test_reasoning_is_apart_from_the_content(openai: AsyncOpenAI, how: Any) -> None:
    answer = await how(openai, THINK)
    assert message(answer) == {"role": "assistant", "reasoning": "8 and 3 make 11.", "content": "11"}
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("how", [whole, streamed])
@pytest.mark.parametrize("field", ["max_reasoning_tokens", "thinking_token_budget"])
async def test_a_budget_closes_the_reasoning_and_the_content_follows(openai: AsyncOpenAI, how: Any, field: str) -> None:
    options = {"stream_options": {"include_usage": True}} if how is streamed else {}
    answer = await how(openai, THINK, extra_body={field: 2}, **options)
    said = message(answer)
    assert (said["reasoning"], bool(said["content"])) == ("8 and", True)
    # The budget, both markers, and the line's end before the second.
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5


async def test_a_loop_in_reasoning_is_closed_and_named(openai: AsyncOpenAI) -> None:
    """The answer begins within a thought that says the same token over and over."""
    begun = [*THINK["messages"], {"role": "assistant", "content": "<think>1"}]
    fields = {"logit_bias": {"21": 100}, "max_tokens": 3_200}
    answer = await whole(openai, {"messages": begun}, **fields)
    details = answer.usage.completion_tokens_details
    assert details.reasoning_tokens == 3_072 + 2  # with the line's end and the marker
    assert "reasoning was closed, since it repeated the same 1 token" in answer.sluice["warnings"][0]
    stream = await openai.chat.completions.create(model="default", messages=begun, stream=True, **fields)
    *_, last = [chunk async for chunk in stream]
    assert last.sluice == {"warnings": answer.sluice["warnings"]}
    free = await whole(openai, {"messages": begun}, **fields, extra_body={"loop_guard": False})
    assert free.usage.completion_tokens_details.reasoning_tokens == 3_200
    assert "warnings" not in free.sluice


@pytest.mark.parametrize("how", [whole, streamed])
async def test_a_tool_call_has_its_name_and_arguments_and_no_content(openai: AsyncOpenAI, how: Any) -> None:
    answer = await how(openai, CALL)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "get_weather", '{"city": "Oslo"}')
    assert call.id
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("tool_calls", None)


async def test_a_tool_call_is_announced_by_name_and_its_arguments_follow_in_fragments(openai: AsyncOpenAI) -> None:
    async with openai.chat.completions.stream(model="default", temperature=0, **CALL) as stream:
        events = [event async for event in stream]
    chunks = [event.chunk for event in events if event.type == "chunk"]
    deltas = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    functions = [delta.function for delta in deltas if delta.function]
    assert [function.name for function in functions] == ["get_weather", *[None] * (len(functions) - 1)]
    assert [bool(delta.id) for delta in deltas] == [True, *[False] * (len(deltas) - 1)]
    fragments = [function.arguments or "" for function in functions]
    assert len(fragments) >= 2
    assert "".join(fragments) == '{"city": "Oslo"}'
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, event.arguments) for event in done] == [("get_weather", '{"city": "Oslo"}')]


async def test_the_fields_that_openai_s_clients_send_are_taken(openai: AsyncOpenAI) -> None:
    answer = await whole(
        openai,
        COUNT,
        reasoning_effort="low",
        verbosity="low",
        prompt_cache_key="session-9",
        safety_identifier="u-1",
        service_tier="priority",
        modalities=["text"],
        store=False,
        metadata={"chat": "7"},
    )
    assert message(answer)["content"] == "1 2 3 4 5 6 7 8 9 10 11 12"
    assert answer.service_tier == "default"
    ours = answer.to_dict()["sluice"]
    assert (ours["safety_identifier"], ours["prompt_cache_key"]) == ("u-1", "session-9")
    assert ours["lane"] == "interactive"


async def test_a_flexible_request_runs_in_the_batch_lane(openai: AsyncOpenAI) -> None:
    answer = await whole(openai, COUNT, service_tier="flex")
    assert (answer.service_tier, answer.to_dict()["sluice"]["lane"]) == ("flex", "batch")


async def test_a_function_of_the_older_form_is_called_as_a_tool(openai: AsyncOpenAI) -> None:
    answer = await whole(openai, {"messages": CALL["messages"], "functions": [WEATHER]})
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Oslo"}')


async def test_an_answer_with_a_tool_call_can_be_sent_back_with_its_result(openai: AsyncOpenAI) -> None:
    asked = message(await whole(openai, CALL))
    result = {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "Rain."}
    answer = await whole(openai, {**CALL, "messages": [*CALL["messages"], asked, result]}, max_tokens=20)
    assert answer.choices[0].finish_reason == "stop"
    assert message(answer)["content"]


async def test_a_named_tool_is_called_whatever_was_asked(openai: AsyncOpenAI) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = await whole(openai, {**CALL, **COUNT}, tool_choice=choice, max_tokens=100)
    assert [call["function"]["name"] for call in message(answer)["tool_calls"]] == ["get_weather"]


async def test_what_a_forced_call_is_not_held_to_is_named(openai: AsyncOpenAI) -> None:
    city = {"type": "string", "format": "city-name"}
    function = {**WEATHER, "parameters": {"type": "object", "properties": {"city": city}, "required": ["city"]}}
    asked = {"messages": CALL["messages"], "tools": [{"type": "function", "function": function}]}
    answer = await whole(openai, asked, tool_choice="required", max_tokens=100)
    assert [call["function"]["name"] for call in message(answer)["tool_calls"]] == ["get_weather"]
    (warning,) = answer.sluice["warnings"]
    assert warning.startswith("tools: get_weather: #/properties/city/format: city-name is not supported; ")


class Capital(BaseModel):
    country: str
    capital: str


class Verdict(BaseModel):
    """Without free text, in which the tiny model would not find an end."""

    answer: Literal["yes", "no"]
    sure: bool


async def test_a_schema_is_answered_with_an_object_of_it(openai: AsyncOpenAI) -> None:
    asked: Any = [{"role": "user", "content": "Answer in JSON. What is the capital of Norway?"}]
    answer = await openai.chat.completions.parse(
        model="default", messages=asked, temperature=0, response_format=Capital
    )
    assert answer.choices[0].message.parsed == Capital(country="Norway", capital="Oslo")


async def test_a_schema_holds_where_the_model_would_have_counted(openai: AsyncOpenAI) -> None:
    answer = await streamed(openai, COUNT, response_format=Verdict, max_tokens=200)
    assert Verdict.model_validate_json(answer.choices[0].message.content or "")


@pytest.mark.parametrize("how", [whole, streamed])
async def test_logprobs_have_an_entry_for_each_token_of_the_text(openai: AsyncOpenAI, how: Any) -> None:
    answer = await how(openai, COUNT, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    assert {len(entry.top_logprobs) for entry in entries} == {2}
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)  # at temperature 0


async def test_streamed_logprobs_are_those_of_the_whole_answer(openai: AsyncOpenAI) -> None:
    one, other = [await how(openai, THINK, logprobs=True, top_logprobs=2) for how in (whole, streamed)]
    assert one.choices[0].logprobs is not None
    assert one.choices[0].logprobs == other.choices[0].logprobs


async def test_usage_comes_with_the_stream_that_asked_for_it(openai: AsyncOpenAI) -> None:
    asked = await streamed(openai, COUNT, stream_options={"include_usage": True})
    answer = await whole(openai, COUNT)
    assert asked.usage is not None
    assert answer.usage is not None
    assert (asked.usage.completion_tokens, asked.usage.total_tokens) == (
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    )
    assert (await streamed(openai, COUNT)).usage is None


@pytest.mark.parametrize("request_", [COUNT, THINK, CALL], ids=["text", "reasoning", "tool call"])
async def test_a_stored_result_is_a_chat_completion(worker: WorkerProcess, client: Client, request_: Said) -> None:
    job = await client.submit({**request_, "temperature": 0, "logprobs": True})
    assert_known(ChatCompletion.model_validate(await client.result(job.id, timeout=20), strict=True))


@pytest.mark.parametrize(
    ("body", "said", "param"),
    [
        (b"{", "The body is not JSON: Expecting property name enclosed in double quotes at line 1 column 2: ", None),
        (b"\xff", "The body is not JSON: ", None),
        (b"[" * 100_000, "The body is not JSON: ", None),
        (b'{"messages": [], "seed": NaN}', "The body is not JSON: NaN", None),
        (b'{"messages": [], "seed": 1e999}', "The body is not JSON: ", None),
        (b"[]", "The body must be a JSON object.", None),
        (b'{"model": 7, "messages": []}', "model: it must be a string.", "model"),
        (b'{"n": 0, "messages": []}', "n: it must be a whole number from 1 to 128.", "n"),
        (b"{}", "messages", "messages"),
        (b'{"messages": 5, "stream": true, "stream_options": []}', "messages must be a list", "messages"),
    ],
)  # fmt: skip
async def test_a_body_that_is_no_request_is_http_400_in_openai_s_form(
    backend: str, alive: WorkerProcess, body: bytes, said: str, param: str | None
) -> None:
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{backend}/chat/completions", content=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert said in error["message"]


@pytest.mark.parametrize("how", [whole, streamed])
async def test_several_choices_are_alike_at_temperature_0_and_count_their_prompt_once(
    openai: AsyncOpenAI, how: Any
) -> None:
    one = await whole(openai, COUNT)
    options = {"stream_options": {"include_usage": True}} if how is streamed else {}
    answer = await how(openai, COUNT, n=3, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {message(one)["content"]}
    assert one.usage is not None
    counted = (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert counted == (one.usage.prompt_tokens, 3 * one.usage.completion_tokens)


async def test_each_choice_has_a_seed_of_its_own_that_follows_from_the_request_s(openai: AsyncOpenAI) -> None:
    answers = [await whole(openai, COUNT, n=3, seed=7) for _ in range(2)]
    seeds = [[choice["seed"] for choice in answer.to_dict()["sluice"]["choices"]] for answer in answers]
    assert seeds[0] == seeds[1]
    assert (seeds[0][0], len(set(seeds[0]))) == (7, 3)


async def test_a_model_that_nobody_serves_is_http_404(openai: AsyncOpenAI, alive: WorkerProcess) -> None:
    with pytest.raises(NotFoundError, match="No worker serves 'gpt-4o'; there are workers for default") as refused:
        await openai.chat.completions.create(model="gpt-4o", messages=COUNT["messages"])
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_http_400_with_our_sentence(openai: AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(BadRequestError, match="temperature") as refused:
        await openai.chat.completions.create(model="default", stream=stream, **{**COUNT, "temperature": 9})
    assert (refused.value.type, refused.value.code) == ("invalid_request_error", "invalid_request")


async def test_a_failure_after_the_first_text_is_raised_from_the_stream(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model="default", stream=True, max_tokens=30_000, logit_bias=ENDLESS, extra_body={"deadline_s": 3}, **COUNT
    )
    text = ""
    while not text.startswith("1 2"):
        text += (await anext(stream)).choices[0].delta.content or ""
    with pytest.raises(APIError, match="not done 3 s after"):
        await read_to_the_end(stream)


async def test_a_client_that_leaves_is_no_listener_any_more(openai: AsyncOpenAI, client: Client, db: Redis) -> None:
    stream = await openai.chat.completions.create(
        model="default", stream=True, max_tokens=30_000, logit_bias=ENDLESS, **COUNT
    )
    first = await anext(stream)
    channel = f"sluice:ch:{first.id}"
    assert dict(await db.pubsub_numsub(channel)) == {channel.encode(): 1}
    await stream.close()
    deadline = time.monotonic() + 30
    while dict(await db.pubsub_numsub(channel)) != {channel.encode(): 0}:
        assert time.monotonic() < deadline
    await client.cancel(first.id)  # before the worker would end it by itself


TOWNS: Said = {"type": "object", "properties": {"towns": {"type": "array", "items": {"enum": ["Oslo", "Rome"]}}}}


async def test_a_strict_function_is_called_by_its_schema_without_being_forced(openai: AsyncOpenAI) -> None:
    closed = {**TOWNS, "required": ["towns"], "additionalProperties": False}
    function = {"name": "get_weather", "parameters": closed, "strict": True}
    asked: Any = {**CALL, "tools": [{"type": "function", "function": function}]}
    answer = await whole(openai, asked, max_tokens=100)
    (call,) = message(answer)["tool_calls"]
    assert {*json.loads(call["function"]["arguments"])} == {"towns"}
    assert answer.choices[0].finish_reason == "tool_calls"
    free = await whole(openai, {**asked, **COUNT}, max_tokens=100)
    assert message(free)["content"].startswith("1 2 3")


async def test_a_strict_function_whose_schema_cannot_be_held_is_refused_and_another_is_free(
    openai: AsyncOpenAI,
) -> None:
    impossible = {"type": "object", "properties": {"city": {"not": {"pattern": "^(a|b)*$", "minLength": 3}}}}
    function = {"name": "get_weather", "parameters": impossible}
    with pytest.raises(BadRequestError) as refused:
        await whole(openai, {**CALL, "tools": [{"type": "function", "function": {**function, "strict": True}}]})
    assert refused.value.param == "tools"
    answer = await whole(openai, {**CALL, "tools": [{"type": "function", "function": function}]}, max_tokens=100)
    assert message(answer)["tool_calls"]
