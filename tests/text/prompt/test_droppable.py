"""Which tokens of a prompt may be left out."""

import asyncio
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.text.templated import TEMPLATES, request, words
from worker.text.output.formats import ModelFormat
from worker.text.prompt.boundaries import TokenOffsets, droppable_ranges
from worker.text.prompt.prompt import Prompt, Prompts
from worker.text.tokenizer import Vocabulary

TEXT = " ".join(f"The river has {i} lamps." for i in range(200))
OTHER = " ".join(f"The garden has {i} keys." for i in range(200))
QUESTION = " Question: how many lamps has the river?"


async def prompt(*messages: dict[str, Any], template: str = "qwen", **rest: Any) -> tuple[Prompt, str, Any]:
    told = words(TEMPLATES[template])
    places = TokenOffsets(Vocabulary(told), len(told.tokens))
    found = await Prompts(told, ModelFormat.of(told).think, None, partial(droppable_ranges, places)).render(
        request(*messages, **rest)
    )
    return found, "".join(spelled(told, found, *span) for span in found.droppable_ranges), told


def spelled(told: Any, found: Prompt, start: int, end: int) -> str:
    return str(told._tokenizer.decode(found.tokens[start:end]))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_the_inside_of_a_long_text_may_be_thinned_and_its_ends_stay() -> None:
    found, inside, _ = await prompt(user(TEXT + QUESTION))
    assert len(found.droppable_ranges) == 1
    assert inside in TEXT
    assert len(inside) > len(TEXT) - 900
    assert TEXT.startswith(inside) is False


async def test_system_prompts_and_short_messages_stay() -> None:
    _, inside, _ = await prompt({"role": "system", "content": OTHER}, user("Hi"), assistant("Hello."), user(TEXT))
    assert inside in TEXT


async def test_earlier_texts_may_be_thinned_whole() -> None:
    found, inside, told = await prompt(user(TEXT), assistant("I see."), user("And now?"))
    assert inside in TEXT
    assert len(inside) > len(TEXT) - 10
    assert spelled(told, found, found.droppable_ranges[-1][1], len(found.tokens)).count("And now?") == 1


async def test_the_question_stays_where_an_answer_is_begun_behind_it() -> None:
    _, inside, _ = await prompt(user(TEXT + QUESTION), assistant("It has"))
    assert inside in TEXT
    assert "Question" not in inside


async def test_the_question_and_the_end_of_a_result_stay_in_a_tool_loop() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "1", "content": OTHER + " The last line."}
    tools = [{"type": "function", "function": {"name": "look"}}]
    _, inside, _ = await prompt(
        user(TEXT + QUESTION), {"role": "assistant", "content": None, "tool_calls": [call]}, result, tools=tools
    )
    assert "Question" not in inside
    assert "last line" not in inside


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.integers(0, 900)), min_size=1, max_size=6))
def test_spans_are_in_order_and_within_the_prompt(turns: list[tuple[str, int]]) -> None:
    messages = [{"role": role, "content": "é" + "x y " * size} for role, size in [*turns, ("user", 0)]]
    found, inside, _ = asyncio.run(prompt(*messages))
    edges = [edge for span in found.droppable_ranges for edge in span]
    assert edges == sorted(edges)
    assert all(0 < edge < len(found.tokens) for edge in edges)
    assert "<|im_" not in inside


async def test_what_stands_in_the_prompt_twice_is_left_as_it_is() -> None:
    found, _, _ = await prompt({"role": "system", "content": TEXT}, user(TEXT))
    assert found.droppable_ranges == ()


async def test_of_many_long_texts_the_longest_may_be_thinned() -> None:
    """Searching the whole prompt for each of ten thousand would take minutes."""
    long = [f"No. {at}: " + "x y " * (101 + at % 7) for at in range(300)]
    messages = [turn for text in long for turn in (user(text), assistant("Yes."))]
    found, inside, _ = await prompt(*messages, user("And?"))
    assert len(found.droppable_ranges) == 256
    assert all(f"{at}: x" in inside for at in range(300) if at % 7 >= 2)
