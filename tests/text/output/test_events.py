"""Events of an answer: what the parsers and the tool calls return, piece by piece."""

import pytest

from tests.text.output.test_tool_calls import FORMATS, speaker
from tests.text.speech import TOOLS, gpt_oss, model
from worker.text.output.events import (
    CallClosed,
    CallCutOff,
    CallOpened,
    CallText,
    Content,
    OutputParser,
    ParseEvent,
    Reasoning,
    ToolArguments,
    ToolCallBegan,
)
from worker.text.output.tool_calls import Calls, InvalidCall, as_deltas

TINY, GPT_OSS = model(), gpt_oss()


def events(parser: OutputParser | None, *pieces: str) -> list[ParseEvent]:
    assert parser is not None
    return [*(event for piece in pieces for event in parser.feed(piece)), *parser.flush()]


def test_markers_split_an_answer_into_events_of_each_kind() -> None:
    parser = TINY.dialect.parser("none", calls=True)
    assert events(parser, "Hm.<think>So", ".</think>Yes.<tool_call>{}</tool_call>", "<tool_call>{</tool_") == [
        Content("Hm."), Reasoning(""), Reasoning("So"), Reasoning("."), Content(""), Content("Yes."),
        CallOpened("<tool_call>"), CallText("{}"), CallClosed("</tool_call>"), CallOpened("<tool_call>"), CallText("{"),
        CallCutOff("</tool_"),
    ]  # fmt: skip


def test_the_markers_of_calls_are_content_for_a_request_without_tools() -> None:
    found = events(TINY.dialect.parser("none", calls=False), "<tool_call>{}</tool_call>")
    assert {type(event) for event in found} == {Content}


def test_channels_of_harmony_are_events_and_a_header_opens_a_call() -> None:
    header = "<|channel|>commentary to=functions.now<|message|>"
    parser = GPT_OSS.dialect.parser("none", calls=True)
    assert events(parser, f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{header}", "{}<|call|>") == [
        Reasoning(""), Reasoning("Hm."), CallOpened(f"<|start|>assistant{header}"), CallText("{}"),
        CallClosed("<|call|>"), Content(""),
    ]  # fmt: skip


def test_a_call_in_json_begins_once_and_then_has_arguments() -> None:
    calls = Calls(TINY.dialect.calls, TOOLS, "job-1", parallel=True)
    calls.begin("<tool_call>")
    assert calls.feed('{"name": "weather", ') == []
    began, first = calls.feed('"arguments": {"ci')
    assert isinstance(began, ToolCallBegan)
    assert (began.index, began.function, first) == (0, "weather", ToolArguments(0, '{"ci'))
    assert calls.feed('ty": 1}}') == [ToolArguments(0, 'ty": 1}')]
    assert (calls.end("</tool_call>"), calls.num_made) == ([], 1)


def test_an_invalid_call_is_its_text() -> None:
    calls = Calls(TINY.dialect.calls, TOOLS, "job-1", parallel=True)
    calls.begin("<tool_call>")
    assert calls.feed("what") == []
    assert calls.end("</tool_call>") == InvalidCall("<tool_call>what</tool_call>")


def test_the_events_of_one_call_are_one_delta() -> None:
    began = ToolCallBegan(1, "call_1", "now")
    (delta,) = as_deltas([began, ToolArguments(1, "{"), ToolArguments(1, "}")])
    function = {"name": "now", "arguments": "{}"}
    assert delta == {"index": 1, "id": "call_1", "type": "function", "function": function}


@pytest.mark.parametrize("name", FORMATS)
def test_only_a_format_of_json_writes_a_call_as_json(name: str) -> None:
    format = speaker(name).dialect.calls
    if format.is_json:
        assert format.as_json("", 'now[ARGS]{"a": 1' if name == "mistral" else '{"a": 1') is not None
    else:
        with pytest.raises(ValueError, match="not JSON"):
            format.as_json("", '{"a": 1')
