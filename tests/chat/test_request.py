from dataclasses import replace
from typing import Any

import pytest

from schemas import ChatRequest
from worker.chat.request import output_tokens, read_request, sampling_of, seed_of
from worker.errors import JobFailure
from worker.request import Sampling

HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = Sampling(temperature=1.0, seed=7)


def request(*, max_parts: int = 100, **fields: Any) -> ChatRequest:
    return read_request({"messages": HELLO, **fields}, "tiny", max_parts=max_parts)


def refusal(**fields: Any) -> tuple[str, str]:
    with pytest.raises(JobFailure) as raised:
        request(**fields)
    return raised.value.type, raised.value.message


def sampling(generation: dict[str, Any] | None = None, **fields: Any) -> Sampling:
    return sampling_of(request(**fields), generation or {}, vocab=1000, seed=7)


def test_without_a_wish_or_a_generation_config_sampling_is_plain() -> None:
    assert sampling() == PLAIN


def test_the_model_s_own_defaults_hold_where_the_request_is_silent() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}
    assert sampling(config) == replace(PLAIN, temperature=0.6, top_p=0.95, top_k=20, min_p=0.01)


def test_a_wish_wins_over_the_generation_config_also_when_it_is_zero() -> None:
    config = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01}
    assert sampling(config, temperature=0, top_p=1.0, top_k=0, min_p=0) == replace(PLAIN, temperature=0.0)


def test_a_generation_config_may_say_null() -> None:
    assert sampling({"temperature": None, "top_p": None, "top_k": None, "min_p": None}) == PLAIN


def test_a_generation_config_of_temperature_zero_is_greedy() -> None:
    assert sampling({"temperature": 0.0}) == replace(PLAIN, temperature=0.0)


def test_a_generation_config_of_top_p_zero_is_not_off() -> None:
    assert sampling({"top_p": 0}) == replace(PLAIN, top_p=0)


def test_a_model_that_does_not_sample_is_greedy_until_a_temperature_is_asked_for() -> None:
    config = {"do_sample": False, "temperature": 0.6}
    assert sampling(config).temperature == 0.0
    assert sampling(config, temperature=0.8).temperature == 0.8


def test_every_wish_about_sampling_arrives() -> None:
    asked = {
        "temperature": 0.7, "top_p": 0.8, "top_k": 40, "min_p": 0.05,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
    }  # fmt: skip
    wish = sampling(**asked, logit_bias={"12": -100.0, "999": 5.0})
    assert wish == Sampling(**asked, logit_bias=((12, -100.0), (999, 5.0)), seed=7)


def test_the_tokens_that_end_an_answer_are_not_drawn_if_they_are_to_be_ignored() -> None:
    asked = request(ignore_eos=True, logit_bias={"12": 5.0, "3": 1.0})
    assert sampling_of(asked, {}, vocab=1000, seed=7, ends={3, 2}).logit_bias == ((12, 5.0), (3, -100.0), (2, -100.0))
    assert sampling_of(request(), {}, vocab=1000, seed=7, ends={3, 2}).logit_bias == ()


def test_a_bias_on_a_token_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(JobFailure) as raised:
        sampling(logit_bias={"12": 1.0, "1000": 1.0})
    assert (raised.value.type, raised.value.message) == (
        "invalid_request", "logit_bias: token 1000 is not in the vocabulary of 1,000.",
    )  # fmt: skip


def limit(prompt: int, **fields: Any) -> int:
    return output_tokens(request(**fields), prompt=prompt, context=4096, default=1024)


def test_an_answer_is_as_long_as_asked_for() -> None:
    assert limit(100, max_tokens=5) == limit(100, max_completion_tokens=5) == 5


def test_an_answer_of_no_stated_length_gets_the_default() -> None:
    assert limit(100) == 1024


def test_an_answer_of_no_stated_length_on_a_worker_without_a_default_may_fill_the_context() -> None:
    assert output_tokens(request(), prompt=100, context=4096, default=None) == 3996
    assert output_tokens(request(), prompt=100, context=4096, default=None, limit=512) == 512
    assert output_tokens(request(max_tokens=5), prompt=100, context=4096, default=None) == 5


@pytest.mark.parametrize("asked", [{"max_tokens": 10**12}, {}])
def test_an_answer_is_cut_to_what_the_context_leaves(asked: dict[str, int]) -> None:
    assert limit(4000, **asked) == 96
    assert limit(4095, **asked) == 1


@pytest.mark.parametrize("prompt", [4096, 9100])
def test_a_prompt_without_room_for_an_answer_is_refused_in_openai_s_words(prompt: int) -> None:
    with pytest.raises(JobFailure) as raised:
        limit(prompt)
    assert (raised.value.type, raised.value.message) == (
        "too_large",
        f"This model's maximum context length is 4096 tokens. However, your messages resulted in {prompt} tokens. "
        f"Please reduce the length of the messages: the prompt is too long ({prompt} tokens > 4096 maximum) and "
        "exceeds the context window.",
    )


def test_an_answer_longer_than_the_worker_gives_is_told_by_how_much() -> None:
    asked = request(max_tokens=600)
    assert output_tokens(asked, prompt=1, context=4096, default=1024, limit=600) == 600
    with pytest.raises(JobFailure) as raised:
        output_tokens(asked, prompt=1, context=4096, default=1024, limit=512)
    assert (raised.value.type, raised.value.message) == (
        "too_large", "max_tokens: 600 is 88 more than this worker allows; send at most 512.",
    )  # fmt: skip
    assert output_tokens(request(), prompt=1, context=4096, default=1024, limit=512) == 512


