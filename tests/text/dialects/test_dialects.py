"""Each dialect reads what its models write, however it is cut and wherever it stands."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.dialects.reading import BY_NAME, Answer, cut, read
from tests.text.dialects.rows import DEVIATIONS, NOW, OSLO, WRITTEN
from worker.text.dialects.cursor import Cursor
from worker.text.dialects.dialect import CallArguments, CallBegan, CallEnded
from worker.text.dialects.json_calls import JsonCalls
from worker.text.dialects.pythonic import GemmaCalls, PythonicCalls
from worker.text.dialects.tag_calls import TagCalls
from worker.text.dialects.values import Parameters

NAMES = sorted(BY_NAME)
MARKED = [name for name in NAMES if name not in ("llama3", "llama4")]
NS = "]<]minimax[>["  # before each tag of MiniMax M3
PLACES = st.lists(st.integers(0, 400), max_size=30)


def test_each_dialect_has_a_row_of_data() -> None:
    assert set(WRITTEN) == set(BY_NAME)


@pytest.mark.parametrize("name", NAMES)
def test_the_calls_that_models_write_are_read(name: str) -> None:
    answer = read(name, WRITTEN[name])
    assert (answer.calls, answer.content.strip(), answer.repaired) == ([OSLO, NOW], "", [])
    assert answer.complete == [True, True]


@pytest.mark.parametrize("name", MARKED)
def test_text_and_thoughts_around_calls_stay(name: str) -> None:
    answer = read(name, f"<think>Hm.</think>Let me see.\n{WRITTEN[name]}")
    assert (answer.calls, answer.content.strip(), answer.reasoning) == ([OSLO, NOW], "Let me see.", "Hm.")


@pytest.mark.parametrize("name", MARKED)
def test_a_call_among_thoughts_ends_them(name: str) -> None:
    answer = read(name, f"Hm. {WRITTEN[name]}", reasons=True)
    assert (answer.calls, answer.content.strip(), answer.reasoning.strip()) == ([OSLO, NOW], "", "Hm.")


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_what_models_write_instead_is_read(deviation: str) -> None:
    name, text = DEVIATIONS[deviation]
    answer = read(name, text)
    assert (answer.calls, answer.content.strip()) == ([OSLO, NOW], "")


@pytest.mark.parametrize("text", [*WRITTEN.items(), *DEVIATIONS.values()])
def test_how_a_text_is_cut_does_not_change_what_is_read(text: tuple[str, str]) -> None:
    name, written = text
    for whole in (
        written,
        f"So: {written} And so on, for a while, with `{written[:12]}` in it.",
        written[: len(written) // 2],
    ):
        for cut_off in (False, True):
            expected = read(name, whole, cut_off=cut_off).whole
            assert read(name, list(whole), cut_off=cut_off).whole == expected


def test_a_marker_that_means_nothing_any_more_may_hold_the_beginning_of_another() -> None:
    text = 'Hm</think>>>>weather\n{"city": "Oslo"}'
    assert read("functionary_v3.2", list(text)).whole == read("functionary_v3.2", text).whole


@pytest.mark.parametrize("name", MARKED)
def test_what_looks_like_a_call_and_is_none_is_read_the_same_however_it_is_cut(name: str) -> None:
    opening = BY_NAME[name].openings[0]
    text = f"{opening} several words {WRITTEN[name]} {opening}{'x' * 400} {WRITTEN[name]}"
    whole = read(name, text)
    assert whole.calls[-2:] == [OSLO, NOW]
    for size in (1, 3, 50, 97):
        assert read(name, [text[at : at + size] for at in range(0, len(text), size)]).whole == whole.whole


@given(st.sampled_from([*WRITTEN.items(), *DEVIATIONS.values()]), st.data(), PLACES, st.booleans())
def test_damaged_text_is_read_the_same_however_it_is_cut_and_never_fails(
    text: tuple[str, str], data: Any, places: list[int], cut_off: bool
) -> None:
    name, written = text
    at = st.integers(0, len(written))
    strange = st.sampled_from(
        ["{", "}", "[", '"', "'", "\\", "<", ">", "=", "(", ",", ":", "\n", "é", "null", "1e999", "\x00"]
    )
    for _ in range(data.draw(st.integers(0, 4))):
        a, b = sorted((data.draw(at), data.draw(at)))
        doubled = written[:b] + written[a:b] + written[b:]
        inserted = written[:a] + data.draw(strange) + written[a:]
        written = data.draw(st.sampled_from([written[:a] + written[b:], inserted, doubled]))
    whole = read(name, written, cut_off=cut_off)
    assert read(name, cut(written, places), cut_off=cut_off).whole == whole.whole
    json.dumps([whole.content, whole.written]).encode()


@pytest.mark.parametrize("name", NAMES)
@given(arguments=st.dictionaries(
    st.text("abc_", min_size=1, max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text('ab"\'\\\n é{}[]<,', max_size=8),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xy"), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
), places=PLACES)  # fmt: skip
def test_what_a_dialect_writes_it_reads(name: str, arguments: dict[str, Any], places: list[int]) -> None:
    functions = {"weather": Parameters({"properties": {name: schema_of(value) for name, value in arguments.items()}})}
    text = BY_NAME[name].write([("weather", arguments), ("weather", {})])
    answer = read(name, cut(text, places), functions=functions)
    assert answer.calls == [("weather", arguments), ("weather", {})]
    assert answer.repaired == []


def schema_of(value: Any) -> dict[str, Any]:
    if value is None:
        return {"type": "null"}
    types = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    return {"type": types[type(value)]}


# What is no call


@pytest.mark.parametrize("name", MARKED)
def test_a_marker_in_prose_is_text_and_holds_nothing_back(name: str) -> None:
    marker = BY_NAME[name].openings[0]
    text = f"The tag `{marker}` starts a call. " + "It goes on for a while. " * 10
    answer, behind = Answer(name), 0
    for at, char in enumerate(text):
        answer.add(char)
        behind = max(behind, at + 1 - len(answer.content))
    assert answer.end().content == text
    assert behind <= len(marker) + 40  # ten tokens
    assert answer.written == []


@pytest.mark.parametrize("name", MARKED)
def test_a_request_without_tools_gets_the_text(name: str) -> None:
    answer = read(name, WRITTEN[name], functions=None)
    assert (answer.content, answer.written) == (WRITTEN[name], [])


@pytest.mark.parametrize("name", ["llama3", "hermes"])
@pytest.mark.parametrize(
    "text",
    [
        '{"city": "Oslo", "name": "weather"}',
        '{"name": "Bob", "parameters": {}}',
        "{}",
        "[1, 2]",
        '{"name": "weather", "age": 3}',
        '[{"name": "weather"}, {"name": "now"}]',
    ],
)
def test_an_answer_in_json_is_no_call_without_a_marker(name: str, text: str) -> None:
    answer = read(name, text)
    assert (answer.content, answer.written) == (text, [])


# What is wrong with a call


@pytest.mark.parametrize(
    ("name", "text", "arguments", "repaired"),
    [
        ("lfm2", '[weather(city="""a "b"\n\'c\'""", days=1)]', {"city": "a \"b\"\n'c'", "days": 1}, []),
        ("lfm2", "[weather(city='''a'b''')]", {"city": "a'b"}, []),
        ("lfm2", r"""[weather(city=r"\d+\"x", days=1)]""", {"city": '\\d+\\"x', "days": 1}, []),
        ("lfm2", r"""[weather(city=f'\x41\u00e9\'')]""", {"city": "Aé'"}, []),
        ("lfm2", "[weather(days=1_000)]", {"days": 1000}, []),
        ("lfm2", "[weather(days=[.5, 5., +5, -.5e3])]", {"days": [0.5, 5.0, 5, -500.0]}, []),
        ("lfm2", "[weather(city=Oslo)]", {"city": "Oslo"}, ["QUOTES"]),
        ("lfm2", "[weather(city={'a', 'b'}, days={1})]", {"city": ["a", "b"], "days": [1]}, ["LIST"]),
        ("lfm2", "[weather(city=(1, 'a', (2, 3),), days=())]", {"city": [1, "a", [2, 3]], "days": []}, ["LIST"]),
        ("lfm2", "[weather(city=[(1, {'a': {}})])]", {"city": [[1, {"a": {}}]]}, ["LIST"]),
        ("lfm2", "[weather(days=07, city=007)]", {"days": 7, "city": "007"}, ["QUOTES", "NUMBER"]),
        ("lfm2", "[weather(days=-0012, other=05)]", {"days": -12, "other": 5}, ["NUMBER"]),
        ("lfm2", "[weather(city='sed -n '1,2p' a.py')]", {"city": "sed -n '1,2p' a.py"}, ["QUOTES"]),
        ("lfm2", "[weather(city='cut -d',' -f1', days=1)]", {"city": "cut -d',' -f1", "days": 1}, ["QUOTES"]),
        ("lfm2", "[weather(city='a \"print('b'))\" c')]", {"city": "a \"print('b'))\" c"}, ["QUOTES"]),
        ("lfm2", "[weather(city='print('b') or 1')]", {"city": "print('b') or 1"}, ["QUOTES"]),
        ("lfm2", "[weather(city=['it's', {'k's': 'v'v'}])]", {"city": ["it's", {"k's": "v'v"}]}, ["QUOTES"]),
        ("lfm2", '[weather(city="say "hi" now")]', {"city": 'say "hi" now'}, ["QUOTES"]),
        ("olmo3", "weather(city='print('b')')\n", {"city": "print('b')"}, ["QUOTES"]),
        ("minimax_m3", f'{NS}<invoke name="weather">{NS}<days>007{NS}</days>{NS}</invoke>', {"days": 7}, ["NUMBER"]),
        ("minimax_m3", f'{NS}<invoke name="weather">{NS}<city>007{NS}</city>{NS}</invoke>', {"city": "007"}, []),
        ("hermes", '{"name": "weather", "arguments": {"days": +5, "city": .5}}', {"days": 5, "city": 0.5}, ["NUMBER"]),
        ("hermes", '{"name": "weather", "arguments": {"city": 007}}', {"city": "007"}, ["QUOTES"]),
        ("command", '[{"tool_call_id": "0", "tool_name": "weather"}]', {}, []),
    ],
)
def test_values_that_another_language_writes_are_what_they_are_there(
    name: str, text: str, arguments: dict[str, Any], repaired: list[str]
) -> None:
    dialect = BY_NAME[name]
    for pieces in ([dialect.openings[0] + text + dialect.closing], dialect.openings[0] + text + dialect.closing):
        answer = read(name, pieces)
        assert answer.calls == [("weather", arguments)]
        assert answer.repaired == repaired


