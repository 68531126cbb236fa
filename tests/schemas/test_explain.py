"""Whatever is wrong with a body, a short sentence names a field that is really at fault."""

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from schemas import ChatRequest, explain
from schemas.place import locate, quoted
from tests.schemas.bodies import FULL, HELLO, chat
from tests.schemas.strategies import ANYTHING, JSON, NAMES, mutated

# Half of a surrogate pair, line breaks and characters that turn the line around are in these.
ODD_TEXT = st.text(st.characters(codec=None) | st.sampled_from("\ud800\udfff\n\r\u2028\u202e\x00"), max_size=12)
ODD = st.recursive(
    JSON | ODD_TEXT | st.floats() | st.integers(10**300, 10**400),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(ODD_TEXT, inside, max_size=3),
    max_leaves=6,
)
LONG = "Z" * 300
many = settings(max_examples=400, deadline=None)


def refusal(body: Any) -> str | None:
    """The sentence, or None for a good body."""
    try:
        ChatRequest.model_validate(body)
    except ValidationError as error:
        return explain(error)
    return None


def at_fault(body: dict[str, Any], name: str) -> bool:
    """It is bad beside nothing else, or without it the body is better."""
    alone = {"messages": HELLO, name: body[name]} if name in body else {}
    without = {key: value for key, value in body.items() if key != name} or {"messages": HELLO}
    return bool(refusal(alone)) or refusal({"messages": HELLO, **without}) != refusal(body)


def names_a_culprit(body: Any, sentence: str) -> bool:
    if not isinstance(body, dict):
        return sentence.startswith("the request must be an object")
    ends = (" ", ".", ":", "[")
    named = [name for name in {*body, "messages"} if sentence.startswith(tuple(name + end for end in ends))]
    odd = [name for name in body if sentence.startswith(quoted(name))]
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
        assert "is not a field we know" in sentence or "half of a surrogate pair" in sentence


@many
@given(mutated(st.sampled_from([LONG, {LONG: LONG}, [LONG]]), st.just(LONG)))
def test_no_more_than_a_few_words_of_the_input_are_said_again(body: Any) -> None:
    assert "Z" * 41 not in (refusal(body) or "")


@many
@given(mutated() | mutated(ODD, ODD_TEXT) | ANYTHING)
def test_no_error_of_a_request_is_left_to_the_library_s_words(body: Any) -> None:
    assert "is not valid: " not in (refusal(body) or "")


@pytest.mark.parametrize(
    ("kind", "value", "sentence"),
    [
        (datetime, "x", "the request is not valid: Input should be a valid datetime or date, input is too short."),
        (set[int], 5, "the request is not valid: Input should be a valid set."),
        (tuple[int, int], [1], "the request is not valid: Input should be a valid tuple."),
    ],
)
def test_an_error_that_no_request_can_have_is_explained_all_the_same(kind: Any, value: Any, sentence: str) -> None:
    with pytest.raises(ValidationError) as raised:
        TypeAdapter(kind).validate_python(value, strict=kind is not datetime)
    assert explain(raised.value) == sentence


class Elsewhere(BaseModel):
    messages: list[dict[str, set[int]]]
    when: datetime


def test_an_error_of_another_model_is_located_as_far_as_it_can_be() -> None:
    with pytest.raises(ValidationError) as raised:
        Elsewhere.model_validate({"messages": [{"user": 5}, {"foo": 5}], "when": None})
    assert [locate(error["loc"]).path for error in raised.value.errors()] == ["messages[0]", "messages[1].foo", "when"]
    assert explain(raised.value).startswith("messages[0] is not valid: ")


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
