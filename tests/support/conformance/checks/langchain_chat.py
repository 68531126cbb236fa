"""LangChain's ChatOpenAI, over chat completions and responses."""

from typing import Any

import httpx
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError, NotFoundError

from tests.support.conformance.checks.checking import (
    CALLED,
    IMAGE_PARTS,
    MODEL,
    SAID,
    SEEING,
    TOOL,
    URL,
    Checks,
    await_cancelled,
    equal,
    refused_with,
    took_tokens,
)
from tests.support.conformance.checks.shapes import City, Said

check = Checks("langchain-openai")
seen = list[str]()  # ids of the jobs, oldest first
watched = httpx.Client(event_hooks={"response": [lambda response: seen.append(response.headers["x-request-id"])]})


def model(**fields: Any) -> Any:
    given: Any = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    return ChatOpenAI(http_client=watched, timeout=60, **{**given, **fields})


def _text(message: Any) -> str:
    text = message.text
    return str(text() if callable(text) and not isinstance(text, str) else text)


@check("chat: answer")
def answers() -> None:
    message = model().invoke(SAID["count"])
    equal(message.content, SAID["counted"])
    assert message.usage_metadata["output_tokens"] > 0


@check("chat: stream")
def streams() -> None:
    equal("".join(chunk.content for chunk in model().stream(SAID["count"])), SAID["counted"])


@check("chat: tools")
def calls_a_tool() -> None:
    bound = model().bind_tools([TOOL])
    message = bound.invoke(SAID["call"])
    (call,) = message.tool_calls
    equal((call["name"], call["args"]), CALLED)
    bound.invoke([HumanMessage(SAID["call"]), message, ToolMessage("Snow.", tool_call_id=call["id"])])
    whole = None
    for chunk in bound.stream(SAID["call"]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    equal(whole.tool_calls[0]["args"], {"city": "Oslo"})


@check("chat: JSON schema")
def follows_a_schema() -> None:
    equal(model().with_structured_output(City, method="json_schema").invoke(SAID["capital"]), City(**SAID["oslo"]))
    forced = model().with_structured_output(Said, method="function_calling")
    equal(forced.invoke(SAID["count"]), Said(word="yes"))


@check("chat: n, stop, logprobs")
def takes_sampling_fields() -> None:
    message = model(n=2, stop_sequences=[" 4"], logprobs=True, top_logprobs=2).invoke(SAID["count"])
    equal(message.content, "1 2 3")
    assert message.response_metadata["logprobs"]["content"]


@check("chat: image")
def takes_an_image_if_the_model_sees() -> None:
    _takes_an_image()


def _takes_an_image(**fields: Any) -> None:
    seeing = model(model=SEEING, max_tokens=16, **fields)
    shown, plain = seeing.invoke([HumanMessage(IMAGE_PARTS)]), seeing.invoke(SAID["question"])
    took_tokens(shown.usage_metadata["input_tokens"], plain.usage_metadata["input_tokens"])
    refused_with(400, BadRequestError, lambda: model(**fields).invoke([HumanMessage(IMAGE_PARTS)]))


@check("chat: errors")
def raises_openai_s_errors() -> None:
    _raises_errors()


def _raises_errors(**fields: Any) -> None:
    refused_with(404, NotFoundError, lambda: model(model="absent", **fields).invoke(SAID["count"]))
    refused_with(400, BadRequestError, lambda: model(top_p=7, **fields).invoke(SAID["count"]))


@check("chat: cancel")
def cancels_when_its_client_leaves() -> None:
    _cancels()


def _cancels(**fields: Any) -> None:
    unending = {"logit_bias": SAID["unending"]}
    chunks = model(extra_body=unending, max_tokens=SAID["limit"], **fields).stream(SAID["count"])
    next(chunks)
    chunks.close()
    await_cancelled(seen[-1])


@check("responses: answer")
def responds() -> None:
    equal(_text(model(use_responses_api=True).invoke(SAID["count"])), SAID["counted"])


@check("responses: stream")
def streams_a_response() -> None:
    chunks = model(use_responses_api=True).stream(SAID["count"])
    equal("".join(map(_text, chunks)), SAID["counted"])


@check("responses: tools")
def calls_a_function() -> None:
    bound = model(use_responses_api=True).bind_tools([TOOL])
    message = bound.invoke(SAID["call"])
    (call,) = message.tool_calls
    equal(call["args"], {"city": "Oslo"})
    bound.invoke([HumanMessage(SAID["call"]), message, ToolMessage("Snow.", tool_call_id=call["id"])])


@check("responses: JSON schema")
def responds_with_a_schema() -> None:
    found = model(use_responses_api=True).with_structured_output(City, method="json_schema").invoke(SAID["capital"])
    equal(found, City(**SAID["oslo"]))


@check("responses: image")
def takes_an_input_image_if_the_model_sees() -> None:
    _takes_an_image(use_responses_api=True)


@check("responses: errors")
def raises_errors_of_responses() -> None:
    _raises_errors(use_responses_api=True)


@check("responses: cancel")
def cancels_a_response() -> None:
    _cancels(use_responses_api=True)


if __name__ == "__main__":
    check.run()
