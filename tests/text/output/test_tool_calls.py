import json
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageToolCall
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from tests.text.speech import PLACES, TOOLS, WORDS, Heard, Model, cut, gpt_oss, hear, heard, kimi_k3, model, output
from worker.engine.tokenizer import MLXTokenizer
from worker.text.output.output import OutputDelta
from worker.text.output.tool_calls import message_tool_calls

TINY = model()
OSLO = {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}
NOW = {"name": "now", "arguments": {}}

# What each format's models write for these two calls.
FORMATS = {
    "function_gemma": "<start_function_call>call:weather{city:<escape>Oslo<escape>,days:2}<end_function_call>"
    "<start_function_call>call:now{}<end_function_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,days:2}<tool_call|><|tool_call>call:now{}<tool_call|>',
    "glm47": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
    "json_tools": f"<tool_call>\n{json.dumps(OSLO)}\n</tool_call>\n<tool_call>\n{json.dumps(NOW)}\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo", "days": 2}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}'
    "<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>argument key="city" '
    'type="string"<|sep|>Oslo<|close|>argument<|sep|><|open|>argument key="days" type="integer"<|sep|>2<|close|>'
    'argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools'
    "<|sep|>",
    "laguna": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key>"
    "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>",
    "longcat": "<longcat_tool_call>weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Oslo"
    "</longcat_arg_value>\n<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>2</longcat_arg_value>\n"
    f"</longcat_tool_call>\n<longcat_tool_call>{json.dumps(NOW)}</longcat_tool_call>",
    "minicpm5": '<function name="weather"><param name="city">Oslo</param><param name="days">2</param></function>'
    '<function name="now"></function>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>\n'
    '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": 2}[TOOL_CALLS]now[ARGS]{}',
    "muse_spark": 'to=weather<|message|><atem:function_calls><atem:invoke name="weather"><atem:parameter '
    'name="city">Oslo</atem:parameter><atem:parameter name="days">2</atem:parameter></atem:invoke>'
    '<atem:invoke name="now"></atem:invoke></atem:function_calls>',
    "pythonic": '<|tool_call_start|>[weather(city="Oslo", days=2), now()]<|tool_call_end|>',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
}
LISTED = f"[TOOL_CALLS] [{json.dumps(OSLO)}, {json.dumps(NOW)}]"


def speaker(name: str) -> Any:
    return kimi_k3() if name == "kimi_k3" else model(name)


def read(heard: Heard) -> list[dict[str, Any]]:
    return [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in heard.calls]


@pytest.mark.parametrize(("name", "text"), [*FORMATS.items(), ("mistral", LISTED)])
def test_every_format_of_mlx_lm_makes_its_calls(name: str, text: str) -> None:
    said = heard(speaker(name), f"Let me see.\n{text}" if name != "muse_spark" else text, tools=TOOLS)
    assert read(said) == [OSLO, NOW]
    assert said.said.content == ("Let me see." if name != "muse_spark" else "")
    assert said.finish_reason == "tool_calls"
    assert said.voided == frozenset()


@pytest.mark.parametrize(("name", "text"), [*FORMATS.items(), ("mistral", LISTED)])
def test_only_the_first_call_is_made_where_the_request_wants_no_more(name: str, text: str) -> None:
    answer = output(speaker(name), tools=TOOLS, parallel_tool_calls=False)
    said = hear(answer, speaker(name).words.encode(text))
    assert read(said) == [OSLO]
    assert said.finish_reason == "tool_calls"
    assert answer.stopped


@pytest.mark.parametrize(("name", "text"), [*FORMATS.items(), ("mistral", LISTED)])
@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_a_request_without_tools_gets_the_text(name: str, text: str, fields: dict[str, Any]) -> None:
    said = heard(speaker(name), text, **fields)
    assert said == Heard(OutputDelta(text.removeprefix("to=weather<|message|>")), "stop")


# Streaming


