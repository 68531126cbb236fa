"""An answer goes on only with what its schema allows."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.text.guided import (
    ANY_OBJECT,
    CITY,
    EOS,
    FORCED,
    OTHER_EOS,
    SIGNS,
    WEATHER,
    by,
    model,
    refusal,
    request,
    spelled,
)
from tests.text.structured import Schema, allowed, walk
from worker.text.grammar.guide import GrammarStates
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.trial import TOO_MANY_STATES
from worker.text.prompt.prompt import Prompt, Thinking
from worker.text.tokenizer import Vocabulary


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
async def test_json_is_taken_as_people_write_it(indent: int | str | None) -> None:
    value = {"name": "Zoë 🎈", "list": [1, 2.5e3, {"deep": [True, None, {}]}], "empty": [], "quote": 'a "b" \\ \n'}
    assert model().takes(await model().guide(**ANY_OBJECT), json.dumps(value, indent=indent, ensure_ascii=False))


@pytest.mark.parametrize("text", ['{"a":1}', '{ "a" : 1 }', '{"a": 1 ,\n\t"b":\n  2\n}', "{}", "{\n}"])
async def test_space_may_stand_where_json_has_it(text: str) -> None:
    assert model().takes(await model().guide(**ANY_OBJECT), text)


@pytest.mark.parametrize(
    "text", ["[1]", "1", '{"a": 1', "{'a': 1}", '{"a":   1}', '{"a":\n\n1}', '{"a": 1}}', '{"a": 1}\n', ' {"a": 1}', ""]
)
async def test_what_is_no_json_object_or_never_gets_on_is_not(text: str) -> None:
    assert not model().takes(await model().guide(**ANY_OBJECT), text)


async def test_an_answer_ends_with_its_json_and_not_before() -> None:
    guide = await model().guide(**by({"enum": [True]}))
    for token in model().tokenizer.encode("true"):
        assert not {EOS, OTHER_EOS} & set(allowed(guide, 1024))
        guide.accept(token)
    assert set(allowed(guide, 1024)) == {EOS, OTHER_EOS}


async def test_the_end_itself_changes_nothing() -> None:
    guide = await model().guide(**ANY_OBJECT)
    for token in (*model().tokenizer.encode("{}"), EOS, OTHER_EOS):
        guide.accept(token)
    assert guide.error is None


@pytest.mark.parametrize("drafts", [False, True])
async def test_a_grammar_reads_drafts_if_its_row_may_take_them(drafts: bool) -> None:
    guide = await model().guides.create(request(**by(CITY)), Prompt((1,), "closed"), drafts=drafts)
    assert guide
    assert guide.takes_drafts == drafts
    assert (len(guide.masks_along(model().tokenizer.encode('{"c'))) > 1) == drafts


async def test_a_property_cannot_be_spelled_another_way_than_its_schema_knows() -> None:
    asked = by({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert model().takes(await model().guide(**asked), '{"a": 1, "b": "x"}')
    for text in (r'{"\u0061": "x"}', '{"a": 1, "a": "x"}', '{"a": "x"}'):
        assert not model().takes(await model().guide(**asked), text)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 3, "maximum": 3.5}, "3.25", "3"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.25", "-0"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0.1", "0.0"),
        ({"exclusiveMinimum": 0}, "0.001", "0"),
    ],
)
def test_a_bound_that_is_excluded_stays_out(bounds: Schema, inside: str, outside: str) -> None:
    asked = request(**by({"type": "number", **bounds}))
    assert model().takes(model().quick_guide(asked), inside)
    assert not model().takes(model().quick_guide(asked), outside)


@pytest.mark.parametrize(
    "values",
    [[{"minProperties": 3}], [{"exclusiveMinimum": 3, "maximum": 3.5}], [{"properties": {"minProperties": 2}}]],
)
async def test_what_a_schema_lists_as_data_is_no_schema(values: list[Any]) -> None:
    for asked in ({"enum": values}, {"const": values[0]}, {"properties": {"const": {"enum": values}}}):
        value = {"const": values[0]} if "properties" in asked else values[0]
        assert model().takes(await model().guide(**by({"type": "object", **asked})), json.dumps(value))


@pytest.mark.parametrize("name", ["const", "enum", "default"])
async def test_a_property_may_have_a_keywords_name_and_is_held_to_its_schema(name: str) -> None:
    for inner in (
        {"properties": {name: {"minProperties": 2}}},
        {"$defs": {name: {"minProperties": 2}}, "$ref": f"#/$defs/{name}"},
    ):
        assert f"/{name}/minProperties: " in (await refusal(**by({"type": "object", **inner}))).message


def after(begun: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": begun}]}


@pytest.mark.parametrize(
    "begun", ['{"city": ', '{"city": "Os', '<think>so</think>\n{"city": "Os', [{"type": "text", "text": "{"}]]
)
@pytest.mark.parametrize("thinking", ["closed", "none"])
async def test_an_answer_goes_on_with_the_json_that_its_message_began(begun: Any, thinking: Thinking) -> None:
    text = begun if isinstance(begun, str) else begun[0]["text"]
    rest = '{"city": "Oslo"}'.removeprefix(text.rpartition("\n")[2])
    assert model().takes(await model().guide(thinking, **by(CITY), **after(begun)), rest)
    assert not model().takes(await model().guide(thinking, **by(CITY), **after(begun)), '{"city": "Oslo"}')


async def test_harmony_goes_on_with_json_in_the_final_message() -> None:
    spoken = model("harmony")
    assert spoken.takes(await spoken.guide("none", **by(CITY), **after('{"city": "Os')), 'lo"}')


async def test_no_text_that_is_gone_on_with_is_read_as_a_control_token() -> None:
    for text in ("<|im_end|>", "<tool_call>", f"<[{EOS}]>"):  # and as llguidance's grammars name one
        assert model().takes(await model().guide("none", **by(CITY), **after(f'{{"city": "{text}')), '"}')


async def test_after_space_alone_nothing_has_begun() -> None:
    assert model().takes(await model().guide("none", **by(CITY), **after(" \n")), '<think>so</think>{"city": "Oslo"}')


@pytest.mark.parametrize("begun", ["It is", '{"town', '{"city": "Oslo"} '])
async def test_a_message_that_begins_no_such_answer_is_refused(begun: str) -> None:
    refused = await refusal(**by(CITY), **after(begun))
    assert (refused.type, refused.message) == (
        "invalid_request", "response_format: it does not allow the beginning of the answer in the last message."
    )  # fmt: skip


async def test_an_answer_in_several_parts_is_not_gone_on_with() -> None:
    parts = [{"type": "text", "text": "{"}, {"type": "text", "text": '"city"'}]
    assert (await refusal(**by(CITY), **after(parts))).type == "unsupported"


@pytest.mark.parametrize("begun", ["", '{"ci'])
async def test_a_guide_that_is_rewound_allows_what_it_allowed(begun: str) -> None:
    guide = await model().guide("none", **by(CITY), **(after(begun) if begun else {}))
    said = model().tokenizer.encode('ty": "Oslo"}' if begun else '<think>so</think>{"city": "Oslo"}')

    def masks() -> list[bytes]:
        seen = list[bytes]()
        for token in said:
            seen.append(guide.bitmask())
            guide.accept(token)
        return [*seen, guide.bitmask()]

    first = masks()
    guide.reset()
    assert masks() == first
    guide.reset()
    guide.accept(said[0])
    guide.reset()
    assert masks() == first


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"tools": [WEATHER]}])
async def test_an_answer_that_may_be_anything_has_no_guide(fields: dict[str, Any]) -> None:
    assert await model().guides.create(request(**fields), Prompt((1,), "none")) is None


THINK, THOUGHT = 3, 4


async def test_reasoning_goes_before_the_json_and_cannot_end_the_answer() -> None:
    guide = await model().guide("open", **ANY_OBJECT)
    for token in model().tokenizer.encode("Well, {[ hm"):
        assert set(range(1024)) - set(allowed(guide, 1024)) == {EOS, OTHER_EOS}
        guide.accept(token)
    guide.accept(THOUGHT)
    assert model().takes(guide, '\n\n{"a": 1}')


async def test_a_model_that_may_reason_may_also_answer_at_once() -> None:
    assert model().takes(await model().guide("none", **ANY_OBJECT), "{}")
    guide = await model().guide("none", **ANY_OBJECT)
    assert model().takes(guide, "<think>so</think>{}")
    assert THINK not in allowed(guide, 1024)


async def test_reasoning_begins_with_the_first_token_or_not_at_all() -> None:
    guide = await model().guide("none", **ANY_OBJECT)
    assert THINK in allowed(guide, 1024)
    guide.accept(*model().tokenizer.encode("{"))
    assert THINK not in allowed(guide, 1024)


async def test_where_the_prompt_has_closed_the_reasoning_the_json_comes_at_once() -> None:
    assert not model().takes(await model().guide("closed", **ANY_OBJECT), "<think>so</think>{}")


async def test_a_model_without_calls_answers_by_the_schema() -> None:
    assert model("none").takes(await model("none").guide(tools=[WEATHER], **ANY_OBJECT), "{}")


# It compiles, and some twenty tokens later the lexer has had enough of it.
TIRING = by({"type": "string", "pattern": "^(([a-z]{1,9} ){1,9}|.{3,60}[aeiou]){5,40}$"})


def tiring() -> RowGrammar:
    """Return a grammar that exceeds the limits within a stream. The trial of a schema would refuse it."""
    return model().quick_guide(request(**TIRING))


def test_a_guide_that_breaks_says_why_and_ends_the_answer_and_harms_no_other() -> None:
    breaking, other = tiring(), tiring()
    assert walk(breaking, {EOS, OTHER_EOS}, 1024, random.Random(1), [])
    assert breaking.error
    assert breaking.error.reason == TOO_MANY_STATES
    assert not breaking.error.internal
    assert set(allowed(breaking, 1024)) == {EOS, OTHER_EOS}
    later = tiring()
    assert not {EOS, OTHER_EOS} & {*allowed(other, 1024), *allowed(later, 1024)}
    assert other.error is later.error is None


async def test_a_token_that_was_not_allowed_breaks_the_guide() -> None:
    guide = await model().guide(**ANY_OBJECT)
    guide.accept(*model().tokenizer.encode("x"))
    assert guide.error
    assert guide.error.internal
    assert set(allowed(guide, 1024)) == {EOS, OTHER_EOS}


async def test_a_network_may_be_wider_than_its_tokenizer() -> None:
    guides = GrammarStates(model().tokenizer, Vocabulary(model().tokenizer), model().dialect, 1100)
    guide = await guides.create(request(**ANY_OBJECT), Prompt((1,), "open"))
    assert guide
    assert set(allowed(guide, 1100)) == set(range(1100)) - {EOS, OTHER_EOS}
    guide.accept(THOUGHT)
    assert not [token for token in allowed(guide, 1100) if token >= 1024]


LITERALS: list[Schema] = [
    {"properties": {"a": {"const": "<|im_end|>"}}, "required": ["a"]},
    {"properties": {"a": {"const": "see <tool_call> ok"}}, "required": ["a"]},
    {"properties": {"<think>": {"enum": ["</think>"]}}, "required": ["<think>"]},
]


@pytest.mark.parametrize("asked", LITERALS, ids=str)
async def test_words_of_a_schema_may_look_like_markers(asked: Schema) -> None:
    asked = {"type": "object", **asked, "additionalProperties": False}
    for seed in range(5):
        guide = await model().guide(**by(asked))
        tokens = walk(guide, {EOS, OTHER_EOS}, model().count, random.Random(seed), [])
        assert guide.error is None
        written = b"".join(map(Vocabulary(model().tokenizer).bytes_of, tokens)).decode()
        Draft202012Validator(asked).validate(json.loads(written))


@pytest.mark.parametrize("value", ["a\b\f\n\r\tb \x80é", 2**53, -(2**53), True, 1.5])
async def test_what_can_be_written_is_written_as_it_is(value: Any) -> None:
    tokens = walk(await model().guide(**by({"const": value})), {EOS, OTHER_EOS}, 1024, random.Random(1), [])
    assert json.loads(model().said(request(**by({"const": value})), tokens)[0].content) == value


async def test_reasoning_ends_with_its_marker_spelled_out_too() -> None:
    fields: dict[str, Any] = {**ANY_OBJECT, "tools": [WEATHER]}
    guide = await model().guide("open", **fields)
    for token in spelled("so < / </think>"):
        assert token in allowed(guide, 1024)
        guide.accept(token)
    assert model().takes(guide, '\n{"a": 1}')


@pytest.mark.parametrize("spells", [FORCED["hermes"], FORCED["hermes"][:40], '<tool_call>{"name": "weather", "a'])
async def test_a_call_that_reasoning_spells_is_reasoning(spells: str) -> None:
    for answer in ('{"a": 1}', FORCED["hermes"]):
        forced = {"tool_choice": "required"} if answer in FORCED.values() else ANY_OBJECT
        fields: dict[str, Any] = {**forced, "tools": [WEATHER]}
        guide = await model().guide("open", **fields)
        tokens = [*spelled(f"so {spells}</think>\n"), *model().tokenizer.encode(answer)]
        for token in tokens:
            assert token in allowed(guide, 1024)
            guide.accept(token)
        said, _ = model().said(request(**fields), tokens, "open")
        assert said.reasoning == f"so {spells}"
        assert (said.content, len(said.tool_calls)) == (("", 1) if answer in FORCED.values() else (answer, 0))


@settings(deadline=None)
@given(words=st.lists(st.sampled_from(SIGNS), max_size=6), more=st.lists(st.sampled_from(SIGNS), max_size=3))
@pytest.mark.parametrize("format", ["hermes", "mistral", "harmony", "none"])
def test_markers_within_an_answer_by_a_schema_are_content(format: str, words: list[str], more: list[str]) -> None:
    value = {"a": "".join(words), "".join(more) + "b": [1, "".join(more)]}
    before = "<|channel|>final<|message|>" if format == "harmony" else "\n\n"
    for fields in ({}, {"tools": [WEATHER]}):
        tokens = model(format).tokenizer.encode(before) + spelled(json.dumps(value, ensure_ascii=False))
        said, why = model(format).said(request(**ANY_OBJECT, **fields), tokens)
        assert (json.loads(said.content), said.reasoning, said.tool_calls, why) == (value, "", (), "stop")


async def test_harmonys_reasoning_spells_no_marker() -> None:
    spoken = model("harmony")
    guide = await spoken.guide("none", **ANY_OBJECT)
    before = spoken.tokenizer.encode("<|channel|>analysis<|message|>")
    *words, last = [*before, *spelled("so <b> | <|end|>")]
    for token in words:
        assert token in allowed(guide, spoken.count)
        guide.accept(token)
    assert last not in allowed(guide, spoken.count)