UNTYPED = {"weather": Parameters({"properties": {"city": {}, "days": {"type": ["string", "array"]}}})}


@pytest.mark.parametrize("value", ["[", "{", "[WIP]", "{a: b", "[WIP] fix", "<![CDATA[x]]>", "{'a': 1}", "5.", "+5"])
def test_a_text_that_is_nearly_a_value_stays_a_text_where_it_may_be_one(value: str) -> None:
    for name in ("qwen3_coder", "glm"):
        written = BY_NAME[name].write([("weather", {"city": value, "days": value})])
        assert read(name, written, functions=UNTYPED).calls == [("weather", {"city": value, "days": value})]


def test_prose_about_an_end_that_follows_a_call_is_none() -> None:
    call = BY_NAME["qwen3_coder"].write([("weather", {"city": "Oslo"})])
    prose = "\nI closed it with `</parameter>`."
    for text in (call + prose, [*call, *prose]):
        answer = read("qwen3_coder", text)
        assert (answer.calls, answer.content) == ([("weather", {"city": "Oslo"})], prose)


def test_objects_within_objects_without_end_are_no_call() -> None:
    text = "<tool_call>" + '{"function": ' * 5000
    assert read("hermes", text).content == text


def test_the_keys_of_a_dialect_are_read() -> None:
    dialect = JsonCalls("new", ("<call>",), "</call>", keys=("tool", "input"))
    cursor = Cursor()
    cursor.add(dialect.write([("weather", {"city": "Oslo"})]).removeprefix("<call>"))
    cursor.end()
    began, *pieces, ended = dialect.read("<call>", cursor, {})
    assert (began, ended) == (CallBegan("weather"), CallEnded())
    assert "".join(piece.text for piece in pieces if isinstance(piece, CallArguments)) == '{"city": "Oslo"}'


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize(
    "weighed", ["</think>Shall I?", " but I should ask.</think>Shall I?", " No.", " <tool_call> No."]
)
def test_calls_that_a_thought_weighs_are_not_made(name: str, weighed: str) -> None:
    dialect, text = BY_NAME[name], WRITTEN[name]
    thought, end, content = weighed.partition("</think>")
    for pieces in (["<think>I could " + text + weighed], "<think>I could " + text + weighed):
        answer = read(name, pieces)
        assert answer.written == []
        assert answer.reasoning == "I could " + text + thought, dialect
        assert answer.content == content
        assert end or not content


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("after", ["", "\n", "</think>", "\n</think>\n"])
def test_calls_with_which_a_thought_ends_the_answer_are_made(name: str, after: str) -> None:
    for pieces in (["<think>Hm. " + WRITTEN[name] + after], "<think>Hm. " + WRITTEN[name] + after):
        answer = read(name, pieces)
        assert answer.calls == [OSLO, NOW]
        assert answer.reasoning.strip() == "Hm."
        assert answer.content.strip() == ""
    both = read(name, f"<think>Hm. {WRITTEN[name]}</think>{WRITTEN[name]}")
    assert (both.calls, both.reasoning) == ([OSLO, NOW], f"Hm. {WRITTEN[name]}")
    cut_off = read(name, "<think>Hm. " + WRITTEN[name] + after, cut_off=True)
    assert (cut_off.written, "weather" in cut_off.reasoning) == ([], True)


