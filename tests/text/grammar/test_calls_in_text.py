"""Grammars of the calls in free answers: of strict functions, and of the others as far as possible."""

import asyncio
import logging
from typing import Any

import pytest

from tests.text.guided import CITY, model, request
from tests.text.structured import allowed
from worker.errors import JobFailure
from worker.text.grammar.guide import GrammarStates
from worker.text.grammar.row.calls import CallsGrammar
from worker.text.prompt.prompt import Prompt
from worker.text.tokenizer import Vocabulary

UNSUPPORTED = {"type": "object", "properties": {"a": {"not": {"pattern": "x"}}}}
CONTRARY = {"type": "object", "properties": {"a": {"allOf": [{"const": 1}, {"const": 2}]}}, "required": ["a"]}
SLOW = {"type": "object", "properties": {"when": {"type": "string", "format": "date"}}, "required": ["when"]}


def tool(name: str, parameters: Any = CITY, *, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def states(*, hold_calls: bool) -> GrammarStates:
    spoken = model("hermes")
    return GrammarStates(
        spoken.tokenizer, Vocabulary(spoken.tokenizer), spoken.dialect, spoken.count, hold_calls=hold_calls
    )


async def created(tools: list[dict[str, Any]], *, hold_calls: bool = True, **more: bool) -> CallsGrammar | None:
    found = await states(hold_calls=hold_calls).create(request(tools=tools), Prompt((1,), "none"), **more)
    assert isinstance(found, CallsGrammar | None)
    return found


def takes(state: CallsGrammar, text: str) -> bool:
    state.reset()
    for token in model("hermes").tokenizer.encode(text):
        if state.bitmask() is not None and token not in allowed(state, model("hermes").count):
            return False
        state.accept(token)
    return True


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_without_the_setting_only_strict_functions_are_held() -> None:
    assert await created([tool("f")], hold_calls=False) is None
    state = await created([tool("f", strict=True), tool("g")], hold_calls=False)
    assert state
    assert not takes(state, called("f", '{"town": 1}'))
    assert takes(state, called("g", '{"town": 1}'))


async def test_with_the_setting_all_functions_are_held() -> None:
    state = await created([tool("f"), tool("g")], resumes=True)
    assert state
    assert [takes(state, called("g", arguments)) for arguments in ('{"town": 1}', '{"city": "Oslo"}')] == [False, True]


@pytest.mark.parametrize("schema", [UNSUPPORTED, CONTRARY])
async def test_a_strict_function_that_cannot_be_held_is_refused(schema: Any) -> None:
    with pytest.raises(JobFailure) as refused:
        await created([tool("f"), tool("odd", schema, strict=True)])
    assert (refused.value.type, refused.value.param) == ("invalid_request", "tools")
    assert refused.value.message.startswith("tools: odd")


@pytest.mark.parametrize("schema", [UNSUPPORTED, CONTRARY])
async def test_another_function_that_cannot_be_held_is_free_alone(
    schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sluice.text")
    state = await created([tool("f"), tool("odd", schema)], resumes=True)
    assert state
    assert not takes(state, called("f", '{"town": 1}'))
    assert takes(state, called("odd", '{"any": [1]}'))
    lines = [record.message for record in caplog.records if record.message.endswith(": odd")]
    assert len(lines) == 1


async def test_an_answer_waits_only_for_strict_functions_or_if_it_resumes() -> None:
    state = await created([tool("f", SLOW)])
    assert state
    assert not state._matchers.done()
    assert takes(state, called("f", "{}"))
    async with asyncio.timeout(60):
        while not state._matchers.done():
            await asyncio.sleep(0.01)
    for waiting in (
        await created([tool("f", SLOW)], resumes=True),
        await created([tool("f", SLOW, strict=True)], hold_calls=False),
    ):
        assert waiting
        assert waiting._matchers.done()
        assert not takes(waiting, called("f", "{}"))


async def test_forced_calls_and_schemas_have_a_grammar_of_the_whole_answer() -> None:
    for fields in ({"tool_choice": "required"}, {"response_format": {"type": "json_object"}}):
        asked = request(tools=[tool("f", strict=True)], **fields)
        state = await states(hold_calls=True).create(asked, Prompt((1,), "none"))
        assert state
        assert not isinstance(state, CallsGrammar)
    asked = request(tools=[tool("f", strict=True)], tool_choice="none")
    assert await states(hold_calls=True).create(asked, Prompt((1,), "none")) is None