def test_texts_images_and_tool_calls_all_count_as_parts() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]},
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "1", "content": "a cat"},
    ]
    request(messages=messages, max_parts=6)
    assert refusal(messages=messages, max_parts=4) == (
        "too_large", "messages: 6 texts, images and tool calls are 2 more than this worker allows. "
        "Please reduce the length of the messages to 4.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("named", "fields"),
    [
        ("specprefill", {"specprefill": True}),
        ("specprefill_keep_pct", {"specprefill_keep_pct": 0.5}),
        ("specprefill, specprefill_keep_pct", {"specprefill": True, "specprefill_keep_pct": 0.5}),
    ],
)
def test_what_the_worker_cannot_do_is_refused_by_name(named: str, fields: dict[str, Any]) -> None:
    assert refusal(**fields) == ("unsupported", f"{named}: this worker has no draft model; leave it out.")


@pytest.mark.parametrize(
    "fields",
    [
        {"specprefill": False},
        {"on_disconnect": "cancel"},
        {"stream": True, "stream_options": {"include_usage": True}, "n": 1, "store": True},
    ],
)
def test_what_asks_for_nothing_special_is_taken(fields: dict[str, Any]) -> None:
    request(**fields)


def test_an_unknown_field_is_refused_with_the_name_that_was_meant() -> None:
    assert refusal(max_token=5) == (
        "invalid_request", "max_token: unknown field; did you mean max_tokens?",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["return_tensors", "return_dict", "truncation", "max_length", "padding", "messages"])
def test_a_template_argument_that_would_change_more_than_the_words_is_refused_by_name(name: str) -> None:
    type, message = refusal(chat_template_kwargs={name: "np"})
    assert type == "invalid_request"
    assert message.startswith("chat_template_kwargs")
    assert name in message


def test_the_served_name_and_no_name_are_taken_and_another_is_refused() -> None:
    assert [request(model="tiny").model, request().model] == ["tiny", None]
    assert refusal(model="huge") == ("invalid_request", "model: this queue serves 'tiny', not 'huge'.")


@pytest.mark.parametrize("body", ["hello", None, 3, [HELLO], {}])
def test_what_is_no_request_is_refused_with_a_sentence(body: Any) -> None:
    with pytest.raises(JobFailure) as raised:
        read_request(body, "tiny", max_parts=100)
    assert raised.value.type == "invalid_request"
    assert raised.value.message.endswith(".")


def test_a_seed_is_the_request_s_own_if_it_has_one() -> None:
    assert [seed_of(request(seed=seed), "a") for seed in (0, 5, -(2**63))] == [0, 5, -(2**63)]


def test_a_drawn_seed_is_the_same_for_every_attempt_at_a_job_and_another_for_another_job() -> None:
    assert seed_of(request(), "job-1") == seed_of(request(temperature=0), "job-1") == 168188595374639
    assert seed_of(request(), "job-2") != seed_of(request(), "job-1")


def test_a_drawn_seed_can_be_sent_back_as_a_seed() -> None:
    drawn = seed_of(request(), "job-1")
    assert drawn == int(float(drawn)) < 2**53, "JavaScript would round it"
    assert seed_of(request(seed=drawn), "another") == drawn


def calls(*arguments: str) -> list[dict[str, Any]]:
    made = [{"id": str(n), "function": {"name": "f", "arguments": text}} for n, text in enumerate(arguments)]
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": made}]


def test_arguments_of_too_many_values_are_refused_by_their_place() -> None:
    type, message = refusal(messages=calls("{}", f"[{'[],' * 16_000}0]"))
    assert type == "too_large"
    assert message.startswith("messages[1].tool_calls[1].function.arguments: it holds 32,001 JSON values")


def test_arguments_count_together_too() -> None:
    with pytest.raises(JobFailure) as raised:
        request(messages=calls(*[f"[{'0,' * 9_000}0]"] * 12))
    assert raised.value.type == "too_large"
    request(messages=calls(*[f"[{'0,' * 9_000}0]"] * 11))


def test_what_strings_in_arguments_hold_does_not_count() -> None:
    request(messages=calls('{"code": "' + "a, [b], {c}, " * 50_000 + '"}'))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 5}, "temperature"),
        ({"model": "other"}, "model"),
        ({"specprefill": True}, "specprefill"),
        ({"max_parts": 0}, "messages"),
        ({"messages": calls(f"[{'[],' * 32_000}0]")}, "messages[1].tool_calls[0].function.arguments"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(JobFailure) as raised:
        request(**fields)
    assert raised.value.param == param


def test_a_refusal_of_a_length_or_a_bias_names_its_field() -> None:
    asked = request(max_completion_tokens=9), request(max_tokens=9)
    for each, param in zip(asked, ("max_completion_tokens", "max_tokens"), strict=True):
        with pytest.raises(JobFailure) as raised:
            output_tokens(each, prompt=1, context=100, default=10, limit=5)
        assert raised.value.param == param
    with pytest.raises(JobFailure) as raised:
        output_tokens(asked[0], prompt=100, context=100, default=10)
    assert raised.value.param == "messages"
    with pytest.raises(JobFailure) as raised:
        sampling(logit_bias={"1000": 1})
    assert raised.value.param == "logit_bias"


def test_only_a_fault_of_the_request_gets_a_field() -> None:
    assert JobFailure("unsupported", "a").about("tools").param == "tools"
    assert JobFailure("unsupported", "a", param="messages").about("tools").param == "messages"
    assert JobFailure("overloaded", "a", retryable=True).about("tools").param is None
