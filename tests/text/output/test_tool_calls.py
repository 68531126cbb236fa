import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageToolCall
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from tests.text.dialects.rows import WRITTEN
from tests.text.speech import PLACES, TOOLS, Heard, Model, cut, gpt_oss, hear, heard, model, output
from worker.text.dialects.dialect import CallArguments, CallBegan, CallEnded
from worker.text.dialects.table import Thoughts
from worker.text.output.events import ToolCalls, merge_deltas, message_tool_calls
from worker.text.output.output import OutputDelta

TINY = model()
OSLO = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
NOW = {"name": "now", "arguments": {}}


def read(heard: Heard) -> list[dict[str, Any]]:
    return [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in heard.calls]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_calls_of_every_dialect_are_made(name: str) -> None:
    said = heard(model(name), f"Let me see.\n{WRITTEN[name]}" if name not in BARE else WRITTEN[name], tools=TOOLS)
    assert read(said) == [OSLO, NOW]
    assert said.said.content == ("Let me see." if name not in BARE else "")
    assert said.finish_reason == "tool_calls"


BARE = ("llama3", "llama4")  # calls without a marker begin an answer


@pytest.mark.parametrize("name", WRITTEN)
def test_only_the_first_call_is_made_if_the_request_allows_one(name: str) -> None:
    answer = output(model(name), tools=TOOLS, parallel_tool_calls=False)
    said = hear(answer, model(name).words.encode(WRITTEN[name]))
    assert read(said) == [OSLO]
    assert said.finish_reason == "tool_calls"
    assert answer.stopped


@pytest.mark.parametrize("fields", [{}, {"tools": []}])
def test_a_request_without_tools_gets_the_text(fields: dict[str, Any]) -> None:
    assert heard(TINY, WRITTEN["hermes"], **fields) == Heard(OutputDelta(WRITTEN["hermes"]), "stop")


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_left_out_if_the_request_allows_none(name: str) -> None:
    before = "" if name in BARE else "Let me see.\n"
    answer = output(model(name), tools=TOOLS, tool_choice="none")
    said = hear(answer, model(name).words.encode(before + WRITTEN[name]))
    assert said == Heard(OutputDelta(before.strip()), "stop")
    assert answer.left_out_calls


def test_text_after_a_call_that_is_left_out_stays() -> None:
    said = heard(TINY, f"Let me see.\n{WRITTEN['hermes']}\nIt is warm.", tools=TOOLS, tool_choice="none")
    assert said.said.content.split("\n\n\n") == ["Let me see.", "It is warm."]


def test_nothing_is_left_out_of_an_answer_without_calls() -> None:
    answer = output(TINY, tools=TOOLS, tool_choice="none")
    text = "The tag `<tool_call>` begins a call."
    assert hear(answer, TINY.words.encode(text)) == Heard(OutputDelta(text), "stop")
    assert not answer.left_out_calls


def test_an_answer_by_a_schema_is_no_call_however_it_looks() -> None:
    text = '{"name": "weather", "parameters": {}}'
    fields = {"tools": TOOLS, "tool_choice": "none", "response_format": {"type": "json_object"}}
    assert heard(model("llama3"), text, **fields).said == OutputDelta(text)


# An answer whose first marker is the end of the prompt


ALL = Thoughts("", "", (">>>all\n",))
FUNCTIONARY = replace(
    model("functionary_v3.2"), dialect=replace(model("functionary_v3.2").dialect, thoughts=ALL, opened=">>>")
)


@pytest.mark.parametrize("tools", [TOOLS, None])
@given(places=PLACES)
def test_the_recipient_of_text_is_no_part_of_it(tools: Any, places: list[int]) -> None:
    for text, content in (
        ("all\nHello\nyou", "Hello\nyou"),
        ("Hello", "Hello"),
        ("all\n>>> x = 5\n>>> x\n5", ">>> x = 5\n>>> x\n5"),
    ):
        answer = output(FUNCTIONARY, tools=tools)
        assert hear(answer, cut(FUNCTIONARY, text, places)).said == OutputDelta(content)


