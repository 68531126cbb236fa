"""Calls in free text are held to their grammar, and all else is as it would be."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from tests.selection import examples
from tests.text.dialects.reading import BY_NAME
from tests.text.dialects.rows import WRITTEN
from tests.text.grammar.test_tool_grammars import (
    DEFINITIONS,
    KINDS,
    NOW,
    OF_A_CLASS,
    OSLO_AND_DAYS,
    ROWS,
    _urges,
)
from tests.text.guided import CITY, CLOCK, EOS, FORCED, OTHER_EOS, WEATHER, Model, model, request, spelled
from tests.text.structured import allowed
from worker.text.grammar.row.calls import CallsGrammar

HEADERS = ("<|channel|>commentary to=", "<|start|>assistant to=")  # of harmony
OPENINGS = [
    pytest.param(name, opening, marks=row.marks if hasattr(row, "marks") else ())
    for row in [*ROWS, "harmony"]
    for name in [row if isinstance(row, str) else row.values[0]]
    for opening in (HEADERS if name == "harmony" else BY_NAME[name].openings)
    if name == "harmony" or opening != BY_NAME[name].closing  # what ends calls too opens none for sure
]


def _feed(guide: CallsGrammar, tokens: list[int]) -> None:
    for token in tokens:
        guide.accept(token)


def _walk(guide: CallsGrammar, count: int, dice: Random, urges: list[list[int]]) -> list[int]:
    """Draw what is allowed until text is free again; nothing if it takes some hundred tokens."""
    said = list[int]()
    while guide.bitmask() is not None:
        if len(said) > 500:
            return []
        may = [token for token in allowed(guide, count) if token not in (EOS, OTHER_EOS)]
        for token in dice.choice(urges) if urges and dice.random() < 0.2 else [dice.choice(may)]:
            if guide.bitmask() is None or token not in allowed(guide, count):
                break
            guide.accept(token)
            said.append(token)
    return said


@pytest.mark.parametrize("spell", [True, False], ids=["by token", "by character"])
@pytest.mark.parametrize(("name", "opening"), OPENINGS)
def test_a_call_that_has_begun_is_read_back_and_validates(name: str, opening: str, spell: bool) -> None:
    spoken, walks, ended = model(name), 0, 0
    encode: Callable[[str], list[int]] = spoken.tokenizer.encode if spell else spoken.spelled
    urges = _urges(spoken, BY_NAME[name]) if name in BY_NAME else [[t] for t in spoken.tokenizer.encode('"<|end|>')]
    # Others differ from one of these in their markers.
    every = 1 if examples(4) > 1 and name in (*OF_A_CLASS, "harmony") else 3
    for kind, asked_for in [*KINDS.items()][::every]:
        properties = {"a": asked_for, "b": {"type": "boolean"}}
        parameters = {"type": "object", "properties": properties, "required": ["a"], "$defs": DEFINITIONS}
        tools = [{"type": "function", "function": {"name": each, "parameters": parameters}} for each in ("f", "f2")]
        asked = request(tools=tools)
        guide, before = spoken.calls_guide(asked), "" if name == "harmony" else "Let me see. "
        begun = [*spelled(before), *encode(opening)]
        _feed(guide, begun)
        assert guide.bitmask() is not None
        walks += 1
        if not (said := _walk(guide, spoken.count, Random(kind), urges)):
            continue
        ended += 1
        output, why = spoken.said(asked, begun + said)
        # The last token of a call may hold the beginning of the text after it.
        assert (output.content.startswith(before.strip()), why) == (True, "tool_calls")
        for call in output.tool_calls:
            Draft202012Validator(parameters).validate(json.loads(call["function"]["arguments"]))
    assert ended >= 0.4 * walks


@pytest.mark.parametrize("dialect", sorted({*WRITTEN} - {"longcat"}))  # whose row calls a function in JSON
def test_nothing_is_masked_that_models_write(dialect: str) -> None:
    spoken = model(dialect)
    guide = spoken.calls_guide(request(tools=[OSLO_AND_DAYS, NOW]))
    before = "" if BY_NAME[dialect].bare else "Let me see.\n"
    held = 0
    for token in spoken.tokenizer.encode(f"{before}{WRITTEN[dialect]}\nDone."):
        mask = guide.bitmask()
        held += mask is not None
        assert mask is None or token in allowed(guide, spoken.count)
        guide.accept(token)
    assert held > 5
    assert (guide.error, guide.bitmask()) == (None, None)


@pytest.mark.parametrize("format", FORCED)
@pytest.mark.parametrize("wrong", ["It is warm.", '{"a": 1}', "<b> a => to=you </b>", "[1, 2]", "f(x)"])
def test_text_without_calls_is_never_masked(format: str, wrong: str) -> None:
    spoken = model(format)
    guide = spoken.calls_guide(request(tools=[WEATHER]))
    for token in [*spoken.tokenizer.encode("<|channel|>final<|message|>" * (format == "harmony")), *spelled(wrong)]:
        assert guide.bitmask() is None
        guide.accept(token)
    assert guide.bitmask() is None


@pytest.mark.parametrize("format", FORCED)
def test_only_offered_functions_and_their_arguments_may_be_called(format: str) -> None:
    spoken = model(format)
    for wrong in (FORCED[format].replace("city", "town"), FORCED[format].replace("weather", "rain")):
        guide, allows = spoken.calls_guide(request(tools=[WEATHER, CLOCK])), True
        for token in spoken.spelled(wrong):
            allows = allows and (guide.bitmask() is None or token in allowed(guide, spoken.count))
            if allows:
                guide.accept(token)
        assert not allows


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "mistral", "harmony"])
def test_functions_that_are_not_strict_have_free_arguments(format: str) -> None:
    spoken = model(format)
    strict = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}
    asked = request(tools=[strict, {"type": "function", "function": {"name": "rain", "parameters": CITY}}])
    for call, fits in (
        (FORCED[format], True),
        (FORCED[format].replace("city", "town"), False),
        (FORCED[format].replace("weather", "rain").replace("city", "town"), True),
        (FORCED[format].replace("weather", "snow"), False),
    ):
        guide, allows = spoken.calls_guide(asked, hold=False, strict=True), True
        for token in spoken.tokenizer.encode(call):
            allows = allows and (guide.bitmask() is None or token in allowed(guide, spoken.count))
            if allows:
                guide.accept(token)
        assert allows == fits


def test_within_a_thought_nothing_is_held() -> None:
    spoken = model("hermes")
    tools: dict[str, Any] = {"tools": [WEATHER]}
    guide = spoken.calls_guide(request(**tools), "open")
    for token in spoken.tokenizer.encode("I could write <tool_call> here.</think>Well. "):
        assert guide.bitmask() is None
        guide.accept(token)
    _feed(guide, spoken.tokenizer.encode("<tool_call>"))
    assert guide.bitmask() is not None
    guide = spoken.calls_guide(request(**tools), "open")
    _feed(guide, spoken.tokenizer.encode('So: <tool_call>\n{"name": "weather", "arguments": '))
    assert guide.bitmask() is None
    _feed(guide, spelled("{"))
    assert guide.bitmask() is None


@pytest.mark.parametrize("bare", ["hermes", "llama3", "llama4"])
def test_a_bare_call_is_held_as_soon_as_it_can_be_nothing_else(bare: str) -> None:
    spoken = model(bare)
    begun = {
        "hermes": '{"name": "weather", "arguments": {',
        "llama3": '{"name": "weather", "parameters": {',
        "llama4": "[weather(",
    }[bare]
    guide = spoken.calls_guide(request(tools=[WEATHER]))
    for token in spelled(begun):
        assert guide.bitmask() is None
        guide.accept(token)
    assert guide.bitmask() is not None
    assert spelled("t")[0] not in allowed(guide, spoken.count)
    guide = spoken.calls_guide(request(tools=[WEATHER]))
    _feed(guide, spelled(begun.replace("weather", "rain")))
    assert guide.bitmask() is None


def test_the_rest_of_a_token_belongs_to_the_call_or_leaves_it_free() -> None:
    spoken = model("qwen3_coder")  # whose second opening is text
    for rest, held in (("weather>", True), ("rain>", False)):
        guide = spoken.calls_guide(request(tools=[WEATHER]))
        search = guide._search
        search.feed(spelled("<function"))
        found = search.feed(spelled(f"={rest}"))  # as one token may
        assert found == f"<function={rest}"
        matchers = guide._matchers.result()
        assert matchers
        assert (matchers.begin(found) is not None) == held


def _masks(guide: CallsGrammar, tokens: list[int]) -> list[bytes | None]:
    masks = list[bytes | None]()
    for token in tokens:
        masks.append(guide.bitmask())
        guide.accept(token)
    return [*masks, guide.bitmask()]


def _two_calls(spoken: Model, format: str) -> list[int]:
    if format == "harmony":
        return spoken.tokenizer.encode("<|channel|>analysis<|message|>So.<|end|><|start|>assistant" + FORCED[format])
    return spoken.tokenizer.encode(f"So. {FORCED[format]}\nAnd {FORCED[format]} done")


@pytest.mark.parametrize("format", [*FORCED, "llama3"])
def test_tokens_can_be_taken_back_across_the_beginning_and_the_end_of_a_call(format: str) -> None:
    spoken = model(format)
    asked = request(tools=[WEATHER])
    tokens = spoken.tokenizer.encode(WRITTEN[format]) if format == "llama3" else _two_calls(spoken, format)
    asked = request(tools=[OSLO_AND_DAYS, NOW]) if format == "llama3" else asked
    expected = _masks(spoken.calls_guide(asked), tokens)
    assert sum(mask is not None for mask in expected) > 5
    guide, dice = spoken.calls_guide(asked), Random(format)
    at = 0
    for _ in range(400):
        if at and dice.random() < 0.45:
            count = dice.randint(1, min(at, 16))
            guide.rollback(count)
            at -= count
            if dice.random() < 0.2:  # another token, which is taken back too
                guide.accept(spelled("x")[0] if guide.bitmask() is None else allowed(guide, spoken.count)[-1])
                guide.rollback(1)
        elif at < len(tokens):
            guide.accept(tokens[at])
            at += 1
        assert guide.bitmask() == expected[at]
        assert guide.accepted == at
    guide.reset()
    assert _masks(guide, tokens) == expected


@pytest.mark.parametrize("format", [*FORCED, "llama3"])
def test_masks_along_a_draft_are_those_of_its_tokens(format: str) -> None:
    spoken = model(format)
    tokens = spoken.tokenizer.encode(WRITTEN[format]) if format == "llama3" else _two_calls(spoken, format)
    asked = request(tools=[OSLO_AND_DAYS, NOW] if format == "llama3" else [WEATHER])
    expected = _masks(spoken.calls_guide(asked), tokens)
    guide, verified = spoken.calls_guide(asked), 0
    for at, token in enumerate(tokens):
        draft = tokens[at : at + 7]
        masks = guide.masks_along(draft)
        assert masks == expected[at : at + len(masks)]
        verified += len(masks) - 1
        assert guide.accepted == at
        guide.accept(token)
    assert verified > 3 * len(tokens) if format != "llama3" else verified > 0


def test_a_call_that_begins_before_its_grammar_is_there_is_free_whenever_it_is_read() -> None:
    spoken = model("hermes")
    guide = spoken.calls_guide(request(tools=[WEATHER]))
    there = guide._matchers
    guide._matchers = type(there)()
    _feed(guide, spoken.tokenizer.encode("<tool_call>"))
    guide._matchers = there
    assert guide.bitmask() is None
    guide.reset()  # as after a preemption
    _feed(guide, spoken.tokenizer.encode("<tool_call>"))
    assert guide.bitmask() is None
    _feed(guide, spoken.tokenizer.encode('{"name": "weather", "arguments": '))
    assert guide.bitmask() is None
    _feed(guide, spelled("{"))
    assert guide.bitmask() is not None


def test_a_further_call_of_mistral_without_its_opening_is_held() -> None:
    spoken = model("mistral")
    asked = request(tools=[WEATHER, CLOCK])
    guide = spoken.calls_guide(asked)
    tokens = spoken.tokenizer.encode("[TOOL_CALLS]clock[ARGS]{}weather[ARGS]")
    _feed(guide, tokens)
    assert guide.bitmask() is not None
    said = _walk(guide, spoken.count, Random(1), [spoken.tokenizer.encode('{"city": "Oslo"}')])
    output, _ = spoken.said(asked, tokens + said)
    assert [call["function"]["name"] for call in output.tool_calls] == ["clock", "weather"]
    assert output.content == ""
    Draft202012Validator(CITY).validate(json.loads(output.tool_calls[1]["function"]["arguments"]))
