"""mlx-lm's tokenizer behind the face that `worker.text` knows."""

from typing import Any

import pytest

from scripts.stack import TINY_CHAT
from worker.engine.upstream import load_tokenizer
from worker.engine.words import Words

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def wrapper() -> Any:
    return load_tokenizer(TINY_CHAT)


def render(words: Words, **given: Any) -> str:
    return words.render(HELLO, **{"tools": [], "continues": False, "variables": {}, **given})


def test_the_tiny_model_s_words_are_told_as_they_are(wrapper: Any) -> None:
    words = Words(wrapper)
    assert (words.think, words.tool) == (("<think>", "</think>"), ("<tool_call>", "</tool_call>"))
    assert (words.tool_format, words.byte_level, words.eos_token_ids) == ("json_tools", True, {2})
    assert words.tokens[5] == "<tool_call>"
    assert words.encode("<|im_end|>") == [2]
    assert words.definition is not None
    assert "Two user messages in a row" in words.template


def test_a_template_hears_of_thinking_only_what_the_request_says(wrapper: Any) -> None:
    wrapper._tokenizer.chat_template = "{{ enable_thinking is defined }} {{ enable_thinking }}"
    words = Words(wrapper)
    assert render(words) == "False "
    assert render(words, variables={"enable_thinking": False}) == "True False"


def test_a_template_that_calls_it_otherwise_is_told_in_its_own_word(wrapper: Any) -> None:
    wrapper._thinking_kwarg = "thinking"  # as mlx-lm infers it from a tokenizer with a renderer of its own
    wrapper._tokenizer.chat_template = "{{ thinking }}"
    assert render(Words(wrapper), variables={"enable_thinking": True}) == "True"


def test_a_template_in_python_is_called_as_mlx_lm_calls_it(wrapper: Any) -> None:
    called: list[dict[str, Any]] = []

    def template(conversation: Any, **how: Any) -> str:
        called.append(how)
        return "rendered"

    wrapper._chat_template = template
    assert render(Words(wrapper), continues=True) == "rendered"
    assert called == [{"add_generation_prompt": False, "continue_final_message": True, "enable_thinking": True}]


def test_tools_reach_the_template_and_none_are_none(wrapper: Any) -> None:
    wrapper._tokenizer.chat_template = "{{ tools[0].function.name if tools is not none else 'nothing' }}"
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    words = Words(wrapper)
    assert (render(words, tools=[tool]), render(words)) == ("look", "nothing")


def test_a_turn_that_is_gone_on_with_stays_open(wrapper: Any) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Good mor"}]
    text = Words(wrapper).render(begun, tools=[], continues=True, variables={})
    assert text.endswith("<|im_start|>assistant\nGood mor")


def test_calls_are_read_by_the_model_s_parser_as_a_list(wrapper: Any) -> None:
    words = Words(wrapper)
    call = {"name": "look", "arguments": {"at": "me"}}
    assert words.parse_tool_call('{"name": "look", "arguments": {"at": "me"}}', []) == [call]
    with pytest.raises(ValueError, match="Expecting value"):
        words.parse_tool_call("no call", [])


def test_a_splitter_goes_by_the_model_s_markers_or_by_those_it_is_given(wrapper: Any) -> None:
    words = Words(wrapper)
    inferred = words.splitter("reasoning")
    assert inferred.feed("hm</think>x<") == [("reasoning", "hm"), ("normal", "x")]
    assert inferred.flush() == ("normal", "<")
    given = words.splitter("normal", {"normal": [("|", "other")], "other": []})
    assert given.feed("a|b<think>") == [("normal", "a"), ("other", "b<think>")]
