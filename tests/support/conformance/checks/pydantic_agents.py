"""Agents of Pydantic AI, over all three interfaces of the gateway."""

import asyncio
import base64
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic_ai import Agent, BinaryContent, ModelHTTPError, NativeOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.conformance.checks.checking import (
    MODEL,
    SAID,
    SEEING,
    URL,
    Checks,
    await_cancelled,
    equal,
    refused_with,
    took_tokens,
)
from tests.support.conformance.checks.shapes import City, Said

check = Checks("pydantic-ai-slim")


def chat(name: str = MODEL) -> Any:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


def responses(name: str = MODEL) -> Any:
    return OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))


def messages(name: str = MODEL) -> Any:
    return AnthropicModel(name, provider=AnthropicProvider(api_key="none", base_url=URL))


def agent(model: Any, **fields: Any) -> Any:
    return Agent(model, retries=0, model_settings={"temperature": 0, "max_tokens": 200}, **fields)


def answers(model: Callable[..., Any]) -> None:
    result = agent(model()).run_sync(SAID["count"])
    equal(result.output, SAID["counted"])
    assert result.usage.output_tokens > 0


def streams(model: Callable[..., Any]) -> None:
    async def read() -> str:
        async with agent(model()).run_stream(SAID["count"]) as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    equal(asyncio.run(read()), SAID["counted"])


def calls_a_tool(model: Callable[..., Any]) -> None:
    cities = list[str]()

    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "Snow."

    try:
        agent(model(), tools=[get_weather]).run_sync(SAID["call"], usage_limits=UsageLimits(request_limit=2))
    except UsageLimitExceeded:
        pass  # the tiny model may call it again
    equal(cities[0], "Oslo")


def follows_a_schema(model: Callable[..., Any]) -> None:
    if model is not messages:  # the client has it for some names of Claude alone
        equal(agent(model(), output_type=NativeOutput(City)).run_sync(SAID["capital"]).output, City(**SAID["oslo"]))
    equal(agent(model(), output_type=Said).run_sync(SAID["count"]).output, Said(word="yes"))  # by a forced call


def takes_an_image(model: Callable[..., Any]) -> None:
    image = BinaryContent(base64.b64decode(SAID["image"]), media_type="image/png")
    shown = agent(model(SEEING)).run_sync([SAID["question"], image]).usage
    plain = agent(model(SEEING)).run_sync(SAID["question"]).usage
    took_tokens(shown.input_tokens, plain.input_tokens)
    refused_with(400, ModelHTTPError, lambda: agent(model()).run_sync([SAID["question"], image]))


def raises_errors(model: Callable[..., Any]) -> None:
    refused_with(404, ModelHTTPError, lambda: agent(model("absent")).run_sync(SAID["count"]))


def cancels(model: Callable[..., Any]) -> None:
    # Messages have no bias against the end of an answer, but schemas that take long.
    long = {"output_config": {"format": {"type": "json_schema", "schema": SAID["long"]}}}
    body: Any = long if model is messages else {"logit_bias": SAID["unending"]}
    settings: Any = {"extra_body": body, "max_tokens": SAID["limit"]}
    job_ids = list[str]()

    async def leave() -> None:
        async with agent(model()).run_stream(SAID["count"], model_settings=settings) as result:
            async for _ in result.stream_text(delta=True, debounce_by=None):
                job_ids.append(result.response.provider_response_id)
                raise TimeoutError

    try:
        asyncio.run(leave())
    except TimeoutError:
        await_cancelled(job_ids[0])


COMMON = {
    "answer": answers,
    "stream": streams,
    "tools": calls_a_tool,
    "JSON schema": follows_a_schema,
    "image": takes_an_image,
    "errors": raises_errors,
    "cancel": cancels,
}
for surface, model in {"chat": chat, "responses": responses, "messages": messages}.items():
    for name, function in COMMON.items():
        check(f"{surface}: {name}")(partial(function, model))

if __name__ == "__main__":
    check.run()
