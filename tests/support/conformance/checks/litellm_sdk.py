"""LiteLLM, over all three interfaces of the gateway."""

import functools
import json
from typing import Any

import litellm

from tests.support.conformance.checks.checking import (
    CALLED,
    IMAGE_PARTS,
    IMAGE_URL,
    JSON_SCHEMA,
    MODEL,
    SAID,
    SEEING,
    TOOL,
    URL,
    WEATHER,
    Checks,
    await_cancelled,
    batch_lines,
    equal,
    read_batch,
    refused_with,
    took_tokens,
    until_ended,
    user,
)

check = Checks("litellm")
OPENAI: Any = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
ANTHROPIC: Any = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 200}
# Without it the client would request whole responses of a model that it does not know, and only seem to stream them.
litellm.register_model({OPENAI["model"]: {"litellm_provider": "openai", "supports_native_streaming": True}})
# Names by which it speaks to servers of one of these interfaces. `perplexity` and `sambanova` are left out, since it
# sends no tools for their unknown models; so is `fireworks_ai`, for which it renames the model.
PROVIDERS = (
    "anthropic", "azure_ai", "cerebras", "custom_openai", "dashscope", "deepinfra", "deepseek", "docker_model_runner",
    "groq", "hosted_vllm", "lemonade", "litellm_proxy", "llamafile", "lm_studio", "mistral", "moonshot", "novita",
    "nvidia_nim", "openai", "openrouter", "together_ai", "vercel_ai_gateway", "xai", "zai",
)  # fmt: skip


def chat(messages: Any = None, **fields: Any) -> Any:
    return litellm.completion(messages=messages or user(), temperature=0, **{**OPENAI, **fields})


def respond(input: Any = SAID["count"], **fields: Any) -> Any:
    return litellm.responses(input=input, temperature=0, **{**OPENAI, **fields})


def ask(messages: Any = None, **fields: Any) -> Any:
    return litellm.completion(messages=messages or user(), temperature=0, **{**ANTHROPIC, **fields})


def job_of(stream: Any) -> str:
    return str(stream._hidden_params["additional_headers"]["llm_provider-x-request-id"])


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
def takes_an_image_if_the_model_sees() -> None:
    seeing = {"model": f"openai/{SEEING}", "max_tokens": 16}
    shown, plain = chat(user(IMAGE_PARTS), **seeing).usage, chat(user(SAID["question"]), **seeing).usage
    took_tokens(shown.prompt_tokens, plain.prompt_tokens)
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
    equal(respond().output[0].content[0].text, SAID["counted"])


@check("responses: stream")
def streams_a_response() -> None:
    deltas = [event.delta for event in respond(stream=True) if event.type == "response.output_text.delta"]
    equal("".join(deltas), SAID["counted"])


@check("responses: tools")
def calls_a_function() -> None:
    function = {"type": "function", **WEATHER, "strict": False}
    first = respond(SAID["call"], tools=[function])
    (call,) = first.output
    equal((call.name, json.loads(call.arguments)), CALLED)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow."}
    equal(respond([output], tools=[function], previous_response_id=first.id).status, "completed")


@check("responses: JSON schema")
def responds_with_a_schema() -> None:
    format = {"type": "json_schema", "name": "city", "schema": SAID["schema"], "strict": True}
    response = respond(SAID["capital"], text={"format": format})
    equal(json.loads(response.output[0].content[0].text), SAID["oslo"])


@check("responses: image")
def takes_an_input_image_if_the_model_sees() -> None:
    parts = [{"type": "input_text", "text": SAID["question"]}, {"type": "input_image", "image_url": IMAGE_URL}]
    seeing = {"model": f"openai/{SEEING}", "max_output_tokens": 16}
    shown, plain = respond(user(parts), **seeing).usage, respond(SAID["question"], **seeing).usage
    took_tokens(shown.input_tokens, plain.input_tokens)
    refused_with(400, litellm.BadRequestError, lambda: respond(user(parts)))


@check("responses: errors")
def raises_errors_of_responses() -> None:
    refused_with(404, litellm.NotFoundError, lambda: respond(model="openai/absent"))
    refused_with(400, litellm.BadRequestError, lambda: respond(top_p=7))


