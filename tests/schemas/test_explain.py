"""For any invalid body, a short sentence names a field that is at fault."""

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from schemas import ChatRequest, explain, field_of
from schemas.base import MAX_CHARACTERS, MAX_VALUES
from schemas.explain import _SENTENCES, locate, short_repr
from tests.schemas.bodies import FULL, HELLO, LOOK, WEATHER, chat
from tests.schemas.strategies import ANYTHING, JSON, NAMES, mutated
from tests.selection import examples

# Half of a surrogate pair, line breaks and characters that turn the line around are in these.
ODD_TEXT = st.text(st.characters(codec=None) | st.sampled_from("\ud800\udfff\n\r\u2028\u202e\x00"), max_size=12)
ODD = st.recursive(
    JSON | ODD_TEXT | st.floats() | st.integers(10**300, 10**400),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(ODD_TEXT, inside, max_size=3),
    max_leaves=6,
)
LONG = "Z" * 300
many = settings(max_examples=examples(400), deadline=None)


def refusal(body: Any) -> str | None:
    """Return the explanation, or None for a valid body."""
    try:
        ChatRequest.model_validate(body)
    except ValidationError as error:
        return explain(error)
    return None


def at_fault(body: dict[str, Any], name: str) -> bool:
    """Return True if the field is invalid alone, or if the explanation changes without it."""
    alone = {"messages": HELLO, name: body[name]} if name in body else {}
    without = {key: value for key, value in body.items() if key != name} or {"messages": HELLO}
    return bool(refusal(alone)) or refusal({"messages": HELLO, **without}) != refusal(body)


def names_a_culprit(body: Any, sentence: str) -> bool:
    if not isinstance(body, dict):
        return sentence.startswith("the request must be an object")
    ends = (" ", ".", ":", "[")
    named = [name for name in {*body, "messages"} if sentence.startswith(tuple(name + end for end in ends))]
    odd = [name for name in body if sentence.startswith(short_repr(name))]
    return any(at_fault(body, name) for name in named + odd)


@many
@given(ANYTHING | mutated() | mutated(names=NAMES))
def test_a_bad_body_gets_one_short_line_that_names_a_field_at_fault(body: Any) -> None:
    sentence = refusal(body)
    if sentence is not None:
        assert len(sentence.splitlines()) == 1
        assert len(sentence) < 600
        assert sentence.endswith((".", "?"))
        assert names_a_culprit(body, sentence), sentence


@many
@given(st.sampled_from(sorted(FULL)), JSON)
def test_the_one_field_that_is_wrong_is_named_first(name: str, value: Any) -> None:
    sentence = refusal({**chat(), name: value})
    if sentence is not None:
        assert sentence.startswith(name)


@many
@given(mutated(ODD, ODD_TEXT) | ODD)
def test_odd_characters_and_numbers_are_explained_too(body: Any) -> None:
    sentence = refusal(body)
    if sentence is not None:
        assert sentence.isprintable()
        assert len(sentence) < 600


@given(ODD_TEXT)
def test_any_name_is_said_on_one_line(name: str) -> None:
    sentence = refusal(chat(**{name: 1})) or ""
    assert sentence.isprintable()
    if name not in ChatRequest.model_fields:
        assert ": unknown field; " in sentence or "half of a surrogate pair" in sentence


@many
@given(mutated(st.sampled_from([LONG, {LONG: LONG}, [LONG]]), st.just(LONG)))
def test_no_more_than_a_few_words_of_the_input_are_said_again(body: Any) -> None:
    assert "Z" * 41 not in (refusal(body) or "")


@many
@given(mutated() | mutated(ODD, ODD_TEXT) | ANYTHING)
def test_no_error_of_a_request_is_left_to_the_library_s_words(body: Any) -> None:
    assert "is not accepted" not in (refusal(body) or "")