@pytest.mark.parametrize("name", ["json_tools", "mistral"])
def test_arguments_come_as_they_are_written(name: str) -> None:
    text = FORMATS[name]
    answer = output(model(name), tools=TOOLS)
    said = [answer.feed(token) for token in cut(model(name), text, range(len(text)))]
    deltas = [delta for one in said for delta in one.tool_calls]
    assert deltas[0]["function"] == {"name": "weather", "arguments": "{"}
    assert deltas[1:5] == [{"index": 0, "function": {"arguments": piece}} for piece in '"cit']
    assert len(deltas) == len(json.dumps(OSLO["arguments"])) + len("{}")


def test_a_call_is_told_in_the_form_of_openai() -> None:
    answer = output(TINY, tools=TOOLS)
    deltas = [d for token in TINY.words.encode(FORMATS["json_tools"]) for d in answer.feed(token).tool_calls]
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


# What is no call

BROKEN = [
    "<tool_call></tool_call>",
    "<tool_call>weather in Oslo</tool_call>",
    '<tool_call>{"name": "weather"</tool_call>',
    '<tool_call>{"name": "weather", "arguments": []}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": "Oslo"}</tool_call>',
    '<tool_call>{"name": "storm", "arguments": {}}</tool_call>',
    '<tool_call>{"name": ["weather"], "arguments": {}}</tool_call>',
    '<tool_call>["weather"]</tool_call>',
    "<tool_call>" + "[" * 2000 + "</tool_call>",
    '<tool_call>{"name": ' + "[" * 2000 + "</tool_call>",
]
BROKEN_LATE = [
    '<tool_call>{"name": "weather", "arguments": {"city": Oslo}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": NaN}}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}} or so</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {}, "name": "now"}</tool_call>',
    '<tool_call>{"name": "weather", "arguments": {"a": ' + "[" * 2000 + "</tool_call>",
    '<tool_call>{"name": "weather", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>",
]


@pytest.mark.parametrize("call", BROKEN)
def test_a_malformed_call_is_content_as_the_model_wrote_it(call: str) -> None:
    text = f"Well,  \n{call}\n that was it. \n"
    assert heard(TINY, text, tools=TOOLS) == Heard(OutputDelta(text), "stop")


@pytest.mark.parametrize("call", BROKEN_LATE)
def test_a_call_that_breaks_after_it_was_announced_is_void_and_content(call: str) -> None:
    said = heard(TINY, f"Well, {call} and {FORMATS['json_tools']}", tools=TOOLS)
    assert said.said.content == f"Well, {call} and"
    assert said.voided == {0}
    assert read(said) == [OSLO, NOW]
    assert [delta["index"] for delta in said.said.tool_calls] == [0, 1, 2]
    alone = heard(TINY, call, tools=TOOLS)
    assert (alone.said.content, alone.calls, alone.finish_reason) == (call, [], "stop")


def test_a_malformed_call_among_thoughts_ends_them() -> None:
    said = heard(TINY, "Hm. <tool_call>what</tool_call> So.", "open", tools=TOOLS).said
    assert said == OutputDelta("<tool_call>what</tool_call> So.", "Hm.")