@check("responses: cancel")
def cancels_a_response() -> None:
    fields = {"max_output_tokens": SAID["limit"], "extra_body": {"logit_bias": SAID["unending"]}}
    stream = respond(stream=True, **fields)
    next(iter(stream))
    job_id = job_of(stream)
    stream.response.close()
    await_cancelled(job_id)


@check("messages: answer")
def sends_a_message() -> None:
    equal(ask().choices[0].message.content, SAID["counted"])


@check("messages: stream")
def streams_a_message() -> None:
    equal(text_of(ask(stream=True)), SAID["counted"])


@check("messages: tools")
def calls_a_tool_in_a_message() -> None:
    (call,) = ask(user(SAID["call"]), tools=[TOOL]).choices[0].message.tool_calls
    equal(json.loads(call.function.arguments), {"city": "Oslo"})


@check("messages: JSON schema")
def follows_a_schema_in_a_message() -> None:
    # The client makes a forced call of a tool out of it, in which the tiny model does not end strings that are free.
    schema = {"type": "object", "properties": {"word": {"enum": ["yes"]}}, "required": ["word"]}
    format = {"type": "json_schema", "json_schema": {"name": "said", "schema": schema, "strict": True}}
    equal(json.loads(ask(response_format=format).choices[0].message.content), {"word": "yes"})


@check("messages: image")
def takes_an_image_in_a_message_if_the_model_sees() -> None:
    seeing = {"model": f"anthropic/{SEEING}", "max_tokens": 16}
    shown, plain = ask(user(IMAGE_PARTS), **seeing).usage, ask(user(SAID["question"]), **seeing).usage
    took_tokens(shown.prompt_tokens, plain.prompt_tokens)
    refused_with(400, litellm.BadRequestError, lambda: ask(user(IMAGE_PARTS)))


@check("messages: errors")
def raises_errors_of_messages() -> None:
    refused_with(404, litellm.NotFoundError, lambda: ask(model="anthropic/absent"))
    refused_with(400, litellm.BadRequestError, lambda: ask(top_p=7))


@check("messages: cancel")
def cancels_a_message() -> None:
    # The interface has no bias against the end of an answer, but schemas that take long.
    format = {"type": "json_schema", "schema": SAID["long"]}
    stream = ask(stream=True, max_tokens=SAID["limit"], output_config={"format": format})
    next(iter(stream))
    job_id = job_of(stream)
    stream.completion_stream.response_iterator.close()
    await_cancelled(job_id)


@check("batches: run")
def runs_a_batch() -> None:
    at = {"custom_llm_provider": "openai", "api_base": OPENAI["api_base"], "api_key": "none"}
    file: Any = litellm.create_file(file=("in.jsonl", batch_lines()), purpose="batch", **at)
    batch: Any = litellm.create_batch(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **at
    )
    endings = ("completed", "failed", "expired", "cancelled")
    batch = until_ended(lambda: litellm.retrieve_batch(batch_id=batch.id, **at), lambda found: found.status in endings)
    equal((batch.status, batch.request_counts.completed), ("completed", 2))
    content: Any = litellm.file_content(file_id=batch.output_file_id, **at)
    equal(set(read_batch(content.content)), {"line-0", "line-1"})
    listed: Any = litellm.list_batches(**at)
    assert batch.id in [each.id for each in listed.data]
    equal(litellm.file_delete(file_id=file.id, **at).deleted, True)


def agrees(provider: str) -> None:
    """Have a turn with a tool, whole and streamed."""
    fields = {**(ANTHROPIC if provider == "anthropic" else OPENAI), "model": f"{provider}/{MODEL}"}
    said = chat(**fields).choices[0].message
    equal(said.content, SAID["counted"])
    equal(text_of(chat(stream=True, **fields)), SAID["counted"])
    asked = [*user(), said, *user(SAID["call"])]
    message = chat(asked, tools=[TOOL], **fields).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Snow."}
    assert chat([*asked, message, result], tools=[TOOL], **fields).usage.completion_tokens > 0
    built = litellm.stream_chunk_builder(list(chat(user(SAID["call"]), tools=[TOOL], stream=True, **fields)))
    equal(json.loads(built.choices[0].message.tool_calls[0].function.arguments), {"city": "Oslo"})


for name in PROVIDERS:
    check(f"{name}: turn, tool, stream")(functools.partial(agrees, name))


if __name__ == "__main__":
    check.run()
