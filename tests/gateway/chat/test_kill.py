"""`kill -9` of one of two gateways, with OpenAI's own client."""

import asyncio
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, APIError, AsyncOpenAI

from tests.fakes import FakeChat
from tests.gateway.chat.test_routes import data_of, request, text_of, until_running
from tests.gateway.gateways import gateway_process
from tests.support.stack import GatewayProcess

pytestmark = pytest.mark.usefixtures("fake_worker")

WORDS = [f"{number} " for number in range(20)]
STREAMS = 8


async def streamed(openai: AsyncOpenAI, key: str) -> str:
    """Return the text of an answer that takes two seconds."""
    body: dict[str, Any] = request(*WORDS, pace_s=0.1)
    stream = await openai.chat.completions.create(
        model="default",
        messages=body.pop("messages"),
        stream=True,
        extra_body=body,
        extra_headers={"Idempotency-Key": key},
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


def client_of(gateway: GatewayProcess) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=gateway.base_url, api_key="none", max_retries=0)


async def until_it_breaks_off(answer: httpx.Response, gateway: GatewayProcess) -> str:
    """Kill the gateway after a few words, and return what arrived."""
    received = ""
    try:
        async for text in answer.aiter_text():
            received += text
            if "5 " in received:
                gateway.kill()
    except httpx.RemoteProtocolError:
        return received
    raise AssertionError("the body was terminated")


async def test_streams_of_a_killed_gateway_raise_and_a_retry_with_the_key_has_the_whole_answer(
    redis_url: str, chat: FakeChat
) -> None:
    with gateway_process(redis_url) as killed, gateway_process(redis_url) as other:
        async with client_of(killed) as first, client_of(other) as second:
            asking = [asyncio.create_task(streamed(first, f"key-{index}")) for index in range(STREAMS)]
            await until_running(chat, STREAMS)
            await asyncio.sleep(0.5)
            killed.kill()
            ended = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(each, httpx.HTTPError | APIConnectionError | APIError) for each in ended), ended
            texts = await asyncio.gather(*(streamed(second, f"key-{index}") for index in range(STREAMS)))
    assert texts == ["".join(WORDS)] * STREAMS
    assert len(chat.began) == STREAMS


async def test_a_stream_of_a_killed_gateway_continues_on_another_after_the_last_event(
    redis_url: str, chat: FakeChat
) -> None:
    with gateway_process(redis_url) as killed, gateway_process(redis_url) as other:
        body = request(*WORDS, pace_s=0.1, stream=True)
        async with httpx.AsyncClient(timeout=20) as http:
            async with http.stream("POST", f"{killed.base_url}/chat/completions", json=body) as answer:
                received = await until_it_breaks_off(answer, killed)
            complete = received[: received.rindex("\n\n") + 2]
            last = [line for line in complete.splitlines() if line.startswith("id: ")][-1].removeprefix("id: ")
            path = f"{other.base_url}/chat/completions/{answer.headers['x-request-id']}/stream"
            rest = await http.get(path, headers={"last-event-id": last})
    assert text_of(data_of(complete)) + text_of(data_of(rest.text)) == "".join(WORDS)
    assert data_of(rest.text)[-1] == "[DONE]"
