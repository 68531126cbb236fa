"""OpenAI's Python SDK: chat completions, responses, models, files and batches."""

import json
import time
from functools import partial
from typing import Any

from openai import BadRequestError, ConflictError, InvalidWebhookSignatureError, NotFoundError, OpenAI

from tests.support.conformance.checks.checking import (
    CALLED,
    HOOK,
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
from tests.support.conformance.checks.shapes import City
from tests.support.receiver import receiver

check = Checks("openai")
client: Any = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)
FUNCTION: Any = {"type": "function", **WEATHER, "strict": False}


def chat(messages: Any = None, **fields: Any) -> Any:
    given: Any = {"model": MODEL, "messages": messages or user(), "temperature": 0, **fields}
    return client.chat.completions.create(**given)


def respond(input: Any = SAID["count"], **fields: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": input, "temperature": 0, **fields})


@check("chat: answer")
def answers() -> None:
    completion = chat()
    equal(completion.choices[0].message.content, SAID["counted"])
    equal(completion.choices[0].finish_reason, "stop")
    equal(completion.usage.total_tokens, completion.usage.prompt_tokens + completion.usage.completion_tokens)


@check("chat: stream")
def streams() -> None:
    chunks = list(chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    equal(text, SAID["counted"])
    assert chunks[-1].usage.completion_tokens > 0
    with client.chat.completions.stream(model=MODEL, messages=user(), temperature=0) as stream:
        equal(stream.get_final_completion().choices[0].message.content, SAID["counted"])


@check("chat: tools")
def calls_a_tool() -> None:
    message = chat(user(SAID["call"]), tools=[TOOL]).choices[0].message
    (call,) = message.tool_calls
    equal((call.function.name, json.loads(call.function.arguments)), CALLED)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Snow."}
    chat([*user(SAID["call"]), message.to_dict(), result], tools=[TOOL])
    forced = chat(tools=[TOOL], tool_choice="required")
    equal(forced.choices[0].message.tool_calls[0].function.name, "get_weather")
    with client.chat.completions.stream(
        model=MODEL, messages=user(SAID["call"]), temperature=0, tools=[TOOL]
    ) as stream:
        final = stream.get_final_completion()
    equal(json.loads(final.choices[0].message.tool_calls[0].function.arguments), {"city": "Oslo"})


@check("chat: JSON schema")
def follows_a_schema() -> None:
    completion = chat(user(SAID["capital"]), response_format=JSON_SCHEMA)
    equal(json.loads(completion.choices[0].message.content), SAID["oslo"])
    parsed = client.chat.completions.parse(
        model=MODEL, messages=user(SAID["capital"]), temperature=0, response_format=City
    )
    equal(parsed.choices[0].message.parsed, City(**SAID["oslo"]))


@check("chat: reasoning")
def reasons() -> None:
    message = chat(user(SAID["think"])).choices[0].message
    equal((message.reasoning, message.content), (SAID["thought"], SAID["sum"]))


@check("chat: n, stop, logprobs")
def takes_sampling_fields() -> None:
    completion = chat(n=2, stop=[" 4"], logprobs=True, top_logprobs=2, seed=7)
    equal([choice.message.content for choice in completion.choices], ["1 2 3", "1 2 3"])
    assert all(len(entry.top_logprobs) == 2 for entry in completion.choices[0].logprobs.content)


@check("chat: image")
def takes_an_image_if_the_model_sees() -> None:
    seeing = partial(chat, model=SEEING, max_tokens=8)
    shown, plain = seeing(user(IMAGE_PARTS)).usage, seeing(user(SAID["question"])).usage
    took_tokens(shown.prompt_tokens, plain.prompt_tokens)
    for stream in (False, True):
        refused = refused_with(400, BadRequestError, partial(chat, user(IMAGE_PARTS), stream=stream))
        equal(refused.code, "unsupported")


@check("chat: errors")
def raises_the_sdk_s_errors() -> None:
    unknown = refused_with(404, NotFoundError, lambda: client.chat.completions.create(model="absent", messages=user()))
    equal((unknown.code, unknown.param), ("model_not_found", "model"))
    refused = refused_with(400, BadRequestError, lambda: chat(top_p=7, stream=True))
    equal((refused.code, refused.type), ("invalid_request", "invalid_request_error"))


@check("chat: cancel")
def cancels_when_its_client_leaves() -> None:
    stream = chat(stream=True, logit_bias=SAID["unending"], max_tokens=SAID["limit"])
    job_id = next(iter(stream)).id
    stream.close()
    await_cancelled(job_id)


@check("chat: retrieve")
def retrieves_by_its_id() -> None:
    completion = chat()
    again = client.chat.completions.retrieve(completion.id)
    equal(again.choices[0].message.content, SAID["counted"])


@check("completions: refused")
def names_the_route_that_it_lacks() -> None:
    refused = refused_with(400, BadRequestError, lambda: client.completions.create(model=MODEL, prompt="1 2 3"))
    equal(refused.code, "unsupported")


@check("responses: answer")
def responds() -> None:
    response = respond(metadata={"a": "b"})
    equal((response.output_text, response.status, response.metadata), (SAID["counted"], "completed", {"a": "b"}))
    equal(client.responses.retrieve(response.id).output_text, SAID["counted"])


@check("responses: stream")
def streams_a_response() -> None:
    with client.responses.stream(model=MODEL, input=SAID["count"], temperature=0) as stream:
        numbers = [event.sequence_number for event in stream]
        equal(stream.get_final_response().output_text, SAID["counted"])
    equal(numbers, list(range(len(numbers))))


@check("responses: tools")
def calls_a_function() -> None:
    first = respond(SAID["call"], tools=[FUNCTION])
    (call,) = first.output
    equal((call.name, json.loads(call.arguments)), CALLED)
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Snow."}
    equal(respond([output], tools=[FUNCTION], previous_response_id=first.id).status, "completed")
    custom: Any = {
        "type": "custom",
        "name": "say",
        "format": {"type": "grammar", "syntax": "regex", "definition": "(yes|no)"},
    }
    (said,) = respond(tools=[custom], tool_choice={"type": "custom", "name": "say"}).output
    assert said.input in ("yes", "no"), said


@check("responses: JSON schema")
def responds_with_a_schema() -> None:
    parsed = client.responses.parse(model=MODEL, input=SAID["capital"], temperature=0, text_format=City)
    equal(parsed.output_parsed, City(**SAID["oslo"]))


@check("responses: reasoning")
def reasons_in_an_item() -> None:
    reasoning, message = respond(SAID["think"], include=["reasoning.encrypted_content"]).output
    equal((reasoning.content[0].text, message.content[0].text), (SAID["thought"], SAID["sum"]))
    items = [{"role": "user", "content": SAID["think"]}, reasoning.to_dict(), message.to_dict(), *user()]
    equal(respond(items).output_text, SAID["counted"])


@check("responses: image")
def takes_an_input_image_if_the_model_sees() -> None:
    parts = [{"type": "input_text", "text": SAID["question"]}, {"type": "input_image", "image_url": IMAGE_URL}]
    seeing = partial(respond, model=SEEING, max_output_tokens=16)
    shown, plain = seeing(user(parts)).usage, seeing(SAID["question"]).usage
    took_tokens(shown.input_tokens, plain.input_tokens)
    refused_with(400, BadRequestError, lambda: respond(user(parts)))


@check("responses: errors")
def raises_errors_of_responses() -> None:
    refused = refused_with(400, BadRequestError, lambda: respond(truncation="auto"))
    equal(refused.param, "truncation")
    refused_with(404, NotFoundError, lambda: respond(previous_response_id="resp_absent"))
    refused_with(404, NotFoundError, lambda: client.responses.retrieve("resp_absent"))
    refused_with(400, BadRequestError, lambda: respond(top_p=7, stream=True))


@check("responses: cancel")
def cancels_a_response() -> None:
    fields: Any = {"max_output_tokens": SAID["limit"], "extra_body": {"logit_bias": SAID["unending"]}}
    stream = respond(stream=True, **fields)
    job_id = next(iter(stream)).response.id
    stream.close()
    await_cancelled(job_id)
    background = respond(background=True, **fields)
    equal(client.responses.cancel(background.id).status, "cancelled")


@check("responses: background")
def works_in_the_background() -> None:
    response = respond(background=True)
    while response.status in ("queued", "in_progress"):
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    equal(response.output_text, SAID["counted"])
    events = list(client.responses.retrieve(response.id, stream=True))
    rest = list(client.responses.retrieve(response.id, stream=True, starting_after=3))
    equal(rest, events[4:])


@check("responses: conversation")
def continues_a_conversation() -> None:
    first = respond("My name is Ada.")
    second = respond(SAID["count"], previous_response_id=first.id)
    third = respond("What is my name?", previous_response_id=second.id)
    assert "Ada" in third.output_text, third.output_text
    items = list(client.responses.input_items.list(third.id, order="asc", limit=2))
    equal(len(items), 5)


@check("responses: delete")
def deletes_a_response() -> None:
    response = respond()
    client.responses.delete(response.id)
    refused_with(404, NotFoundError, lambda: client.responses.retrieve(response.id))


@check("models: list")
def lists_the_models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    equal(client.models.retrieve(MODEL).id, MODEL)
    refused_with(404, NotFoundError, lambda: client.models.retrieve("absent"))


def uploaded(content: bytes = b"") -> Any:
    return client.files.create(file=("in.jsonl", content or batch_lines()), purpose="batch")


def started(content: bytes = b"", endpoint: Any = "/v1/chat/completions", **fields: Any) -> Any:
    file = uploaded(content)
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def to_end(batch: Any) -> Any:
    endings = ("completed", "failed", "expired", "cancelled")
    return until_ended(lambda: client.batches.retrieve(batch.id), lambda found: found.status in endings)


@check("files: upload, retrieve, content, delete")
def keeps_a_file() -> None:
    content = batch_lines()
    file = uploaded(content)
    equal((file.object, file.filename, file.bytes, file.purpose), ("file", "in.jsonl", len(content), "batch"))
    equal(client.files.retrieve(file.id).to_dict(), file.to_dict())
    equal(client.files.content(file.id).read(), content)
    first = client.files.with_raw_response.content(file.id, extra_headers={"range": "bytes=0-9"})
    equal((first.status_code, first.content), (206, content[:10]))
    equal(client.files.delete(file.id).deleted, True)
    refused_with(404, NotFoundError, lambda: client.files.retrieve(file.id))
    refused_with(404, NotFoundError, lambda: client.files.content(file.id))


@check("files: list")
def lists_files() -> None:
    ids = [uploaded().id for _ in range(3)]
    for order, expected in (("desc", ids[::-1]), ("asc", ids)):
        found = [file.id for file in client.files.list(purpose="batch", order=order, limit=2)]
        equal([id for id in found if id in ids], expected)


@check("files: errors")
def refuses_other_files() -> None:
    refused_with(400, BadRequestError, lambda: client.files.create(file=("a.bin", b"1"), purpose="assistants"))
    refused_with(404, NotFoundError, lambda: client.files.retrieve("file-absent"))


@check("uploads: parts, chunks, cancel")
def uploads_in_parts() -> None:
    content = batch_lines()
    about: Any = {"filename": "in.jsonl", "bytes": len(content), "mime_type": "text/jsonl", "purpose": "batch"}
    done = client.uploads.upload_file_chunked(file=content, part_size=100, **about)
    assert done.file is not None
    equal((done.status, done.file.bytes), ("completed", len(content)))
    equal(client.files.content(done.file.id).read(), content)
    upload = client.uploads.create(**about)
    part = client.uploads.parts.create(upload.id, data=content[:10])
    equal((part.object, part.upload_id), ("upload.part", upload.id))
    refused_with(400, BadRequestError, lambda: client.uploads.complete(upload.id, part_ids=[part.id]))
    equal(client.uploads.cancel(upload.id).status, "cancelled")
    refused_with(409, ConflictError, lambda: client.uploads.complete(upload.id, part_ids=[part.id]))


@check("batches: run")
def runs_a_batch() -> None:
    batch = started(metadata={"a": "b"})
    equal((batch.object, batch.endpoint, batch.metadata), ("batch", "/v1/chat/completions", {"a": "b"}))
    batch = to_end(batch)
    counts = batch.request_counts
    equal((batch.status, counts.total, counts.completed, counts.failed), ("completed", 3, 2, 1))
    answers = read_batch(client.files.content(batch.output_file_id).read())
    texts = {id: line["response"]["body"]["choices"][0]["message"]["content"] for id, line in answers.items()}
    equal(texts, dict.fromkeys(("line-0", "line-1"), SAID["counted"]))
    equal({line["response"]["status_code"] for line in answers.values()}, {200})
    (failed,) = read_batch(client.files.content(batch.error_file_id).read()).values()
    equal((failed["custom_id"], failed["response"]["status_code"]), ("bad", 400))
    equal(client.files.retrieve(batch.output_file_id).purpose, "batch_output")


@check("batches: list")
def lists_batches() -> None:
    ids = [started().id for _ in range(3)]
    found = [batch.id for batch in client.batches.list(limit=2)]
    equal((len(set(found)), set(ids) <= set(found)), (len(found), True))
    equal({batch.id for batch in client.batches.list(limit=2, after=found[-2]).data}, {found[-1]})


@check("batches: cancel")
def cancels_a_batch() -> None:
    batch = started(batch_lines(200, logit_bias=SAID["unending"], max_tokens=SAID["limit"]))
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = to_end(batch)
    equal(batch.status, "cancelled")
    if batch.error_file_id:
        codes = {
            line["error"]["code"] for line in read_batch(client.files.content(batch.error_file_id).read()).values()
        }
        assert "batch_cancelled" in codes, codes


@check("batches: errors")
def refuses_a_bad_batch() -> None:
    batch = to_end(started(batch_lines() + b"{}\n"))
    equal((batch.status, batch.errors.data[0].line), ("failed", 4))
    refused_with(404, NotFoundError, lambda: client.batches.retrieve("batch_absent"))
    given: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    refused_with(404, NotFoundError, lambda: client.batches.create(input_file_id="file-absent", **given))
    refused_with(400, BadRequestError, lambda: started(endpoint="/v1/moderations"))


@check("webhooks: unwrap")
def verifies_a_webhook() -> None:
    port, secret = HOOK.split()
    with receiver(int(port)) as received:
        batch = started()
        while True:  # the runs of other checks have ended, too
            body, headers = received.get(timeout=60)
            event = client.webhooks.unwrap(body, headers, secret=secret)
            if event.data.id == batch.id:
                break
    equal((event.type, event.object), ("batch.completed", "event"))
    try:
        client.webhooks.unwrap(body + b" ", headers, secret=secret)
    except InvalidWebhookSignatureError:
        return
    raise AssertionError("a changed body was accepted")


if __name__ == "__main__":
    check.run()