@given(places=PLACES)
def test_a_call_may_begin_in_the_prompt(places: list[int]) -> None:
    calls = WRITTEN["functionary_v3.2"]
    for text, content in ((calls.removeprefix(">>>"), ""), (f"all\nLet me see.{calls}", "Let me see.")):
        said = hear(output(FUNCTIONARY, tools=TOOLS), cut(FUNCTIONARY, text, places))
        assert (read(said), said.said.content) == ([OSLO, NOW], content)


def test_a_continued_answer_does_not_begin_with_the_marker_of_a_prompt() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert heard(FUNCTIONARY, "all\nof you", tools=TOOLS, messages=messages).said == OutputDelta("all\nof you")


# Streaming


@pytest.mark.parametrize("name", ["hermes", "mistral"])
def test_arguments_come_as_they_are_written(name: str) -> None:
    text = WRITTEN[name]
    answer = output(model(name), tools=TOOLS)
    said = [answer.feed(token) for token in cut(model(name), text, range(len(text)))]
    deltas = [delta for one in said for delta in one.tool_calls]
    assert deltas[0]["function"]["name"] == "weather"
    pieces = [delta["function"]["arguments"] for delta in deltas if delta["index"] == 0]
    assert "".join(pieces) == '{"city": "Oslo", "days": 2}'
    assert {len(piece) for piece in pieces} <= {0, 1, 2, 3}
    assert len(deltas) > len('{"city":"Oslo","days":2}')


def test_a_call_is_told_in_the_form_of_openai() -> None:
    answer = output(TINY, tools=TOOLS)
    deltas = [d for token in TINY.words.encode(WRITTEN["hermes"]) for d in answer.feed(token).tool_calls]
    for delta in deltas:
        ChoiceDelta.model_validate({"tool_calls": [delta]}, strict=True)
    calls = [ChatCompletionMessageToolCall.model_validate(call, strict=True) for call in message_tool_calls(deltas)]
    assert [call.function.name for call in calls] == ["weather", "now"]
    assert [call.function.arguments for call in calls] == ['{"city": "Oslo", "days": 2}', "{}"]


def test_a_call_is_not_announced_before_its_function_is_known() -> None:
    backwards = '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>'
    answer = output(TINY, tools=TOOLS)
    for token in TINY.words.encode(backwards[:-15]):
        assert answer.feed(token) == OutputDelta()
    assert heard(TINY, backwards, tools=TOOLS).calls == [{"name": "weather", "arguments": '{"city": "Oslo"}'}]


@pytest.mark.parametrize("arguments", [None, "null", '"{\\"city\\": 1}"', "{}"])
def test_arguments_that_are_left_out_or_written_as_a_string_are_an_object(arguments: str | None) -> None:
    more = "" if arguments is None else f', "arguments": {arguments}'
    (call,) = read(heard(TINY, f'<tool_call>{{"name": "weather"{more}}}</tool_call>', tools=TOOLS))
    assert call["arguments"] == ({"city": 1} if arguments and "city" in arguments else {})


WORD = st.text('ab "\\\\{}[]:,é🙂\n\u2028', max_size=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORD,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(WORD, VALUES, max_size=3), st.booleans(), st.sampled_from([None, 1]), PLACES)
@pytest.mark.parametrize(
    ("speaker", "form"),
    [
        (TINY, '<tool_call>{"name": "weather", "arguments": %s}</tool_call>'),
        (model("mistral"), "[TOOL_CALLS]weather[ARGS]%s"),
        (gpt_oss(), "<|channel|>commentary to=functions.weather<|message|>%s"),
    ],
    ids=["json_tools", "mistral", "gpt_oss"],
)
def test_streamed_arguments_are_those_that_the_model_wrote(
    speaker: Model, form: str, arguments: dict[str, Any], ascii_: bool, indent: int | None, places: list[int]
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_, indent=indent)
    said = hear(output(speaker, tools=TOOLS), cut(speaker, form % written, places))
    assert said.calls == [{"name": "weather", "arguments": written}]


# The end of the answer within a call


@pytest.mark.parametrize("engine", ["stop", "length"])
def test_a_call_that_was_not_announced_is_content_if_the_answer_ends_in_it(engine: str) -> None:
    text = 'So:\n<tool_call>{"name": "weather", "argu'
    assert heard(TINY, text, engine=engine, tools=TOOLS) == Heard(OutputDelta(text), engine)


