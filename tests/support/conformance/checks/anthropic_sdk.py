"""Anthropic's Python SDK: messages, token counts and models."""

import json
from typing import Any

from anthropic import Anthropic, BadRequestError, NotFoundError

from tests.support.conformance.checks.checking import (
    MODEL,
    SAID,
    SEEING,
    URL,
    WEATHER,
    Checks,
    await_cancelled,
    equal,
    refused_with,
    took_tokens,
    user,
)

check = Checks("anthropic")
client: Any = Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=60)
TOOL: Any = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
IMAGE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": SAID["image"]}}


def fields_of(messages: Any, fields: Any) -> Any:
    extra = {"temperature": 0, **fields.pop("extra_body", {})}
    return {"model": MODEL, "max_tokens": 200, "messages": messages or user(), "extra_body": extra, **fields}


def ask(messages: Any = None, **fields: Any) -> Any:
    return client.messages.create(**fields_of(messages, fields))


@check("messages: answer")
def answers() -> None:
    message = ask(system="You are a helpful assistant.")
    equal(([block.text for block in message.content], message.stop_reason), ([SAID["counted"]], "end_turn"))
    assert message.usage.output_tokens > 0
    equal(ask(stop_sequences=[" 4"]).stop_sequence, " 4")


@check("messages: stream")
def streams() -> None:
    with client.messages.stream(**fields_of(None, {})) as stream:
        equal("".join(stream.text_stream), SAID["counted"])
        equal(stream.get_final_message().stop_reason, "end_turn")
    events = [event.type for event in ask(stream=True)]
    equal((events[0], events[-1]), ("message_start", "message_stop"))


@check("messages: tools")
def calls_a_tool() -> None:
    message = ask(user(SAID["call"]), tools=[TOOL])
    (call,) = message.content
    equal((call.name, call.input, message.stop_reason), ("get_weather", {"city": "Oslo"}, "tool_use"))
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Snow."}
    ask([*user(SAID["call"]), message.to_param(), *user([result])], tools=[TOOL])
    equal(ask(tools=[TOOL], tool_choice={"type": "any"}).content[0].type, "tool_use")
    with client.messages.stream(**fields_of(user(SAID["call"]), {"tools": [TOOL]})) as stream:
        equal(stream.get_final_message().content[0].input, {"city": "Oslo"})


@check("messages: JSON schema")
def follows_a_schema() -> None:
    format = {"type": "json_schema", "schema": SAID["schema"]}
    message = ask(user(SAID["capital"]), extra_body={"output_config": {"format": format}})
    equal(json.loads(message.content[0].text), SAID["oslo"])


@check("messages: reasoning")
def thinks() -> None:
    message = ask(user(SAID["think"]))
    thinking, text = message.content
    equal((thinking.thinking, text.text), (SAID["thought"], SAID["sum"]))
    ask([*user(SAID["think"]), message.to_param(), *user()])


@check("messages: image")
def takes_an_image_if_the_model_sees() -> None:
    question = {"type": "text", "text": SAID["question"]}
    shown, plain = user([IMAGE, question]), user([question])
    assert ask(shown, model=SEEING, max_tokens=8).usage.output_tokens > 0
    counts = [client.messages.count_tokens(model=SEEING, messages=each).input_tokens for each in (shown, plain)]
    took_tokens(*counts)
    refused_with(400, BadRequestError, lambda: ask(shown))


@check("messages: errors")
def raises_the_sdk_s_errors() -> None:
    refused = refused_with(400, BadRequestError, lambda: ask(extra_body={"mood": "good"}))
    equal(refused.body["error"]["type"], "invalid_request_error")
    equal(refused.body["request_id"], refused.request_id)
    refused_with(404, NotFoundError, lambda: ask(model="absent"))


@check("messages: cancel")
def cancels_when_its_client_leaves() -> None:
    # The interface has no bias against the end of an answer, but schemas that take long.
    format = {"type": "json_schema", "schema": SAID["long"]}
    stream = ask(stream=True, max_tokens=SAID["limit"], extra_body={"output_config": {"format": format}})
    job_id = next(iter(stream)).message.id
    stream.close()
    await_cancelled(job_id)


@check("messages: count tokens")
def counts_tokens() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=user())
    usage = ask().usage
    equal(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))


@check("models: list")
def lists_the_models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    equal(client.models.retrieve(MODEL).id, MODEL)


if __name__ == "__main__":
    check.run()