def test_the_closing_marker_of_calls_without_an_opening_is_no_text() -> None:
    answer = read("llama4", '[weather(city="Oslo")]<|python_end|>')
    assert (answer.calls, answer.content) == ([("weather", {"city": "Oslo"})], "")


@pytest.mark.parametrize(
    ("name", "text", "arguments", "repaired"),
    [
        ("mistral", '[TOOL_CALLS]weather{"days": 1}', {"days": 1}, ["ARGUMENTS"]),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n{"days": 1}<｜tool▁call▁end｜>',
         {"days": 1}, ["CLOSING", "ARGUMENTS", "CLOSING"]),
        ("deepseek_v3.2", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city">12'
         "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", {"city": "12"}, []),
        ("command_r", 'Action: ```json\n[{"tool_name": "weather", "parameters": {"days": 1}}]```', {"days": 1}, []),
        ("qwen3_coder", '<tool_call>\n<function="weather">\n<parameter=days>1</parameter>\n</function>\n</tool_call>',
         {"days": 1}, []),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"days": 1}}</tool_call></tool_call>', {"days": 1}, []),
        ("lfm2", "<|tool_call_start|>[weather(city='\\U0001F600 \\x1b \\0 a\\\nb')]<|tool_call_end|>",
         {"city": "\U0001f600 \x1b \0 ab"}, []),
        *[
            ("deepseek_v3.2", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter '
             f'name="{word}" string="{is_string}">{{"days": 1}}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
             "</｜DSML｜function_calls>", {"days": 1}, ["WRAPPED"])
            for word, is_string in [("arguments", "false"), ("parameters", "true"), ("input", "true")]
        ],
        ("lfm2", "<|tool_call_start|>[weather(days=1)]<|tool_call_end|>[weather(days=1)]<|tool_call_end|>",
         {"days": 1}, ["TWICE"]),
        ("gemma4", "<|tool_call>call:weather<tool_call|>", {}, ["BRACKETS"]),
        ("gemma4", "<|tool_call>call:weather{days:1,city:Oslo}<tool_call|>", {"days": 1, "city": "Oslo"}, ["QUOTES"]),
    ],
)  # fmt: skip
def test_what_models_write_now_and_then_is_read(
    name: str, text: str, arguments: dict[str, Any], repaired: list[str]
) -> None:
    for pieces in ([text], text):
        answer = read(name, pieces)
        assert (answer.calls, answer.content, answer.repaired) == ([("weather", arguments)], "", repaired)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        # The function has no parameter of the name that stands within, or one of the name of the wrapper.
        ("arguments", '{"place": 1}', {"arguments": {"place": 1}}),
        ("arguments", "{}", {"arguments": {}}),
        ("other", '{"days": 1}', {"other": {"days": 1}}),
    ],
)
def test_an_object_that_is_not_the_arguments_stays_in_its_parameter(
    name: str, text: str, arguments: dict[str, Any]
) -> None:
    written = BY_NAME["deepseek_v3.2"].write([("weather", {name: json.loads(text)})])
    assert read("deepseek_v3.2", written).calls == [("weather", arguments)]
    offered = {"weather": Parameters({"properties": {name: {"type": "object"}, "days": {}}})}
    written = BY_NAME["deepseek_v3.2"].write([("weather", {name: {"days": 1}})])
    assert read("deepseek_v3.2", written, functions=offered).calls == [("weather", {name: {"days": 1}})]


