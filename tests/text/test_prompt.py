import asyncio
import threading
from typing import Any

import pytest

from schemas import ChatRequest
from tests.fakes import PLAIN_TEMPLATE, ByteTokenizer
from worker.errors import Refusal
from worker.text.prompt import render

STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('Begin with a user.') }}{% endif %}"


def user(content: Any = "Hello") -> dict[str, Any]:
    return {"role": "user", "content": content}


def image() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


async def prompt(*messages: dict[str, Any], template: str = PLAIN_TEMPLATE, **rest: Any) -> str:
    request = ChatRequest.model_validate({"messages": list(messages), **rest})
    return bytes(await render(ByteTokenizer(template=template), request)).decode()


async def refusal(*messages: dict[str, Any], **given: Any) -> tuple[str, str]:
    with pytest.raises(Refusal) as raised:
        await prompt(*messages, **given)
    return raised.value.type, raised.value.message


async def test_messages_go_through_the_template_in_order() -> None:
    assistant = {"role": "assistant", "content": "Hello!"}
    assert await prompt(user("Hi"), assistant, user("Bye")) == "<user>Hi<assistant>Hello!<user>Bye<assistant>"


async def test_a_developer_is_the_template_s_system() -> None:
    assert await prompt({"role": "developer", "content": "Be brief."}, user()) == (
        "<system>Be brief.<user>Hello<assistant>"
    )


async def test_text_parts_are_joined_without_anything_between() -> None:
    assert await prompt(user([text("Hel"), text("lo "), text("there")])) == "<user>Hello there<assistant>"


async def test_an_assistant_that_only_called_a_tool_has_an_empty_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [user(), {"role": "assistant", "tool_calls": [call]}]
    template = (
        "{{ messages[1].content is string }} {{ messages[1].content }}{{ messages[1].tool_calls[0].function.name }}"
    )
    assert await prompt(*messages, template=template) == "True look"


async def test_an_image_is_refused_by_name() -> None:
    assert await refusal(user([text("What is this?"), image()])) == (
        "unsupported", "This model takes text only: leave out the image_url parts.",
    )  # fmt: skip


async def test_the_template_s_own_words_reach_the_client() -> None:
    system = {"role": "system", "content": "Be brief."}
    assert await refusal(system, template=STRICT) == (
        "invalid_request", "The model's chat template refuses these messages: Begin with a user.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].name.first }}", "has no attribute 'name'"),
        ("{{ 1 + messages[0].content }}", "unsupported operand"),
        ("{{ 'Hello'.index('x') }}", "substring not found"),
    ],
)
async def test_a_template_s_slip_is_a_refusal(template: str, words: str) -> None:
    type, message = await refusal(user(), template=template)
    assert type == "invalid_request"
    assert message.startswith("The model's chat template ")
    assert words in message


async def test_what_the_client_sets_for_the_template_arrives_there() -> None:
    template = "{{ 'deep' if enable_thinking else 'quick' }}"
    assert await prompt(user(), template=template, chat_template_kwargs={"enable_thinking": True}) == "deep"


async def threads(**message: Any) -> set[threading.Thread]:
    tokenizer = ByteTokenizer()
    await render(tokenizer, ChatRequest.model_validate({"messages": [{**user(), **message}]}))
    return tokenizer.threads


async def test_a_short_prompt_stays_on_the_loop() -> None:
    assert await threads() == {threading.current_thread()}


async def test_a_long_prompt_leaves_the_loop() -> None:
    assert threading.current_thread() not in await threads(content="long " * 5_000)


async def test_a_prompt_that_is_long_in_its_tool_calls_leaves_the_loop() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "write", "arguments": "long " * 5_000}}
    assert threading.current_thread() not in await threads(role="assistant", content=None, tool_calls=[call])


async def test_the_loop_goes_on_while_a_long_prompt_is_rendered() -> None:
    class SlowTokenizer(ByteTokenizer):
        def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> list[int]:
            assert ticked.wait(5), "the loop stood still"
            return super().apply_chat_template(conversation, **kwargs)

    ticked = threading.Event()
    asyncio.get_running_loop().call_soon(ticked.set)
    request = ChatRequest.model_validate({"messages": [user("long " * 5_000)]})
    assert len(await render(SlowTokenizer(), request)) > 20_000