@pytest.mark.parametrize(("kind", "value"), [(datetime, "x"), (set[int], 5), (tuple[int, int], [1])])
def test_an_error_that_no_request_can_have_is_explained_without_the_library_s_words(kind: Any, value: Any) -> None:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(kind).validate_python(value, strict=kind is not datetime)
    assert explain(raised.value).startswith("the request")
    assert "is not accepted" in explain(raised.value)
    assert "Input should" not in explain(raised.value)


# What pydantic may raise for each kind of node that a request's model is made of, in strict mode and for JSON.
ERRORS = {
    "any": set(), "chain": set(), "default": set(), "definition-ref": set(), "definitions": set(), "nullable": set(),
    "function-after": {"value_error"}, "function-before": {"value_error", "wrong_type"},
    "function-wrap": {"value_error", "too_long"},
    "bool": {"bool_type"}, "none": {"none_required"}, "literal": {"literal_error"},
    "int": {"int_type", "greater_than_equal", "less_than_equal"},
    "float": {"float_type", "finite_number", "greater_than", "greater_than_equal", "less_than_equal"},
    "str": {"string_type", "string_unicode", "string_too_short", "string_too_long", "string_pattern_mismatch"},
    "list": {"list_type", "too_short", "too_long"}, "dict": {"dict_type", "string_unicode"},
    "model": {"model_type", "model_attributes_type"}, "model-fields": {"missing", "extra_forbidden", "model_type"},
    "model-field": set(), "no-info": set(),
    "tagged-union": {"union_tag_not_found", "union_tag_invalid", "wrong_type", "model_attributes_type"},
}  # fmt: skip


_NOT_VALIDATED = ("serialization", "metadata", "expected", "config", "json_schema_input_schema")


def kinds(node: Any) -> set[str]:
    if isinstance(node, list | tuple):
        return set().union(*map(kinds, node)) if node else set()
    if not isinstance(node, dict):
        return set()
    inside = [value for name, value in node.items() if name not in _NOT_VALIDATED]
    here = {node["type"]} if isinstance(node.get("type"), str) else set()
    return here.union(*map(kinds, inside))