def test_one_unknown_function_makes_content_of_all_that_stand_between_two_markers() -> None:
    text = "<|tool_call_start|>[now(), storm()]<|tool_call_end|>"
    assert heard(model("pythonic"), text, tools=TOOLS) == Heard(OutputDelta(text), "stop")


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("longcat", "<longcat_tool_call>now</longcat_tool_call>"),
        ("pythonic", "<|tool_call_start|>[now(a={[]: 1})]<|tool_call_end|>"),
        ("pythonic", "<|tool_call_start|>[now(a={1, 2})]<|tool_call_end|>"),
        ("pythonic", f"<|tool_call_start|>[now(a={'-' * 3000}1)]<|tool_call_end|>"),
        ("pythonic", f"<|tool_call_start|>[now(a={'-' * 7000}1)]<|tool_call_end|>"),
        ("qwen3_coder", "<tool_call><function=weather><parameter=days>1e999</parameter></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=weather><parameter=days>two</parameter></function></tool_call>"),
        ("minimax_m2", '<minimax:tool_call><invoke name="now"</minimax:tool_call>'),
        ("function_gemma", "<start_function_call>call:now{a}<end_function_call>"),
        ("gemma4", "<|tool_call>call:now{a b:1}<tool_call|>"),
        ("kimi_k2", "<|tool_calls_section_begin|>now:0<|tool_call_argument_begin|>b''<|tool_calls_section_end|>"),
    ],
)
def test_what_the_parsers_of_mlx_lm_raise_makes_content(name: str, call: str) -> None:
    assert heard(model(name), call, tools=TOOLS) == Heard(OutputDelta(call), "stop")


STRANGE_TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}
    for properties in (None, [], {"city": True, "days": {"type": ["string"], "anyOf": [True]}})
]


@given(st.sampled_from(list(FORMATS)), st.data(), st.sampled_from([TOOLS, *([tool] for tool in STRANGE_TOOLS)]))
def test_nothing_that_stands_between_the_markers_makes_it_fail(name: str, data: Any, tools: Any) -> None:
    text = FORMATS[name]
    at = st.integers(0, len(text))
    strange = st.sampled_from([*WORDS, "1e999", "NaN", "{[]: 1}", "b''", "\\ud800", "=", "(", "[" * 99, "None", "\x00"])
    for _ in range(data.draw(st.integers(1, 4))):
        a, b = sorted((data.draw(at), data.draw(at)))
        text = data.draw(st.sampled_from([text[:a] + text[b:], text[:a] + data.draw(strange) + text[a:]]))
    said = heard(speaker(name), text, tools=tools)
    json.dumps([said.said.content, said.said.tool_calls], ensure_ascii=False, allow_nan=False).encode()
    assert all(isinstance(call["arguments"], dict) for call in read(said))


def test_half_of_a_surrogate_pair_stays_an_escape() -> None:
    half = '<longcat_tool_call>{"name": "now", "arguments": {"a": "\\ud83d é"}}</longcat_tool_call>'
    assert heard(model("longcat"), half, tools=TOOLS).calls == [
        {"name": "now", "arguments": '{"a": "\\ud83d \\u00e9"}'}
    ]


HOSTILE = {
    "function_gemma": "call:a{", "gemma4": "call:a{", "kimi_k3": "<|open|>call", "muse_spark": "<atem:invoke",
    "glm47": "<arg_key>a</arg_key><arg_value>", "laguna": "<arg_key>a</arg_key><arg_value>",
    "longcat": "a<longcat_arg_key>a</longcat_arg_key><longcat_arg_value>",
}  # fmt: skip


