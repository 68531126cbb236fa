from typing import Any

import pytest

from tests.text.speech import TOOLS, Heard, cut, gpt_oss, hear, heard, output
from worker.text.output.output import OutputDelta, concat

GPT_OSS = gpt_oss()
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALL = '{"city": "Oslo"}'
OSLO = {"name": "weather", "arguments": CALL}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{THOUGHT}<|channel|>final<|message|>Oslo.", OutputDelta("Oslo.", "Hm.")),
        (f"{THOUGHT}<|channel|>final<|message|>Oslo.<|return|>", OutputDelta("Oslo.", "Hm.")),
        ("<|channel|>final<|message|> Oslo. ", OutputDelta("Oslo. ")),
        ("<|channel|>analysis<|message|>Hm, and never", OutputDelta("", "Hm, and never")),
        (f"{THOUGHT}<|channel|>commentary<|message|>Let me look.<|end|>", OutputDelta("Let me look.", "Hm.")),
        (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>Oslo.", OutputDelta("Oslo.", "Hm.\n\nHm.")),
        (
            "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant<|channel|>final<|message|>Oslo.",
            OutputDelta("Wait.\n\nOslo."),
        ),
        ("<|channel|>final <|constrain|>json<|message|>{}", OutputDelta("{}")),
        ("<|message|>No header.", OutputDelta("No header.")),
        ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Oslo.", OutputDelta("Oslo.", "Hm.")),
        ("<|channel|>final<|message|>One <|message|>and.", OutputDelta("One and.")),
        ("<|channel|>fin", OutputDelta()),
        ("", OutputDelta()),
    ],
)
def test_analysis_is_reasoning_and_the_rest_is_content(text: str, said: OutputDelta) -> None:
    assert heard(GPT_OSS, text).said == said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<|channel|>final to=user<|message|>It is 12 degrees.", OutputDelta("It is 12 degrees.")),
        ("<|channel|>analysis to=self<|message|>Hm.", OutputDelta("", "Hm.")),
        ("<|channel|>commentary to=assistant<|message|>Let me see.", OutputDelta("Let me see.")),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>functions.weather to=assistant<|channel|>commentary"
            '<|message|>{"made": "up"}<|end|><|start|>assistant<|channel|>final<|message|>Oslo.',
            OutputDelta("Oslo.", 'Hm.\n\n{"made": "up"}'),
        ),
    ],
)
def test_a_message_to_or_by_a_role_is_no_call(text: str, said: OutputDelta) -> None:
    for tools in ({}, {"tools": TOOLS}):
        assert heard(GPT_OSS, text, **tools).said == said


def test_a_function_in_place_of_the_role_is_called() -> None:
    text = f"{THOUGHT.removesuffix('assistant')}weather<|channel|>commentary<|message|>{CALL}"
    said = heard(GPT_OSS, text, tools=TOOLS)
    assert (said.calls, said.said.content, said.said.reasoning) == ([OSLO], "", "Hm.")


@pytest.mark.parametrize("text", [" and so on. ", "assist", "assistant: yes", " to", "token by token", "{}", " \n"])
def test_an_answer_without_a_header_is_content(text: str) -> None:
    assert heard(GPT_OSS, text).said == OutputDelta(text)


def test_an_answer_without_a_header_is_not_held_back_for_long() -> None:
    answer = output(GPT_OSS)
    said = [answer.feed(token).content for token in cut(GPT_OSS, "assume that", range(20))]
    assert said == ["", "", "", "assu", "m", "e", "", " t", "h", "a", "t"]
    header_like = "assistant " + "word " * 60
    assert hear(output(GPT_OSS), GPT_OSS.words.encode(header_like)).said == OutputDelta(header_like)


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        " to=functions.weather<|channel|>commentary json<|message|>",
        "<|channel|>commentary to=functions.weather<|message|>",
        "<|channel|>commentary to=weather code<|message|>",
        "<|channel|>analysis to=functions.weather<|message|>",
    ],
)
@pytest.mark.parametrize("end", ["", "<|call|>", "<|end|>"])
@pytest.mark.parametrize("before", ["", THOUGHT])
def test_a_recipient_makes_a_tool_call(header: str, end: str, before: str) -> None:
    said = heard(GPT_OSS, f"{before}{header}{CALL}{end}", tools=TOOLS)
    assert said.calls == [OSLO]
    assert (said.said.content, said.said.reasoning) == ("", "Hm." if before else "")
    assert said.finish_reason == "tool_calls"