def test_what_follows_calls_and_is_not_their_text_once_more_stays() -> None:
    call = "<|tool_call_start|>[weather(days=1)]<|tool_call_end|>"
    for after in ("[weather(days=2)]", "[weather(days=1)", "[weath"):
        for pieces in ([call + after], call + after):
            answer = read("lfm2", pieces)
            assert (answer.calls, answer.content, answer.repaired) == ([("weather", {"days": 1})], after, [])


@pytest.mark.parametrize("text", ["<|tool_call>: and <tool_call|>", "<|tool_call>call:` and `<tool_call|>"])
def test_prose_about_the_marks_of_gemma_is_no_call(text: str) -> None:
    assert read("gemma4", text).content == text


def test_a_marker_within_a_longer_one_does_not_end_it() -> None:
    text = WRITTEN["command_r"]
    assert read("command_r", [*text, *text]).calls == read("command_r", text + text).calls == 2 * [OSLO, NOW]


def test_a_line_of_prose_behind_a_call_is_none() -> None:
    answer = read("olmo3", "<function_calls>now()\nHello (world) x")
    assert (answer.calls, answer.content) == ([("now", {})], "\nHello (world) x")
    lines = read("olmo3", "<function_calls>now()\nother(a=1)\n</function_calls>")
    assert lines.calls == [("now", {}), ("other", {"a": 1})]


