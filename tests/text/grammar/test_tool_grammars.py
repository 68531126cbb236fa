"""Calls that a request wants, in each model's own form."""

import json
import random
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.selection import examples
from tests.text.dialects.reading import BY_NAME
from tests.text.guided import (
    ANY_OBJECT,
    CLOCK,
    EOS,
    FORCED,
    OTHER_EOS,
    SIGNS,
    WEATHER,
    allowed,
    by,
    model,
    refusal,
    request,
    spelled,
)
from tests.text.structured import Schema, schema, walk
from worker.errors import JobFailure
from worker.text.dialects.table import DIALECTS
from worker.text.grammar.tool_grammars import form_of


@pytest.mark.parametrize("format", FORCED)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=str)
async def test_a_call_is_forced_in_the_models_own_form(format: str, choice: Any) -> None:
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": choice, **ANY_OBJECT}  # a forced call comes first
    spoken = model(format)
    assert spoken.takes(await spoken.guide(**fields), FORCED[format])
    said, why = spoken.said(request(**fields), spoken.tokenizer.encode(FORCED[format]))
    assert (said.content, why) == ("", "tool_calls")
    assert [call["function"] for call in said.tool_calls] == [{"name": "weather", "arguments": '{"city": "Oslo"}'}]
    for other in (
        "{}",
        "It is warm.",
        FORCED[format].replace("city", "town"),
        FORCED[format].replace("weather", "rain"),
    ):
        assert not spoken.takes(await spoken.guide(**fields), other)


HAVE_GRAMMARS = sorted(
    dialect.name for dialect in DIALECTS if form_of(dialect.name, names_arguments=dialect.name == "mistral")
)


@pytest.mark.parametrize("dialect", HAVE_GRAMMARS)
async def test_a_dialect_may_write_a_forced_call_as_its_models_do(dialect: str) -> None:
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": "required"}
    spoken = model(dialect if dialect != "mistral" else "mistral")
    for calls in ([("weather", {"city": "Oslo"})], [("weather", {"city": "Oslo"}), ("clock", {})]):
        text = BY_NAME[dialect].write(calls)
        assert spoken.takes(await spoken.guide(**fields), text)
        said, why = spoken.said(request(**fields), spoken.tokenizer.encode(text))
        read = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said.tool_calls]
        assert (said.content.strip(), read, why) == ("", calls, "tool_calls")
    for other in ([("weather", {"town": "Oslo"})], [("rain", {})], [("weather", {})]):
        assert not spoken.takes(await spoken.guide(**fields), BY_NAME[dialect].write(other))


@pytest.mark.parametrize("dialect", HAVE_GRAMMARS)
@given(st.randoms(use_true_random=False))
@settings(max_examples=examples(20))
def test_whatever_a_dialects_grammar_allows_is_a_call_that_validates(dialect: str, dice: Random) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": schema}}]
    spoken, asked = model(dialect), request(tools=tools, tool_choice="required", parallel_tool_calls=False)
    guide, tokens = spoken.quick_guide(asked), list[int]()
    while len(tokens) < 400:
        open_ = [token for token in allowed(guide, spoken.count) if token not in (EOS, OTHER_EOS)]
        if not open_:
            break
        tokens.append(dice.choice(open_))
        guide.accept(tokens[-1])
    said, why = spoken.said(asked, tokens)
    (call,) = said.tool_calls
    assert (said.content.strip(), why) == ("", "tool_calls")
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


@pytest.mark.parametrize("format", FORCED)
async def test_a_named_function_is_the_one_that_is_called(format: str) -> None:
    clock = {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}}
    assert not model(format).takes(await model(format).guide(**clock), FORCED[format])


