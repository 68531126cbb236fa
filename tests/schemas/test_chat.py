"""Valid requests are accepted, and invalid ones are refused with an explanation."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from schemas import ChatCompletion, ChatRequest, explain
from tests.schemas.bodies import ACCEPTED, FULL, HELLO, LOOK, REFUSED, chat


def errors(body: Any) -> list[str]:
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate(body)
    return [error["type"] for error in raised.value.errors()]


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_body_of_openai_is_taken(name: str) -> None:
    ChatRequest.model_validate(ACCEPTED[name])


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_body_gets_its_sentence(name: str) -> None:
    body, sentence = REFUSED[name]
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate(body)
    assert explain(raised.value) == sentence


def test_the_full_body_uses_every_field() -> None:
    assert set(FULL) == set(ChatRequest.model_fields)


@pytest.mark.parametrize("name", sorted(set(ChatRequest.model_fields) - {"messages"}))
def test_null_means_the_same_as_absent(name: str) -> None:
    assert ChatRequest.model_validate(chat(**{name: None})) == ChatRequest.model_validate(chat())


@pytest.mark.parametrize("name", sorted(ChatRequest.model_fields))
def test_a_name_with_one_letter_too_many_is_answered_with_the_right_one(name: str) -> None:
    with pytest.raises(ValidationError) as raised:
        ChatRequest.model_validate(chat(**{f"{name}s": None}))
    assert explain(raised.value).startswith(f"{name}s: unknown field; did you mean ")


def test_what_is_read_is_what_was_sent() -> None:
    read = ChatRequest.model_validate(FULL).model_dump(by_alias=True, exclude_unset=True)
    assert read == FULL


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert ChatRequest.model_validate(chat(stop="END")).stop == ["END"]


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, None), ({"max_tokens": 3}, 3), ({"max_completion_tokens": 4}, 4)],
)
def test_either_limit_is_the_limit(fields: dict[str, Any], limit: int | None) -> None:
    assert ChatRequest.model_validate(chat(**fields)).output_limit == limit


@pytest.mark.parametrize(
    ("fields", "effective_tenant"),
    [
        ({}, None),
        ({"user": "ada"}, "ada"),
        ({"tenant": "acme"}, "acme"),
        ({"tenant": "acme", "safety_identifier": "u-1", "user": "ada"}, "acme"),
        ({"safety_identifier": "u-1", "user": "ada"}, "u-1"),
    ],
)
def test_the_safety_identifier_or_the_user_is_the_tenant_if_none_is_given(
    fields: dict[str, Any], effective_tenant: str | None
) -> None:
    assert ChatRequest.model_validate(chat(**fields)).effective_tenant == effective_tenant


def test_the_message_of_a_result_can_be_sent_back() -> None:
    sent = json.dumps(
        {
            "id": "a", "created": 1, "model": "m", "system_fingerprint": "f",
            "choices": [{
                "message": {"content": "Hi", "reasoning": "Greet.", "refusal": None, "tool_calls": []},
                "finish_reason": "stop",
            }],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, "prompt_tokens_details": {}},
            "sluice": {
                "lane": "batch", "worker": "w", "attempt": 1, "seed": 1, "fingerprint": "f", "rows_mean": 1.0,
                "timings": dict.fromkeys(("queue_s", "prefill_s", "ttft_s", "decode_s", "tokens_per_s"), 0.0),
            },
        }
    )  # fmt: skip
    said = ChatCompletion.model_validate_json(sent).model_dump()["choices"][0]["message"]
    ChatRequest.model_validate({"messages": [*HELLO, said]})


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [1] * 5000},
        {"messages": [{"role": "user", "content": [1] * 5000}]},
        chat(stop=[1] * 5000),
        chat(tools=[1] * 5000),
        chat(tools=[{**LOOK, "x": 1}] * 5000),
        chat(logit_bias={f"k{i}": 1 for i in range(5000)}),
        chat(**{f"k{i}": 1 for i in range(5000)}),
        {"messages": [dict.fromkeys(map(str, range(5000)), 1) | HELLO[0]]},
    ],
)
def test_a_body_that_is_wrong_all_over_does_not_cost_an_error_an_entry(body: Any) -> None:
    assert len(errors(body)) < 5