def test_every_error_that_a_request_s_model_can_raise_has_a_sentence_of_ours() -> None:
    found = kinds(ChatRequest.__pydantic_core_schema__)
    assert found <= ERRORS.keys(), "look up in pydantic's documents what it raises for these"
    assert set().union(*(ERRORS[kind] for kind in found)) <= _SENTENCES.keys()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("modalitys", "modalities"), ("modality", "modalities"), ("maxTokens", "max_tokens"), ("tool", "tools"),
        ("reasoning", "reasoning_effort"), ("deadline", "deadline_s"), ("streaming", "stream"),
        ("min_tokens", None), ("top", None), ("length_penalty", None), ("input", None), ("system", None),
        ("prompt", None), ("instructions", None), ("tokens", None),
    ],
)  # fmt: skip
def test_a_hint_names_a_field_that_means_what_was_sent(name: str, meant: str | None) -> None:
    assert (refusal(chat(**{name: 1})) or "").partition("did you mean ")[2].rstrip("?") == (meant or "")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"metadata": {"a\ud800": 1}}, "metadata"),
        ({"metadata": {"a": [{"\ud800": 1}]}}, "metadata"),
        ({"chat_template_kwargs": {"a": {"b": "\udfff"}}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": "\ud800"}}}]},
         "tools[0].function.parameters"),
        ({"functions": [{"name": "f", "parameters": {"\ud800": {}}}]}, "functions[0].parameters"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": {"enum": ["\ud800"]}}}},
         "response_format.json_schema.schema"),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair_is_refused_wherever_it_is(body: dict[str, Any], field: str) -> None:
    said = refusal({"messages": HELLO, **body}) or ""
    assert said.startswith(f"{field} holds half of a surrogate pair")


@pytest.mark.parametrize("field", ["metadata", "chat_template_kwargs"])
def test_an_object_that_is_too_large_is_refused_by_name(field: str) -> None:
    assert refusal(chat(**{field: {"a": [0] * (MAX_VALUES - 2), "b": "x" * (MAX_CHARACTERS - 2)}})) is None
    for large in ({"a": [[]] * MAX_VALUES}, {"a": "x" * MAX_CHARACTERS}, {"x" * (MAX_CHARACTERS + 1): 0}):
        assert (refusal(chat(**{field: large})) or "").startswith(f"{field} holds more than ")


def test_a_bias_on_a_fifth_of_a_vocabulary_is_taken_and_one_more_is_not() -> None:
    assert refusal(chat(logit_bias={str(token): -100 for token in range(50_000)})) is None
    assert (refusal(chat(logit_bias={str(token): -100 for token in range(50_001)})) or "").startswith("logit_bias has")


class Elsewhere(BaseModel):
    messages: list[dict[str, set[int]]]
    when: datetime


def test_an_error_of_another_model_is_located_as_far_as_it_can_be() -> None:
    with pytest.raises(ValidationError) as raised:
        Elsewhere.model_validate({"messages": [{"user": 5}, {"foo": 5}], "when": None})
    assert [locate(error["loc"]).path for error in raised.value.errors()] == ["messages[0]", "messages[1].foo", "when"]
    assert explain(raised.value).startswith("messages[0]: 5 is not accepted")


@pytest.mark.parametrize(
    ("loc", "path"),
    [
        ((), ""),
        (("messages",), "messages"),
        (("messages", 3, "user", "content", "array", 1, "text", "text"), "messages[3].content[1].text"),
        (("messages", 0, "user", "content", "array", 0, "image_url", "image_url"), "messages[0].content[0].image_url"),
        (("messages", 0, "tool", "content", "string"), "messages[0].content"),
        (("messages", 0, "assistant", "tool_calls", 2, "function", "name"), "messages[0].tool_calls[2].function.name"),
        (("response_format", "json_schema", "json_schema", "schema"), "response_format.json_schema.schema"),
        (("tools", 0, "function", "parameters"), "tools[0].function.parameters"),
        (("tool_choice", "string"), "tool_choice"),
        (("tool_choice", "object", "function", "name"), "tool_choice.function.name"),
        (("logit_bias", "5"), "logit_bias.5"),
        (("stop", 2), "stop[2]"),
        (("a b",), "'a b'"),
        (("metadata", "a b"), "metadata.'a b'"),
    ],
)  # fmt: skip
def test_a_place_is_written_as_the_sender_would_write_it(loc: tuple[int | str, ...], path: str) -> None:
    assert locate(loc).path == path


@pytest.mark.parametrize(
    ("loc", "field"),
    [
        ((), "temperature"),
        (("messages", 0, "tool"), "tool_call_id"),
        (("messages", 0, "user", "content", "array", 0, "text"), "text"),
        (("response_format", "json_schema", "json_schema"), "schema"),
        (("tools", 0, "function"), "parameters"),
        (("stream_options",), "include_usage"),
    ],
)
def test_a_place_knows_the_fields_that_belong_there(loc: tuple[int | str, ...], field: str) -> None:
    assert field in locate(loc).known


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": HELLO, "temperature": 5}, "temperature"),
        ({"messages": HELLO, "mood": 1}, "mood"),
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "nobody", "content": ""}]}, "messages[0].role"),
        ({"messages": HELLO, "response_format": {"type": "json"}}, "response_format.type"),
        ({"messages": HELLO, "tool_choice": "required"}, "tool_choice"),
        ({"messages": HELLO, "tools": [WEATHER], "tool_choice": LOOK}, "tool_choice"),
        ({"messages": HELLO, "tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.type"),
        ({"messages": HELLO, "tool_choice": "some"}, "tool_choice"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"messages": HELLO, "functions": [], "function_call": {"name": "x"}}, "function_call"),
        (
            {"messages": HELLO, "verbosity": "low", "chat_template_kwargs": {"verbosity": "high"}},
            "verbosity",
        ),
        ([], None),
    ],
)
def test_the_field_of_an_error_is_that_of_its_first_sentence(body: Any, field: str | None) -> None:
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate(body)
    assert field_of(raised.value) == field
    assert explain(raised.value).startswith(field or "the request")