@pytest.mark.parametrize("format", ["hermes", "mistral", "qwen3_coder"])
@pytest.mark.parametrize(("fields", "calls"), [({}, 3), ({"parallel_tool_calls": False}, 1)])
async def test_several_calls_come_where_the_request_lets_them(format: str, fields: dict[str, Any], calls: int) -> None:
    asked = {"tools": [WEATHER], "tool_choice": "required", **fields}
    for count in range(1, 4):
        guide = await model(format).guide(**asked)
        assert model(format).takes(guide, FORCED[format] * count) == (count <= calls)


@pytest.mark.parametrize("format", FORCED)
async def test_beside_a_schema_a_call_is_still_possible(format: str) -> None:
    spoken, fields = model(format), {"tools": [WEATHER], **by({"type": "array", "items": {"type": "integer"}})}
    answer = "<|channel|>final<|message|>[1, 2]" if format == "harmony" else "[1, 2]"
    assert spoken.takes(await spoken.guide(**fields), answer)
    assert spoken.takes(await spoken.guide(**fields), FORCED[format])
    none = {**fields, "tool_choice": "none"}
    assert spoken.takes(await spoken.guide(**none), answer)
    assert not spoken.takes(await spoken.guide(**none), FORCED[format])


@pytest.mark.parametrize("format", ["hermes", "mistral", "harmony"])
@pytest.mark.parametrize("number", ["9E79833", "-1.5e+999", "9" * 4_000, "-" + "9" * 400 + ".5", "1e-999", "2"])
def test_a_forced_call_with_a_number_beyond_a_double_is_a_call(format: str, number: str) -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "number"}, "s": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    asked, spoken = request(tools=tools, tool_choice="required"), model(format)
    arguments = f'{{"n": {number}, "s": "9E79833 \\" {"9" * 400}"}}'
    call = FORCED[format].replace('{"city": "Oslo"}', arguments)
    said, why = spoken.said(asked, spoken.tokenizer.encode(call))
    assert (said.content, why) == ("", "tool_calls")
    assert [each["function"]["arguments"] for each in said.tool_calls] == [arguments]


async def test_harmony_reasons_in_messages_of_its_own() -> None:
    spoken, fields = model("harmony"), {"tools": [WEATHER], **ANY_OBJECT}
    analysis = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>{}"
    assert spoken.takes(await spoken.guide("none", **fields), analysis + analysis + final)
    assert spoken.takes(await spoken.guide("none", **fields), analysis + FORCED["harmony"])
    assert not spoken.takes(await spoken.guide("none", **fields), analysis)
    assert not spoken.takes(await spoken.guide("none", **fields), "<|channel|>final<|message|>Hello")


@pytest.mark.parametrize(
    ("format", "fields", "message"),
    [
        (
            "glm",
            {"tool_choice": "required"},
            "tool_choice: this model writes its calls as glm, which cannot be forced; use 'auto'.",
        ),
        (
            "glm",
            ANY_OBJECT,
            "response_format: this model writes its calls as glm, which cannot be forced; "
            "leave out the tools, or response_format.",
        ),
        ("none", {"tool_choice": "required"}, "tool_choice: this model cannot call tools; leave it out."),
    ],
)
async def test_calls_that_cannot_be_forced_are_refused_by_name(
    format: str, fields: dict[str, Any], message: str
) -> None:
    refused = await refusal(format, tools=[WEATHER], **fields)
    assert (refused.type, refused.message) == ("unsupported", message)