def test_the_last_fence_of_a_call_may_be_missing() -> None:
    text = WRITTEN["deepseek_v3"].replace("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>")
    answer = read("deepseek_v3", text)
    assert (answer.calls, answer.content) == (read("deepseek_v3", WRITTEN["deepseek_v3"]).calls, "")
    assert set(answer.repaired) == {"CLOSING"}


@pytest.mark.parametrize("name", MARKED)
def test_a_call_of_an_unknown_function_is_a_call(name: str) -> None:
    answer = read(name, WRITTEN[name], functions={"other": Parameters({})})
    assert [function for function, _ in answer.written] == ["weather", "now"]


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "a"b"}}</tool_call>', '{"city": "a"b"}}'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city" "Oslo"}}</tool_call>', '{"city" "Oslo"}}'),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": ]', '{"city": ]'),
        ("lfm2", "<|tool_call_start|>[weather(city={1: 2, 3})]<|tool_call_end|>", '{"city": {"1": 2, 3})]'),
        ("lfm2", "<|tool_call_start|>[weather(city=(1))]<|tool_call_end|>", '{"city": (1))]'),
        ("lfm2", "<|tool_call_start|>[weather(city=['a' 'b'])]<|tool_call_end|>", """{"city": ["a" 'b'])]"""),
        ("gemma4", "<|tool_call>call:weather Oslo, please<tool_call|>", "Oslo, please"),
        ("gemma4", "<|tool_call>call:weather{a b}<tool_call|>", "{a b}"),
        ("gemma4", "<|tool_call>call:weather{city:ls -la}<tool_call|>", '{"city":ls -la}'),
        (
            "hermes",
            '<tool_call>{"name": "weather", "arguments": {"days": 5 // x\n}}</tool_call>',
            '{"days": 5 // x\n}}',
        ),
        ("lfm2", '<|tool_call_start|>[weather(**{"city": 1})]<|tool_call_end|>', '{**{"city": 1})]'),
        ("lfm2", '<|tool_call_start|>[weather(days=1, "Oslo")]<|tool_call_end|>', '{"days": 1"Oslo")]'),
        ("lfm2", '<|tool_call_start|>[weather("a", city="b")]<|tool_call_end|>', '{"city": "a""b")]'),
        ("lfm2", '<|tool_call_start|>[weather("a" days=1)]<|tool_call_end|>', '{"city": "a"days=1)]'),
    ],
)
def test_arguments_that_are_no_json_are_delivered_as_they_were_written(name: str, text: str, arguments: str) -> None:
    answer = read(name, text)
    assert [written for _, written in answer.written] == [arguments]
    assert answer.repaired[0] == "BROKEN"
    assert answer.content == ""


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(BY_NAME[name], JsonCalls | PythonicCalls)])
def test_an_announced_call_that_is_cut_off_stays_incomplete(name: str) -> None:
    text = WRITTEN[name].partition("Oslo")[0] + "Os"
    answer = read(name, text, cut_off=True)
    assert answer.complete == [False]
    assert '"Os' in answer.written[0][1]


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(BY_NAME[name], TagCalls)])
def test_a_call_in_tags_that_ends_within_a_value_is_text_unless_it_was_cut_off(name: str) -> None:
    text = WRITTEN[name].partition("Oslo")[0] + "Os"
    answer = read(name, text)
    assert (answer.content, answer.written) == (text, [])
    for pieces in ([text], text):
        cut_off = read(name, pieces, cut_off=True)
        assert (cut_off.content, cut_off.written, cut_off.complete) == ("", [("weather", "{")], [False])
    text, days, _ = WRITTEN[name].partition("days")
    assert read(name, text + days, cut_off=True).written[0] == ("weather", '{"city": "Oslo"')


