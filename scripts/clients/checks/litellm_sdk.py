"""LiteLLM, over all three interfaces of the gateway."""

import json
from typing import Any

import litellm

from scripts.clients.checks.checking import (
    CALLED,
    IMAGE_PARTS,
    JSON_SCHEMA,
    MODEL,
    SAID,
    TOOL,
    URL,
    Checks,
    await_cancelled,
    equal,
    refused_with,
    user,
)

check = Checks("litellm")
OPENAI: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
ANTHROPIC: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 200}


def chat(messages: Any = None, **fields: Any) -> Any:
    return litellm.completion(messages=messages or user(), temperature=0, **{**OPENAI, **fields})


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@check("chat: answer")
def answers() -> None:
    completion = chat()
    equal(completion.choices[0].message.content, SAID["counted"])
    assert completion.usage.total_tokens > 0


@check("chat: stream")
def streams() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    equal(text_of(chunks), SAID["counted"])
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


@check("chat: tools")
def calls_a_tool() -> None:
    message = chat(user(SAID["call"]), tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    equal((call.function.name, json.loads(call.function.arguments)), CALLED)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Snow."}
    chat([*user(SAID["call"]), message, result], tools=[TOOL])
    chunks = list(chat(user(SAID["call"]), tools=[TOOL], stream=True))
    built = litellm.stream_chunk_builder(chunks)
    equal(json.loads(built.choices[0].message.tool_calls[0].function.arguments), {"city": "Oslo"})


@check("chat: JSON schema")
def follows_a_schema() -> None:
    completion = chat(user(SAID["capital"]), response_format=JSON_SCHEMA)
    equal(json.loads(completion.choices[0].message.content), SAID["oslo"])


@check("chat: image")
def refuses_an_image_that_the_model_cannot_see() -> None:
    refused_with(400, litellm.BadRequestError, lambda: chat(user(IMAGE_PARTS)))


@check("chat: errors")
def raises_its_errors() -> None:
    refused_with(404, litellm.NotFoundError, lambda: chat(model="openai/absent"))
    refused_with(400, litellm.BadRequestError, lambda: chat(top_p=7))


@check("chat: cancel")
def cancels_when_its_client_leaves() -> None:
    stream = chat(stream=True, logit_bias=SAID["unending"], max_tokens=SAID["limit"])
    job_id = next(iter(stream)).id
    stream.completion_stream.close()
    await_cancelled(job_id)


@check("completions: refused")
def names_the_route_that_it_lacks() -> None:
    fields: Any = {**OPENAI, "model": f"text-completion-openai/{MODEL}"}
    refused_with(400, litellm.BadRequestError, lambda: litellm.text_completion(prompt="1 2 3", **fields))


@check("responses: answer")
def responds() -> None:
    response: Any = litellm.responses(input=SAID["count"], temperature=0, **OPENAI)
    equal(response.output[0].content[0].text, SAID["counted"])


@check("responses: stream")
def streams_a_response() -> None:
    events: Any = litellm.responses(input=SAID["count"], temperature=0, stream=True, **OPENAI)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    equal("".join(deltas), SAID["counted"])


@check("messages: answer")
def sends_a_message() -> None:
    completion: Any = litellm.completion(messages=user(), temperature=0, **ANTHROPIC)
    equal(completion.choices[0].message.content, SAID["counted"])


@check("messages: stream")
def streams_a_message() -> None:
    equal(text_of(litellm.completion(messages=user(), temperature=0, stream=True, **ANTHROPIC)), SAID["counted"])


@check("messages: tools")
def calls_a_tool_in_a_message() -> None:
    completion: Any = litellm.completion(messages=user(SAID["call"]), temperature=0, tools=[TOOL], **ANTHROPIC)
    (call,) = completion.choices[0].message.tool_calls
    equal(json.loads(call.function.arguments), {"city": "Oslo"})


if __name__ == "__main__":
    check.run()