TYPES: dict[str, tuple[Schema, list[str], list[str]]] = {
    "string": ({"type": "string"}, ["Oslo", "", "two\nlines", "<b> </i>", "nullify", "5"], ["null", "a</parameter>b"]),
    "words": ({"enum": ["red", "dark blue", None]}, ["red", "dark blue", "null"], ["blue", ""]),
    "word": ({"const": "x"}, ["x"], ["y"]),
    "string words": ({"type": "string", "enum": ["red", 3, "null"]}, ["red"], ["3", "null"]),
    "pattern": ({"type": "string", "pattern": "^[a-z/]+(-[0-9]{2})?$"}, ["ab/c-12", "x"], ["", "ab-1", "Ab", "a\n"]),
    "escaped": ({"type": "string", "pattern": r"^a\\/[/b]$"}, [r"a\//", r"a\/b"], ["a/b", r"a\b"]),
    "ends": ({"type": "string", "pattern": "^a|b$"}, ["ac", "cb"], ["ca", "bc"]),
    "part": ({"type": "string", "pattern": "b+"}, ["abc", "b", "x\nb"], ["", "ac"]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "Zoë"], ["", "a", "abcd"]),
    "untyped": ({"description": "any"}, ["Oslo", "[1]", "null"], []),
    "numbers": ({"type": ["integer", "null"]}, ["5", "null"], ["x", "true"]),
    "large": ({"type": "integer", "maximum": 10**20}, ["1"], ["1" + 18 * "0" + "1"]),
    "either": (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
        ["Oslo", "[1]"],
        ['["a"]', "{}"],
    ),
    "integer": ({"type": "integer", "minimum": 0}, ["12"], ["-1", "1.5", "x", "9" * 17]),
    "number": ({"type": "number"}, ["-1.5", "2"], ["x", "1e999"]),
    "boolean": ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    "list": ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]", "[]"], ["1", '["a"]']),
    "reference": ({"$ref": "#/$defs/point"}, ['{"x": 1}'], ["1", '{"x": "a"}']),
    "optional": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["Oslo", "null"], []),
    "nullable": ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, ['{"x": 1}', "null"], ["Oslo"]),
    "optional integer": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["5", "null"], ["x", "1.5"]),
    "optional number": ({"anyOf": [{"type": "null"}, {"type": "number"}]}, ["-1.5", "5", "null"], ["x", "true"]),
    "optional boolean": ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, ["true", "false", "null"], ["1", "x"]),
    "optional text": ({"type": ["string", "null"]}, ["Oslo", "null", "Not 5"], []),
    "list of types": ({"type": ["string", "integer", "boolean"], "minLength": 2}, ["Oslo", "5", "true"], ["x"]),
    "optional words": ({"type": ["string", "null"], "enum": ["a", "b", None]}, ["a", "null"], ["c", "5"]),
    "list or text": ({"type": ["array", "string"], "items": {"type": "integer"}}, ["[1]", "Oslo"], ['["a"]']),
    "referred integer": ({"$ref": "#/$defs/count"}, ["5"], ["x", "0"]),
    "optional reference": ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, ["5", "null"], ["x", "0"]),
    "annotated": (
        {"type": "string", "example": "a", "x-order": 1, "readOnly": True, "nullable": False, "discriminator": {}},
        ["Oslo"],
        [],
    ),
    "date": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2021-02-29", "today"]),
    "format beside a pattern": ({"type": "string", "format": "sku", "pattern": "^[A-Z]+$"}, ["AB"], ["ab"]),
    "anything": ({}, ["Oslo"], []),
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_a_parameter_between_tags_is_held_to_its_type(kind: str) -> None:
    asked, good, bad = TYPES[kind]
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    count = {"type": "integer", "minimum": 1}
    schema = {"type": "object", "properties": {"a": asked}, "$defs": {"point": point, "count": count}}
    fields = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "tool_choice": "required",
    }
    for value in good + bad:
        call = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        spoken = model("qwen3_coder")
        assert spoken.takes(spoken.quick_guide(request(**fields)), call) == (value in good), value
        if value in good:
            said, _ = spoken.said(request(**fields), spoken.tokenizer.encode(call))
            assert [each["function"]["name"] for each in said.tool_calls] == ["f"]
            Draft202012Validator(schema).validate(json.loads(said.tool_calls[0]["function"]["arguments"]))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"two words": {}}}, "cannot name a parameter 'two words'"),
        ({"anyOf": [{"properties": {"a": {}}}]}, "tools: f: this model's calls do not support parameters with anyOf"),
        ({"properties": {}, "minProperties": 1}, "with minProperties"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}]}}}, "with oneOf"),
        ({"properties": {"a": {"type": "string", "allOf": [{"minLength": 2}]}}}, "with allOf"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "with not"),
        ({"properties": {"a": {"anyOf": [{"anyOf": [{"type": "string"}]}]}}}, "with anyOf"),
        ({"properties": {"a": {"properties": {"b": {}}}}}, "with properties"),
        ({"properties": {"a": {"minLength": 2}}}, "with minLength"),
        ({"properties": {"a": {"type": "string", "format": "binary"}}}, "with format binary"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "with pattern (?=a)b"),
        ({"properties": {"a": {"type": "string", "pattern": "a^b"}}}, "with pattern a^b"),
        ({"properties": {"a": {"type": "integer", "minimum": 2**60}}}, "with a bound beyond 2**53"),
        ({"properties": {"a": {"enum": [1, 2]}}}, "with an enum of numbers without their type"),
        ({"properties": {"a": {"type": "string", "const": "null"}}}, "with this const"),
        ({"properties": {"a": True}}, "with a schema of true"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "with $ref #/properties/a"),
        ({"properties": {}, "required": ["a"], "additionalProperties": False}, "with required"),
        ({"properties": {"a": {}}, "required": "a"}, "the parameters of f are not a JSON Schema"),
        ({"properties": {"a": {}}, "required": [1]}, "the parameters of f are not a JSON Schema"),
        ({"properties": {"a": 5}}, "the parameters of f are not a JSON Schema"),
        ({"properties": {"a": {"type": "string", "maxLength": False}}}, "the parameters of f are not a JSON Schema"),
        ({"properties": {"a": {"type": "string", "maxLength": None}}}, "the parameters of f are not a JSON Schema"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "the parameters of f are not a JSON Schema"),
        ({"type": "string"}, "the parameters of f must be of type object"),
    ],
)
async def test_parameters_that_cannot_stand_between_tags_are_refused(schema: Schema, words: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert words in (await refusal("qwen3_coder", tools=tools, tool_choice="required")).message


UNION: Schema = {
    "oneOf": [
        {"type": "object", "properties": {"kind": {"const": kind}, "n": {"type": "integer"}}, "required": ["kind"]}
        for kind in ("a", "b")
    ]
}
WHOLE: Schema = {
    "type": "object",
    "properties": {
        "ids": {
            "type": "array",
            "items": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
            "maxItems": 2,
        },
        "word": {
            "type": "object",
            "properties": {"w": {"type": "string", "pattern": '^[^"]{1,3}$'}},
            "required": ["w"],
        },
        "pets": {"type": "array", "items": UNION, "maxItems": 2},
        "more": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        "paid": {
            "type": "object",
            "properties": {"card": {"type": "null"}, "code": {"type": "null"}},
            "dependentRequired": {"card": ["code"]},
            "additionalProperties": False,
        },
    },
    "required": ["ids", "word", "pets"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("format", FORCED)
def test_a_functions_parameters_are_held_as_an_answers_schema_is(format: str) -> None:
    spoken, ended = model(format), 0
    asked = request(
        tools=[{"type": "function", "function": {"name": "f", "parameters": WHOLE}}],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    for seed in range(seeds := examples(12)):
        guide = spoken.quick_guide(asked)
        tokens = walk(guide, {EOS, OTHER_EOS}, spoken.count, random.Random(seed), [spoken.tokenizer.encode('"')])
        for call in spoken.said(asked, tokens)[0].tool_calls if tokens else ():
            Draft202012Validator(WHOLE).validate(json.loads(call["function"]["arguments"]))
            ended += 1
    assert ended >= seeds // 4


async def test_a_functions_parameters_are_refused_with_the_place() -> None:
    for format in FORCED:
        bound = {"items": {"type": "integer", "maximum": 2**53 + 1}, "type": "array"}
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": bound}}}}]
        refused = await refusal(format, tools=tools, tool_choice="required")
        assert refused.type == "invalid_request"
        assert refused.message.startswith("tools: f: a: #/" if format == "qwen3_coder" else "tools: f: #/properties/a/")
        assert "items/maximum: a bound beyond 2**53 cannot be enforced exactly; " in refused.message


URGES = {"qwen3_coder": ["\n</parameter>", "null", "</"], "harmony": ["<|end|>"]}


@pytest.mark.parametrize("format", FORCED)
def test_whatever_the_grammar_of_calls_allows_is_a_call(format: str) -> None:
    spoken, ended = model(format), 0
    urges = [spoken.tokenizer.encode(word) for word in URGES.get(format, [])]
    for seed in range(seeds := examples(25)):
        tools = _functions(format, seed)
        asked = request(tools=tools, tool_choice="required", parallel_tool_calls=seed % 2 == 0)
        dice = random.Random(seed)
        if not (tokens := walk(spoken.quick_guide(asked), {EOS, OTHER_EOS}, spoken.count, dice, urges)):
            continue
        said, why = spoken.said(asked, tokens)
        assert (said.content, why) == ("", "tool_calls")
        ended += 1
        for call in said.tool_calls:
            asked_for = next(each["function"] for each in tools if each["function"]["name"] == call["function"]["name"])
            Draft202012Validator(asked_for["parameters"]).validate(json.loads(call["function"]["arguments"]))
    assert ended >= 0.8 * seeds


def _functions(format: str, seed: int) -> list[dict[str, Any]]:
    """Return functions whose calls can be forced."""
    objects = [each for each in map(schema, range(1000 * seed, 1000 * seed + 150)) if each.get("type") == "object"]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": each}} for each in objects]
    named = list[dict[str, Any]]()
    for name in ("weather", "weather2", "clo-ck_2"):
        while tools and not _forcible(format, tool := tools.pop(0)):
            pass
        named.append({**tool, "function": {**tool["function"], "name": name}})
    return named


def _forcible(format: str, tool: dict[str, Any]) -> bool:
    try:
        model(format).quick_guide(request(tools=[tool], tool_choice="required"))
    except JobFailure:
        return False
    return True


@pytest.mark.parametrize("format", FORCED)
def test_a_function_without_parameters_gets_an_empty_object(format: str) -> None:
    for parameters in ({}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}, "required": []}}):
        tools = [{"type": "function", "function": {"name": "clock", **parameters}}]
        asked = request(tools=tools, tool_choice="required", parallel_tool_calls=False)
        urges = [model(format).tokenizer.encode("<|end|>")] if format == "harmony" else []
        tokens = walk(model(format).quick_guide(asked), {EOS, OTHER_EOS}, model(format).count, random.Random(1), urges)
        said, _ = model(format).said(asked, tokens)
        (call,) = said.tool_calls
        assert json.loads(call["function"]["arguments"]) == {}


@settings(deadline=None)
@given(words=st.lists(st.sampled_from(SIGNS), max_size=6), count=st.integers(1, 2))
@pytest.mark.parametrize("format", ["hermes", "mistral", "harmony"])
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {}], ids=["forced", "free"])
def test_markers_within_a_calls_arguments_are_theirs(
    format: str, fields: dict[str, Any], words: list[str], count: int
) -> None:
    arguments, count = json.dumps({"city": "".join(words)}, ensure_ascii=False), 1 if format == "harmony" else count
    begins, ends = FORCED[format].split('{"city": "Oslo"}')
    encode = model(format).tokenizer.encode
    tokens = [*encode(begins), *spelled(arguments), *encode(ends)] * count
    said, why = model(format).said(request(tools=[WEATHER], **fields), tokens)
    assert (said.content, said.reasoning, why) == ("", "", "tool_calls")
    assert [json.loads(call["function"]["arguments"]) for call in said.tool_calls] == [json.loads(arguments)] * count