# Strings keep every byte


STRINGS = [
    "Oslo", " Oslo ", "  indented\n    more\n", "\n\nOslo\n\n", "", " ", "null", "true", "5", "1e5", '"Oslo"', "'Oslo'",
    '{"a": 1}', "[1]", "a\\nb", "\\d+", "é🙂\u2028", "a < b > c & d", "</", "<p>html</p>", "a</parameter>b",
    "</function>", "a</tool_call>b", "</arg_value> x", "<![CDATA[x", "]]>", "<parameter=city>", "a = '''b'''", "None",
    "a\r\nb", "\ttab",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_string_keeps_every_byte(name: str) -> None:
    for text in STRINGS:
        written = BY_NAME[name].write([("weather", {"city": text, "days": 2}), NOW])
        for pieces in (written, list(written)):
            assert read(name, pieces).calls == [("weather", {"city": text, "days": 2}), NOW], text


@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(BY_NAME[name], TagCalls)])
def test_a_string_may_hold_whole_calls_of_the_dialect(name: str) -> None:
    text = f"Write this:\n{BY_NAME[name].write([OSLO])}\nand go on."
    written = BY_NAME[name].write([("weather", {"days": 2, "city": text})])
    assert read(name, written).calls == [("weather", {"days": 2, "city": text})]


@given(st.text('ab</>parameter\n="', max_size=30), st.sampled_from(NAMES))
def test_any_string_is_read_back_unless_it_spells_the_ends_of_a_call(text: str, name: str) -> None:
    written = BY_NAME[name].write([("weather", {"city": text})])
    if not any(end in text for end in ("</parameter", "</function", "</tool")):
        assert read(name, written).calls == [("weather", {"city": text})]


def test_a_parameter_whose_schema_leads_in_a_circle_is_read() -> None:
    circle = {"anyOf": [{"$ref": "#/properties/city"}, {"$ref": "#/properties/city"}]}
    functions = {"weather": Parameters({"properties": {"city": circle}})}
    written = BY_NAME["qwen3_coder"].write([("weather", {"city": "Oslo"})])
    assert read("qwen3_coder", written, functions=functions).calls == [("weather", {"city": "Oslo"})]


ORDER = {
    "type": "object",
    "properties": {
        "to": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": ["integer", "null"]}}},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
        "notes": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "counts": {"type": "object", "additionalProperties": {"type": "integer"}},
        "more": {},
        "none": {"type": "array"},
    },
    "$defs": {"row": {"type": "object", "properties": {"n": {"type": "number"}, "tags": {"type": "array"}}}},
}


def element(name: str, *content: str) -> str:
    return f"{NS}<{name}>{''.join(content)}{NS}</{name}>"


