import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text import speech
from tests.text.speech import ANSWERS, ENGINES, PLACES, REQUESTS, THINKING, TOOLS, Heard, Model, hear, heard, output
from worker.text.dialects.cursor import Cursor
from worker.text.output.output import OutputDelta, concat

TINY = speech.model()
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@given(ANSWERS, PLACES, THINKING, ENGINES, REQUESTS)
def test_how_the_text_is_cut_into_tokens_does_not_change_what_comes_out(
    answer: tuple[Model, str], places: list[int], thinking: str, engine: str, fields: dict[str, Any]
) -> None:
    speaker, text = answer
    whole, by_pieces = [
        hear(output(speaker, thinking, **fields), tokens, engine)
        for tokens in (speaker.words.encode(text), speech.cut(speaker, text, places))
    ]
    assert by_pieces == whole


@given(ANSWERS, st.lists(st.integers(0, 1100), max_size=30), st.randoms(), THINKING, ENGINES, REQUESTS)
def test_no_tokens_make_it_fail(
    answer: tuple[Model, str], ids: list[int], dice: Random, thinking: str, engine: str, fields: dict[str, Any]
) -> None:
    speaker, text = answer
    tokens = [*speaker.words.encode(text), *ids]
    dice.shuffle(tokens)
    said = hear(output(speaker, thinking, **fields), tokens, engine).said
    json.dumps([said.content, said.reasoning, said.tool_calls], ensure_ascii=False).encode()


@given(ANSWERS.filter(lambda answer: not any(mark in answer[1] for mark in ("think", "<|"))), ENGINES)
def test_an_answer_without_markers_comes_out_as_it_is(answer: tuple[Model, str], engine: str) -> None:
    speaker, text = answer
    assert heard(speaker, text, engine=engine) == Heard(OutputDelta(text), engine)


@given(st.lists(st.sampled_from(["word", " ", "\n", " more"])).map("".join))
def test_whitespace_of_an_answer_with_tools_is_its_own_where_no_call_follows(text: str) -> None:
    assert heard(TINY, text, tools=TOOLS).said == OutputDelta(text)


@pytest.mark.parametrize(
    ("thinking", "text", "said"),
    [
        ("none", "<think>\nHm.\n</think>\n\nOslo. \n", OutputDelta("Oslo. \n", "Hm.")),
        ("none", "\n<think>Hm.", OutputDelta("", "Hm.")),
        ("open", "\nHm, \n so.\n</think>\n\nOslo.", OutputDelta("Oslo.", "Hm, \n so.")),
        ("open", "<think>\nHm.</think>Oslo.", OutputDelta("Oslo.", "Hm.")),
        ("open", "Hm. It never ends \n", OutputDelta("", "Hm. It never ends \n")),
        ("open", "</think>Oslo.", OutputDelta("Oslo.")),
        ("closed", "\n Oslo.", OutputDelta("\n Oslo.")),
        ("closed", "No.<think>Hm.</think>", OutputDelta("No.<think>Hm.</think>")),
        ("closed", "<think>Hm.</think>No.", OutputDelta("No.", "Hm.")),
        ("open", "Hm.</think>The tag <think> is a tag.", OutputDelta("The tag <think> is a tag.", "Hm.")),
        (
            "none",
            "One \n<think>a</think>\n two <think>b</think>\n",
            OutputDelta("One \n\n two <think>b</think>\n", "a"),
        ),
        ("none", "<think> </think> ", OutputDelta()),
        ("none", "\u3000<think>\u3000a</think>\u3000b", OutputDelta("\u3000\u3000b", "\u3000a")),
    ],
)
def test_reasoning_and_content_are_apart(thinking: str, text: str, said: OutputDelta) -> None:
    assert heard(TINY, text, thinking).said == said


def test_thoughts_that_the_prompt_broke_off_go_on_with_their_own_space() -> None:
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>Let me"}]
    assert heard(TINY, " see.</think> Yes.", "open", messages=begun).said == OutputDelta("Yes.", " see.")


def test_text_comes_out_with_its_token_but_for_what_may_be_of_a_marker() -> None:
    answer = output(TINY, "open")
    pieces = ["H", "m", " ", "<", "b", "</think>", "\n", "Y", " "]
    said = [answer.feed(*TINY.words.encode(piece)) for piece in pieces]
    assert [one.reasoning for one in said] == ["H", "m", "", "", " <b", "", "", "", ""]
    assert [one.content for one in said] == ["", "", "", "", "", "", "", "Y", ""]
    assert answer.flush() == OutputDelta(" ")


def test_a_model_without_markers_needs_no_reader() -> None:
    plain = replace(TINY.dialect, thoughts=None)
    assert plain.reader(Cursor(), "none", None, only_before_content=False) is None
    assert plain.reader(Cursor(), "none", {}, only_before_content=False) is not None


# Stop strings


@pytest.mark.parametrize(
    ("text", "stop", "said"),
    [
        ("at the end, no", ["the end"], OutputDelta("at ")),
        ("one\n\ntwo", ["\n\n"], OutputDelta("one")),
        ("<think>the end</think>\n\nat \nthe end", ["the end"], OutputDelta("at \n", "the end")),
        ("<think>Hm.</think>\n\nOslo.\n\nMore", ["\n\n"], OutputDelta("Oslo.", "Hm.")),
        (f"at {WEATHER} the end", ["Oslo", "arguments"], OutputDelta("at  the end")),
        ("the<think>Hm.</think>end", ["theend"], OutputDelta("theend", "Hm.")),
    ],
)
def test_stop_strings_look_at_the_content_alone(text: str, stop: list[str], said: OutputDelta) -> None:
    whole = heard(TINY, text, stop=stop, tools=TOOLS)
    assert OutputDelta(whole.said.content, whole.said.reasoning) == said


