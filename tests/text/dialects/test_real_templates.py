"""The dialects of real models' chat templates. They are fetched, so the tests run with `--all` alone."""

import json
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from tests.text.dialects.families import FOUND
from tests.text.dialects.reading import BY_NAME
from tests.text.dialects.real_templates import TemplateTokenizer, fetch, tokenizer
from tests.text.real_tokenizers import fetch_tokenizers, opened
from worker.engine.tokenizer import MLXTokenizer
from worker.text.grammar.lark import Grammar
from worker.text.grammar.tool_grammars import HeldFunction, tool_calls
from worker.text.output.formats import ModelFormat, _rendered
from worker.text.prompt.template_inputs import TemplateInputs

pytestmark = [pytest.mark.registry, pytest.mark.slow]


@pytest.fixture(scope="module")
def templates(pytestconfig: pytest.Config) -> dict[str, str]:
    assert pytestconfig.cache is not None
    return fetch(pytestconfig.cache.mkdir("chat_templates"))


def test_each_template_is_in_the_table(templates: dict[str, str]) -> None:
    assert {name for name in templates if "training" not in name} == set(FOUND)


def test_a_dialect_has_markers_of_one_token_and_of_several(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.cache is not None
    folders = fetch_tokenizers(pytestconfig.cache.mkdir("tokenizers"))
    alone = {"qwen3": "<tool_call>", "deepseek_v3": "<｜tool▁call▁begin｜>", "tekken": "[TOOL_CALLS]"}
    spelled = {"qwen3": "<function=", "deepseek_v3": "</think>", "tekken": "[ARGS]", "gemma3": "<start_function_call>"}
    for name, marker in alone.items():  # a text about the marker has its token
        model = MLXTokenizer(opened(folders[name]))
        assert model.added_tokens[marker] in model.encode(f"The tag {marker} starts a call.")
    for name, marker in spelled.items():
        model = MLXTokenizer(opened(folders[name]))
        assert marker not in model.added_tokens
        assert len(model.encode(marker)) > 1


def test_the_dialect_of_each_template_is_found(templates: dict[str, str]) -> None:
    for name, expected in FOUND.items():
        found = ModelFormat.of(tokenizer(templates[name]))
        dialect = "harmony" if found.harmony else found.dialect and found.dialect.name
        thoughts = found.thoughts.begin if found.thoughts else ""
        assert (dialect or "", found.proof, thoughts) == expected, name


CLOSINGS = {
    "llama-cpp-python: Qwen-Qwen3-0.6B": ("\n", "\n\n"),
    "llama-cpp-python: deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("\n", "\n\n"),  # it writes no thoughts
    "llama-cpp-python: GLM-4.6": ("", "\n"),
    "llama-cpp-python: ByteDance-Seed-OSS": ("", "\n"),
    "llama-cpp-python: google-gemma-4-31B-it": ("\n", ""),  # it writes them before calls alone
    "llama-cpp-python: Kimi-K3": ("", ""),
}


def test_thoughts_end_with_the_white_space_that_the_template_writes(templates: dict[str, str]) -> None:
    found = {name: ModelFormat.of(tokenizer(templates[name])).thoughts for name in CLOSINGS}
    assert {name: thoughts and thoughts.closing for name, thoughts in found.items()} == CLOSINGS


# What each effort does: of templates that refuse others, that treat others as their default, and that write any.
EFFORTS = {
    "llama-cpp-python: tencent-Hy3": {"none": "no_think", "minimal": "low", "medium": "high", "max": "high"},
    "llama-cpp-python: upstage-Solar-Open-100B": {"none": "minimal", "medium": "high", "xhigh": "high"},
    "llama-cpp-python: openai-gpt-oss-120b": {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"},
    "trl: qwen3_8": {"minimal": "low", "high": "xhigh", "max": "xhigh"},
    "llama-cpp-python: deepseek-ai-DeepSeek-V4-Flash-0731": {"low": "low", "xhigh": "xhigh"},
}


def test_an_effort_is_the_nearest_that_the_template_knows(templates: dict[str, str]) -> None:
    for name, expected in EFFORTS.items():
        inputs = TemplateInputs(templates[name])
        given = {each: inputs.known([], {"reasoning_effort": each})[1]["reasoning_effort"] for each in expected}
        assert given == expected, name


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "flag": {"type": "boolean"},
        "none": {"type": "null"},
        "list": {"type": "array", "items": {"type": ["string", "boolean", "integer"]}},
        "more": {"type": "object", "properties": {"k": {"type": ["string", "null"]}, "x": {"type": "string"}}},
        "ratio": {"type": "number"},
    },
    "required": ["city"],
}
ARGUMENTS = {
    "city": "Oslo", "days": 7, "flag": True, "none": None, "list": ["a", True, 2], "more": {"k": None, "x": "y"},
    "ratio": 1.5,
}  # fmt: skip
ALSO_WRITTEN = {"axolotl: llama4"}  # an empty answer in Python before the calls


def test_what_each_template_writes_is_allowed_when_a_call_is_forced(templates: dict[str, str]) -> None:
    for name, (dialect, proof, _) in FOUND.items():
        if dialect and dialect != "harmony" and proof == "read back" and name not in ALSO_WRITTEN:
            written = _written(tokenizer(templates[name]))
            assert any(_allows(dialect, text) for text in written), (name, written)


def _written(words: TemplateTokenizer) -> list[str]:
    """Return what a template writes for one and for two calls, with ids as it demands them."""
    question, found = {"role": "user", "content": "Questionq7"}, list[str]()
    given: tuple[Callable[[Any], Any], ...] = (dict, json.dumps)  # some templates demand text
    for ids, as_demanded, count in product((("call_1", "call_2"), ("a1b2c3d4e", "b1b2c3d4e")), given, (2, 1)):
        calls = [
            {"type": "function", "id": id, "function": {"name": function, "arguments": as_demanded(arguments)}}
            for id, (function, arguments) in zip(ids, [("weather", ARGUMENTS), ("now", {})][:count], strict=False)
        ]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": "Resultq7"}
            for call in calls
        ]
        text = _rendered(words, [question, {"role": "assistant", "content": "", "tool_calls": calls}, *results])
        if text and "Resultq7" in text:
            found.append(text.rpartition("Questionq7")[2].partition("Resultq7")[0])
    return found


def _allows(dialect: str, text: str) -> bool:
    """True if the grammar allows the text from one of the markers, or brackets, up to a place that ends the calls."""
    row = BY_NAME[dialect]
    begins = {place for sign in (*row.openings, *row.bare) if (place := text.find(sign)) >= 0}
    return any(_allows_all(dialect, text[place:].encode()) for place in begins or {0})


def _allows_all(dialect: str, given: bytes) -> bool:
    grammar, functions = Grammar({}), [HeldFunction("weather", SCHEMA), HeldFunction("now")]
    matcher = LLMatcher(
        LLTokenizer("byte"), grammar.starting_with(tool_calls(BY_NAME[dialect], grammar, functions, True)), log_level=0
    )
    taken = matcher.try_consume_tokens([*given])
    while taken and not matcher.is_accepting():
        matcher.rollback(1)
        taken -= 1
    return taken > 0 and all(sign.encode() not in given[taken:] for sign in ("weather(", '"city"', "days"))