ELEMENTS = {
    "to": (element("city", "5"), element("zip", "null")),
    "rows": (element("item", element("n", "1.50"), element("tags", element("item", "a"), element("item", "7"))),
             element("item", element("n", "2"))),
    "notes": (element("item", " 5\n"), element("item", "")),
    "counts": (element("a", "1"), element("b", "2")),
    "more": (element("tag", "a"), element("tag", "b"), element("other", element("x", "y"))),
    "none": (),
}  # fmt: skip
ORDERED = {
    "to": {"city": "5", "zip": None}, "rows": [{"n": 1.5, "tags": ["a", "7"]}, {"n": 2}], "notes": [" 5\n", ""],
    "counts": {"a": 1, "b": 2}, "more": {"tag": ["a", "b"], "other": {"x": "y"}}, "none": [],
}  # fmt: skip


@pytest.mark.parametrize("places", [[], range(600)])
def test_elements_are_read_by_the_schemas_of_what_they_are_in(places: list[int]) -> None:
    members = "".join(element(name, *content) for name, content in ELEMENTS.items())
    text = f'{NS}<tool_call>\n{NS}<invoke name="weather">{members}{NS}</invoke>\n{NS}</tool_call>'
    answer = read("minimax_m3", cut(text, places), functions={"weather": Parameters(ORDER)})
    assert (answer.calls, answer.repaired) == ([("weather", ORDERED)], [])


@pytest.mark.parametrize("end", ["", f"{NS}</item>", f"{NS}</notes>{NS}</invoke>", f"{NS}</item>{NS}</invoke>"])
def test_elements_that_do_not_end_are_text_unless_the_call_ends_after_the_last(end: str) -> None:
    text = f'{NS}<tool_call>\n{NS}<invoke name="weather">{NS}<notes>{NS}<item>a{end}'
    answer = read("minimax_m3", text, functions={"weather": Parameters(ORDER)})
    calls = [("weather", {"notes": ["a"]})] if end.endswith(f"</item>{NS}</invoke>") else []
    assert (answer.calls, answer.content) == (calls, "" if calls else text)


def test_elements_too_deep_for_a_call_are_text() -> None:
    text = f'{NS}<tool_call>\n{NS}<invoke name="weather">' + f"{NS}<more>" * 2_000
    assert read("minimax_m3", text, functions={"weather": Parameters(ORDER)}).content == text


LONG = 40_000


@pytest.mark.parametrize("name", NAMES)
def test_a_call_may_hold_a_long_text(name: str) -> None:
    long = "Oslo < b\n" * (LONG // 9) + "Oslo"
    written = BY_NAME[name].write([("weather", {"city": long, "days": 2})])
    assert read(name, [written[at : at + 7] for at in range(0, len(written), 7)]).calls == [
        ("weather", {"city": long, "days": 2})
    ]


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_may_have_any_name(name: str) -> None:
    for parameter in ("größe", "two words", "a.b", "x-1", "a:b" if "gemma" not in name else "ab"):
        if isinstance(BY_NAME[name], PythonicCalls | GemmaCalls) and not parameter.isidentifier():
            continue  # their names are words
        written = BY_NAME[name].write([("weather", {parameter: "Oslo"})])
        assert read(name, list(written)).calls == [("weather", {parameter: "Oslo"})], parameter


def test_a_name_between_tags_without_quotes_may_hold_one() -> None:
    written = BY_NAME["qwen3_coder"].write([("weather", {'quo"te': "Oslo"})])
    assert read("qwen3_coder", written).calls == [("weather", {'quo"te': "Oslo"})]


@pytest.mark.parametrize("name", ["llama3", "llama4"])
def test_lists_of_calls_without_a_marker_may_follow_one_another(name: str) -> None:
    text = DEVIATIONS["a list of objects"][1] if name == "llama3" else WRITTEN[name]
    for pieces in (text * 2, list(text * 2), [text, text]):
        assert read(name, pieces).calls == [OSLO, NOW, OSLO, NOW]


@pytest.mark.parametrize("places", [range(0), range(200)])
def test_calls_of_mistral_follow_each_other_without_an_opening(places: range) -> None:
    first = '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}'
    two = [("weather", {"city": "Oslo"}), ("now", {})]
    for between in ("", "\n", "[TOOL_CALLS]"):
        assert read("mistral", cut(f"{first}{between}now[ARGS]{{}}", places)).calls == two
    for text in ("rain[ARGS]{}", "now{}", "Now I wait.", "now", "now[AR"):
        answer = read("mistral", cut(f"{first}{text}", places))
        assert (answer.calls, answer.content) == (two[:1], text)