@pytest.mark.parametrize(("name", "piece"), HOSTILE.items())
def test_a_text_that_a_parser_would_search_for_seconds_is_content(
    name: str, piece: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(self: MLXTokenizer, text: str, tools: Any) -> Any:
        raise AssertionError("It searches.")

    monkeypatch.setattr(MLXTokenizer, "parse_tool_call", parse)
    start, end = speaker(name).words.tool
    text = f"{start}{piece * (20_000 // len(piece))}{end}"
    assert heard(speaker(name), text, tools=TOOLS) == Heard(OutputDelta(text), "stop")


@pytest.mark.parametrize(("name", "text"), FORMATS.items())
def test_a_call_may_hold_a_long_text(name: str, text: str) -> None:
    long = "Oslo " * 8_000 + "Oslo"
    said = heard(speaker(name), text.replace("Oslo", long), tools=TOOLS)
    assert read(said) == [{"name": "weather", "arguments": {"city": long, "days": 2}}, NOW]


# The end of the answer within a call


@pytest.mark.parametrize("engine", ["stop", "length"])
def test_a_call_that_was_not_announced_is_content_where_the_answer_ends_in_it(engine: str) -> None:
    text = 'So:\n<tool_call>{"name": "weather", "argu'
    assert heard(TINY, text, engine=engine, tools=TOOLS) == Heard(OutputDelta(text), engine)


def test_an_announced_call_stays_as_far_as_it_came_where_the_tokens_ran_out() -> None:
    said = heard(TINY, 'So:\n<tool_call>{"name": "weather", "arguments": {"ci', engine="length", tools=TOOLS)
    assert (said.said.content, said.finish_reason, said.voided) == ("So:", "length", frozenset())
    assert said.calls == [{"name": "weather", "arguments": '{"ci'}]


def test_an_announced_call_that_the_model_itself_broke_off_is_void() -> None:
    text = 'So:\n<tool_call>{"name": "weather", "arguments": {"ci'
    said = heard(TINY, text, tools=TOOLS)
    assert (said.said.content, said.calls, said.finish_reason, said.voided) == (text, [], "stop", {0})


def test_an_announced_call_that_is_broken_is_void_where_the_tokens_ran_out_too() -> None:
    text = '<tool_call>{"name": "weather", "arguments": {"city": Oslo'
    said = heard(TINY, text, engine="length", tools=TOOLS)
    assert (said.said.content, said.calls, said.finish_reason, said.voided) == (text, [], "length", {0})


@pytest.mark.parametrize("end", ["", "\n", "</tool_"])
@pytest.mark.parametrize(("engine", "finish_reason"), [("stop", "tool_calls"), ("length", "length")])
def test_json_that_is_complete_is_a_call_without_its_end_marker(end: str, engine: str, finish_reason: str) -> None:
    said = heard(TINY, f"<tool_call>{json.dumps(OSLO)}{end}", engine=engine, tools=TOOLS)
    assert (said.said.content, read(said), said.finish_reason) == ("", [OSLO], finish_reason)


@pytest.mark.parametrize("engine", ["stop", "length"])
def test_a_format_that_would_make_a_call_of_half_of_one_needs_its_end_marker(engine: str) -> None:
    half = "<tool_call>weather<arg_key>city</arg_key><arg_value>Os"
    assert heard(model("glm47"), half, engine=engine, tools=TOOLS) == Heard(OutputDelta(half), engine)


# Ids


def test_ids_are_the_same_on_every_attempt_and_differ_within_an_answer() -> None:
    ids = [[delta["id"] for delta in heard(TINY, FORMATS["json_tools"], tools=TOOLS).said.tool_calls] for _ in "ab"]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == 2
    assert all(id.startswith("call_") and len(id) == 29 for id in ids[0])


def test_an_id_that_the_model_gives_is_kept() -> None:
    said = heard(model("kimi_k2"), FORMATS["kimi_k2"], tools=TOOLS).said
    assert [delta["id"] for delta in said.tool_calls] == ["functions.weather:0", "functions.now:1"]


def test_an_id_that_is_there_already_or_is_none_is_not() -> None:
    calls = [{**NOW, "id": id} for id in ("a", "a", "\\ud83d", "x" * 65, 7)]
    said = heard(model("mistral"), f"[TOOL_CALLS]{json.dumps(calls)}", tools=TOOLS).said
    ids = [delta["id"] for delta in said.tool_calls]
    assert ids[0] == "a"
    assert len({*ids}) == 5
    assert all(id.startswith("call_") for id in ids[1:])


def test_the_order_of_tokens_within_a_step_is_not_lost() -> None:
    """Several calls, text and markers may come in one token."""
    dice = Random(1)
    text = f"a {FORMATS['json_tools']} b"
    whole_text = heard(TINY, text, tools=TOOLS)
    for _ in range(20):
        assert hear(output(TINY, tools=TOOLS), cut(TINY, text, [dice.randrange(200) for _ in range(5)])) == whole_text