@pytest.mark.parametrize(("engine", "finish_reason"), [("length", "length"), ("stop", "tool_calls")])
def test_an_announced_call_stays_as_far_as_it_came(engine: str, finish_reason: str) -> None:
    text = 'So:\n<tool_call>{"name": "weather", "arguments": {"ci'
    said = heard(TINY, text, engine=engine, tools=TOOLS)
    assert (said.said.content, said.finish_reason) == ("So:", finish_reason)
    assert said.calls == [{"name": "weather", "arguments": '{"ci'}]


@pytest.mark.parametrize("end", ["", "\n", "</tool_"])
@pytest.mark.parametrize(("engine", "finish_reason"), [("stop", "tool_calls"), ("length", "length")])
def test_json_that_is_complete_is_a_call_without_its_end_marker(end: str, engine: str, finish_reason: str) -> None:
    said = heard(TINY, f"<tool_call>{json.dumps(OSLO)}{end}", engine=engine, tools=TOOLS)
    assert (said.said.content, read(said), said.finish_reason) == ("", [OSLO], finish_reason)


def test_what_was_put_right_is_told() -> None:
    said = heard(TINY, "<tool_call>{'name': 'weather', 'arguments': {'city': 'Oslo', 'days': 2,}}", tools=TOOLS)
    assert read(said) == [OSLO]
    assert len(said.repaired) == 3


@pytest.mark.parametrize("name", ["hermes", "lfm2", "mistral"])
def test_of_an_answer_that_was_cut_off_nothing_is_put_right(name: str) -> None:
    text = model(name).words.encode(WRITTEN[name])
    for count in range(1, len(text)):
        answer = output(model(name), tools=TOOLS)
        for token in text[:count]:
            answer.feed(token)
        answer.flush("length")
        assert answer.repaired == []


# Events and ids


def test_the_deltas_of_one_call_become_one() -> None:
    calls = ToolCalls("job-1", parallel=True)
    written = (CallBegan("now", "call_1"), CallArguments("{"), CallArguments("}"), CallEnded())
    (delta,) = merge_deltas(delta for each in written for delta in calls.read(each))
    function = {"name": "now", "arguments": "{}"}
    assert delta == {"index": 0, "id": "call_1", "type": "function", "function": function}


def test_a_call_that_was_cut_off_is_not_made() -> None:
    calls = ToolCalls("job-1", parallel=True)
    began, first = [delta for each in (CallBegan("now"), CallArguments("{")) for delta in calls.read(each)]
    assert (began["index"], began["function"]) == (0, {"name": "now", "arguments": ""})
    assert first == {"index": 0, "function": {"arguments": "{"}}
    assert (calls.read(CallEnded(complete=False)), calls.num_made) == ((), 0)
    assert (calls.read(CallBegan("now")), calls.read(CallEnded()), calls.num_made)[2] == 1


def test_ids_are_the_same_on_every_attempt_and_differ_within_an_answer() -> None:
    ids = [[delta["id"] for delta in heard(TINY, WRITTEN["hermes"], tools=TOOLS).said.tool_calls] for _ in "ab"]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2
    assert all(id.startswith("call_") and len(id) == 29 for id in ids[0])


def test_an_id_that_the_model_gives_is_kept() -> None:
    said = heard(model("kimi_k2"), WRITTEN["kimi_k2"], tools=TOOLS).said
    assert [delta["id"] for delta in said.tool_calls] == ["functions.weather:0", "functions.now:1"]


def test_an_id_that_is_there_already_or_is_none_is_not_kept() -> None:
    calls = [{"id": id, **NOW} for id in ("a", "a", "\\ud83d", "x" * 65, 7)]
    said = heard(model("mistral"), f"[TOOL_CALLS]{json.dumps(calls)}", tools=TOOLS).said
    ids = [delta["id"] for delta in said.tool_calls]
    assert ids[0] == "a"
    assert len({*ids}) == 5
    assert all(id.startswith("call_") for id in ids[1:])


def test_the_order_of_tokens_within_a_step_is_not_lost() -> None:
    """Several calls, text and markers may come in one token."""
    dice = Random(1)
    text = f"a {WRITTEN['hermes']} b"
    whole_text = heard(TINY, text, tools=TOOLS)
    for _ in range(20):
        assert hear(output(TINY, tools=TOOLS), cut(TINY, text, [dice.randrange(200) for _ in range(5)])) == whole_text
