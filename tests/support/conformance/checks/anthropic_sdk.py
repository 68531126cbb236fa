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
    until_ended,
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


def batched(count: int, **fields: Any) -> Any:
    params = {"model": MODEL, "max_tokens": 200, "messages": user(), "temperature": 0, **fields}
    good = [{"custom_id": f"line-{number}", "params": params} for number in range(count)]
    bad = {"custom_id": "bad", "params": {**params, "messages": user([IMAGE])}}
    return client.messages.batches.create(requests=[*good, bad])


def to_end(batch: Any) -> Any:
    def ended(found: Any) -> bool:
        return bool(found.processing_status == "ended")

    return until_ended(lambda: client.messages.batches.retrieve(batch.id), ended)


@check("messages: batches")
def runs_a_batch() -> None:
    batch = batched(2)
    equal((batch.type, batch.processing_status), ("message_batch", "in_progress"))
    batch = to_end(batch)
    counts = batch.request_counts
    equal((counts.succeeded, counts.errored, counts.processing), (2, 1, 0))
    found = {line.custom_id: line.result for line in client.messages.batches.results(batch.id)}
    equal(sorted(found), ["bad", "line-0", "line-1"])
    equal(found["line-0"].message.content[0].text, SAID["counted"])
    equal((found["bad"].type, found["bad"].error.error.type), ("errored", "invalid_request_error"))
    equal(client.messages.batches.delete(batch.id).type, "message_batch_deleted")
    refused_with(404, NotFoundError, lambda: client.messages.batches.retrieve(batch.id))


@check("messages: list batches")
def lists_batches() -> None:
    ids = [batched(1).id for _ in range(3)]
    found = [batch.id for batch in client.messages.batches.list(limit=2)]
    equal([id for id in found if id in ids], ids[::-1])


@check("messages: cancel a batch")
def cancels_a_batch() -> None:
    format = {"type": "json_schema", "schema": SAID["long"]}
    batch = batched(200, max_tokens=SAID["limit"], output_config={"format": format})
    assert client.messages.batches.cancel(batch.id).processing_status in ("canceling", "ended")
    batch = to_end(batch)
    equal(batch.request_counts.processing, 0)
    assert batch.request_counts.canceled > 0, batch.request_counts


if __name__ == "__main__":
    check.run()