@given(ANSWERS, PLACES, st.lists(st.sampled_from(["END", "\n\n", "12", "a"]), min_size=1, max_size=3), st.booleans())
def test_a_stop_string_is_never_let_out_of_one_stretch_of_content(
    answer: tuple[Model, str], places: list[int], stops: list[str], tools: bool
) -> None:
    speaker, text = answer
    if any(mark in text for mark in ("think", "<|")):  # a marker may stand within
        return
    said = hear(output(speaker, stop=stops, tools=TOOLS if tools else None), speech.cut(speaker, text, places))
    if not said.calls:
        assert [stop for stop in stops if stop in said.said.content] == []


def test_a_stop_string_may_lie_across_tokens_and_nothing_comes_after_it() -> None:
    answer = output(TINY, stop=["the end"])
    said = [answer.feed(token) for token in speech.cut(TINY, "at the end, no", [1, 2, 3, 5, 8])]
    assert "".join(one.content for one in said) == "at "
    assert answer.stopped
    assert answer.flush() == OutputDelta()
    assert answer.finish_reason("stop") == "stop"


@pytest.mark.parametrize(
    ("text", "fields", "stop_sequence"),
    [
        ("one END two", {"stop": ["two", "END"]}, "END"),
        ("one END", {"stop": "STOP"}, None),
        ("<think>END</think>Oslo.", {"stop": "END"}, None),
        (f"{WEATHER}{WEATHER}", {"parallel_tool_calls": False}, None),
        (f"{WEATHER} END", {"stop": "END"}, "END"),
    ],
)
def test_the_stop_sequence_is_the_stop_string_that_ended_the_content(
    text: str, fields: dict[str, Any], stop_sequence: str | None
) -> None:
    answer = output(TINY, **{"tools": TOOLS, **fields})
    for token in TINY.words.encode(text):
        answer.feed(token)
    answer.flush()
    assert answer.stop_sequence == stop_sequence


def test_a_stop_string_that_the_end_completes_is_not_let_out() -> None:
    half_a_smile = [token for token in range(1024) if TINY.vocabulary.bytes_of(token) in (b"\xf0", b"\x9f")]
    answer = output(TINY, stop=["\ufffd"])
    assert [answer.feed(token) for token in (*TINY.words.encode("a"), half_a_smile[0])] == [
        OutputDelta("a"),
        OutputDelta(),
    ]
    assert answer.flush() == OutputDelta()
    assert answer.stopped


# Endings


@pytest.mark.parametrize(
    ("text", "engine", "fields", "finish_reason"),
    [
        ("Oslo.", "stop", {}, "stop"),
        ("Oslo.", "length", {}, "length"),
        (WEATHER, "stop", {}, "tool_calls"),
        (f"{WEATHER} and so", "stop", {}, "tool_calls"),
        (f"{WEATHER} and so", "length", {}, "length"),
        (f"{WEATHER} END", "stop", {"stop": "END"}, "tool_calls"),
        ("END", "stop", {"stop": "END"}, "stop"),
        (f"END {WEATHER}", "stop", {"stop": "END"}, "stop"),
        (f"{WEATHER}{WEATHER}", "length", {"parallel_tool_calls": False}, "tool_calls"),
        (WEATHER.replace("}", ""), "stop", {}, "tool_calls"),
        (WEATHER.replace("weather", "unknown"), "stop", {}, "tool_calls"),
        (WEATHER.replace("name", "names"), "stop", {}, "stop"),
        (WEATHER, "stop", {"tool_choice": "none"}, "stop"),
        (WEATHER[:60], "length", {}, "length"),
    ],
)
def test_the_finish_reason_is_a_call_only_where_a_whole_one_was_made(
    text: str, engine: str, fields: dict[str, Any], finish_reason: str
) -> None:
    assert heard(TINY, text, engine=engine, **{"tools": TOOLS, **fields}).finish_reason == finish_reason


@given(st.lists(st.builds(OutputDelta, st.text(max_size=2), st.text(max_size=2)), max_size=5))
def test_parts_put_together_at_once_are_their_sum(parts: list[OutputDelta]) -> None:
    assert concat(parts) == sum(parts, OutputDelta())


def test_fragments_of_a_call_put_together_are_one_call() -> None:
    first = {"index": 0, "id": "x", "type": "function", "function": {"name": "now", "arguments": "{"}}
    more = {"index": 0, "function": {"arguments": "}"}}
    whole = {"index": 0, "id": "x", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    parts = [
        OutputDelta("a"),
        OutputDelta(tool_calls=(first,)),
        OutputDelta(tool_calls=(more,)),
        OutputDelta(reasoning="b"),
    ]
    assert concat(parts) == sum(parts, OutputDelta()) == OutputDelta("a", "b", (whole,))
    assert [bool(one) for one in (*parts, OutputDelta())] == [True, True, True, True, False]
