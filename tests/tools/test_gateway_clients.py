"""What the scenarios take for a whole answer."""

from typing import Any

import httpx
import pytest

from tests.support.chaos.gateway_clients import INTERFACES, Answer, Chat, Ending, Interface, Messages, Responses

URL = "http://gateway"


def body_of(interface: Interface, tokens: int, *, last: bool = True) -> str:
    """Return the stream of an answer in the form of the interface, without what the scenarios do not read."""
    texts = [f" t{number}" for number in range(tokens)]
    match interface:
        case Chat():
            events: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
            end = "[DONE]"
        case Responses():
            events = [{"type": "response.output_text.delta", "delta": text} for text in texts]
            end = '{"type":"response.incomplete"}'
        case _:
            events = [{"type": "content_block_delta", "delta": {"text": text}} for text in texts]
            end = '{"type":"message_stop"}'
    frames = [f"id: {number}\ndata: {httpx.Request('POST', URL, json=each).content.decode()}\n\n"
              for number, each in enumerate(events)]  # fmt: skip
    return "".join([*frames, f"data: {end}\n\n"] if last else frames)


async def read(interface: Interface, body: str, tokens: int = 3) -> Answer:
    answer = Answer(interface, tokens)
    reply = httpx.Response(200, headers={"x-request-id": "a"}, text=body)
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda request: reply)) as http:
        await answer.read(http, URL)
    return answer


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda each: each.name)
async def test_an_answer_is_whole_with_each_token_once_and_its_last_event(interface: Interface) -> None:
    assert (await read(interface, body_of(interface, 3))).is_whole
    assert not (await read(interface, body_of(interface, 2))).is_whole
    assert not (await read(interface, body_of(interface, 3) + body_of(interface, 3))).is_whole


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda each: each.name)
async def test_a_body_that_ends_without_the_last_event_is_truncated(interface: Interface) -> None:
    assert (await read(interface, body_of(interface, 3, last=False))).ending == "truncated"


@pytest.mark.parametrize(
    ("data", "ending"),
    [
        ('{"error":{"message":"no"}}', "error"),
        ('{"type":"response.failed"}', "error"),
        ('{"type":"ping"}', "truncated"),
    ],
)
async def test_an_error_event_is_an_ending(data: str, ending: Ending) -> None:
    assert (await read(Responses(), f": keep-alive\ndata: {data}\n\n")).ending == ending


async def test_only_messages_without_a_key_cannot_be_continued() -> None:
    assert [Answer(each, 1).can_continue for each in INTERFACES] == [True, True, False]
    assert Answer(Messages(), 1, "key").can_continue