def test_arguments_come_as_they_are_written() -> None:
    answer = output(GPT_OSS, tools=TOOLS)
    header = "<|channel|>commentary to=functions.weather<|message|>"
    begun = concat(answer.feed(token) for token in GPT_OSS.words.encode(header))
    assert [delta["function"] for delta in begun.tool_calls] == [{"name": "weather", "arguments": ""}]
    said = [answer.feed(token) for token in cut(GPT_OSS, CALL, range(20))]
    pieces = [one.tool_calls[0]["function"]["arguments"] for one in said if one]
    assert "".join(pieces) == CALL


def test_two_calls_with_words_before_them() -> None:
    first = f"<|channel|>commentary to=functions.weather<|message|>{CALL}<|call|>"
    second = "<|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>"
    text = f"<|channel|>commentary<|message|>Let me look. <|end|><|start|>assistant{first}{second}"
    said = heard(GPT_OSS, text, tools=TOOLS)
    assert said.said.content == "Let me look."
    assert said.calls == [OSLO, {"name": "now", "arguments": "{}"}]
    only = heard(GPT_OSS, text, tools=TOOLS, parallel_tool_calls=False)
    assert (only.calls, only.finish_reason) == ([OSLO], "tool_calls")


@pytest.mark.parametrize(
    ("call", "function", "arguments"),
    [
        ("<|channel|>commentary to=functions.storm<|message|>{}<|call|>", "storm", "{}"),
        ("<|channel|>analysis to=python code<|message|>print(1)<|call|>", "python", "print(1)"),
        ("<|channel|>commentary to=functions.weather<|message|>[]", "weather", "[]"),
        ('<|channel|>commentary to=functions.weather<|message|>{"a" 1}<|end|>', "weather", '{"a" 1}'),
    ],
)
def test_a_call_that_is_wrong_is_a_call(call: str, function: str, arguments: str) -> None:
    said = heard(GPT_OSS, call, tools=TOOLS)
    assert (said.said.content, said.calls) == ("", [{"name": function, "arguments": arguments}])
    assert said.finish_reason == "tool_calls"


@pytest.mark.parametrize(("fields", "calls"), [({}, True), ({"tools": TOOLS, "tool_choice": "none"}, False)])
def test_a_request_without_tools_gets_the_text_and_one_that_allows_no_calls_nothing(
    fields: dict[str, Any], calls: bool
) -> None:
    call = f"<|channel|>commentary to=functions.weather<|message|>{CALL}<|call|>"
    assert heard(GPT_OSS, call, **fields) == Heard(OutputDelta(call * calls), "stop")
    after = heard(GPT_OSS, f"{THOUGHT}{call}<|start|>assistant<|channel|>final<|message|>So.", **fields).said
    assert (after.content, after.reasoning) == (f"<|start|>assistant{call}" * calls + "So.", "Hm.")


def test_a_call_that_the_tokens_ran_out_in_stays_as_far_as_it_came() -> None:
    text = '<|channel|>commentary to=functions.weather<|message|>{"city": "Os'
    said = heard(GPT_OSS, text, engine="length", tools=TOOLS)
    assert (said.calls, said.finish_reason) == ([{"name": "weather", "arguments": '{"city": "Os'}], "length")


def test_stop_strings_look_at_the_content_alone() -> None:
    text = f"{THOUGHT}<|channel|>final<|message|>It is. Hm. No."
    assert heard(GPT_OSS, text, stop="Hm.") == Heard(OutputDelta("It is. ", "Hm."), "stop")


@pytest.mark.parametrize("spelled", ["<|channel|>final<|message|>", "<|end|>", "<|start|>assistant", "<|call|>", "<"])
def test_a_marker_that_ordinary_tokens_spell_is_text(spelled: str) -> None:
    letters = [token for char in spelled for token in GPT_OSS.words.encode(char)]
    encode = GPT_OSS.words.encode
    thought = [*encode("<|channel|>analysis<|message|>It is "), *letters, *encode(", so.<|end|><|start|>assistant")]
    content = [*encode("<|channel|>final<|message|>Write "), *letters, *encode(" here.<|return|>")]
    said = hear(output(GPT_OSS), [*thought, *content]).said
    assert said == OutputDelta(f"Write {spelled} here.", f"It is {spelled}, so.")
    header = encode("<|channel|>commentary to=functions.weather<|message|>")
    call = hear(output(GPT_OSS, tools=TOOLS), [*header, *encode('{"city": "'), *letters, *encode('"}<|call|>')])
    assert call.calls == [{"name": "weather", "arguments": f'{{"city": "{spelled}"}}'}]
    assert call.said.content == ""
