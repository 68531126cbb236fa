"""Calls that a request wants, in each model's own form."""

import json
import random
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from tests.selection import examples
from tests.text.dialects.reading import BY_NAME
from tests.text.dialects.rows import WRITTEN
from tests.text.guided import (
    ANY_OBJECT,
    CLOCK,
    EOS,
    FORCED,
    OTHER_EOS,
    SIGNS,
    WEATHER,
    Model,
    by,
    model,
    refusal,
    request,
    spelled,
)
from tests.text.structured import Schema, schema, walk
from worker.errors import JobFailure
from worker.text.dialects.dialect import Dialect
from worker.text.dialects.pythonic import GemmaCalls
from worker.text.dialects.tag_calls import TagCalls
from worker.text.grammar.builder import Grammars, Markup, OutputConstraint
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.sandbox import compile_grammar
from worker.text.grammar.tool_grammars import HeldFunction
from worker.text.prompt.prompt import Prompt


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


@pytest.mark.parametrize("dialect", sorted(BY_NAME))
async def test_a_dialect_may_write_a_forced_call_as_its_models_do(dialect: str) -> None:
    fields = {"tools": [WEATHER, CLOCK], "tool_choice": "required"}
    spoken = model(dialect)
    for calls in ([("weather", {"city": "Oslo"})], [("weather", {"city": "Oslo"}), ("clock", {})]):
        text = BY_NAME[dialect].write(calls)
        assert spoken.takes(await spoken.guide(**fields), text)
        said, why = spoken.said(request(**fields), spoken.tokenizer.encode(text))
        read = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in said.tool_calls]
        assert (said.content.strip(), read, why) == ("", calls, "tool_calls")
    for other in ([("weather", {"town": "Oslo"})], [("rain", {})], [("weather", {})]):
        assert not spoken.takes(await spoken.guide(**fields), BY_NAME[dialect].write(other))


NOW = {"type": "function", "function": {"name": "now"}}
DAYS = {"city": {"type": "string"}, "days": {"type": "integer"}}
OSLO_AND_DAYS = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": DAYS, "required": ["city"]}},
}


@pytest.mark.parametrize("dialect", sorted({*WRITTEN} - {"longcat"}))  # whose row calls a function in JSON
async def test_a_forced_call_may_be_what_models_are_known_to_write(dialect: str) -> None:
    fields = {"tools": [OSLO_AND_DAYS, NOW], "tool_choice": "required"}
    assert model(dialect).takes(await model(dialect).guide(**fields), WRITTEN[dialect])


NS = "]<]minimax[>["
NESTED = {
    "type": "object",
    "properties": {
        "to": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}},
        "rows": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "number"}}}, "maxItems": 2},
    },
    "required": ["to"],
}


@pytest.mark.parametrize(
    ("members", "fine"),
    [
        (f"{NS}<to>{NS}<city>Oslo{NS}</city>{NS}<zip>5{NS}</zip>{NS}</to>", True),
        (f"{NS}<to>{NS}<zip>5{NS}</zip>{NS}</to>{NS}<rows>{NS}<item>{NS}<n>1{NS}</n>{NS}</item>{NS}</rows>", True),
        (f"{NS}<to>{NS}<zip>a{NS}</zip>{NS}</to>", False),
        (f"{NS}<rows>{NS}</rows>", False),
    ],
)
async def test_a_forced_call_may_have_elements(members: str, fine: bool) -> None:
    tools = [{"type": "function", "function": {"name": "order", "parameters": NESTED}}]
    text = f'{NS}<tool_call>\n{NS}<invoke name="order">{members}{NS}</invoke>\n{NS}</tool_call>'
    spoken = model("minimax_m3")
    assert spoken.takes(await spoken.guide(tools=tools, tool_choice="required"), text) == fine


@pytest.mark.parametrize("schema", [None, {"type": "object"}])
@pytest.mark.parametrize("many", [True, False])
def test_a_forced_call_begins_after_the_opening_in_the_prompt(schema: Schema | None, many: bool) -> None:
    constraint = OutputConstraint(schema, (HeldFunction("clock"),), allows_many=many)
    markup = Markup({}, "functionary_v3.2", opened=">>>", answer=">>>all\n")
    grammar = Grammars(markup).grammar(constraint, has_thought=False)
    for text, fine in (
        ("clock\n{}", True),
        ("clock\n{}>>>clock\n{}", many),
        (">>>clock\n{}", False),
        ("all\n{}", schema is not None),
    ):
        matcher = compile_grammar(LLTokenizer("byte"), grammar)
        assert (matcher.try_consume_tokens([*text.encode()]) == len(text)) == fine, text


DEFINITIONS: Schema = {
    "point": {
        "type": "object",
        "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "y": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "tree": {
        "type": "object",
        "properties": {
            "leaf": {"type": "boolean"},
            "more": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
        },
        "required": ["leaf"],
        "additionalProperties": False,
    },
}
POINT_OR_NULL: Schema = {"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}
KINDS: dict[str, Schema] = {
    "string": {"type": "string"},
    "short string": {"type": "string", "minLength": 1, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-z]{1,3}-[0-9]$"},
    "format": {"type": "string", "format": "date"},
    "integer": {"type": "integer"},
    "bounded integer": {"type": "integer", "minimum": -5, "maximum": 300},
    "number": {"type": "number"},
    "bounded number": {"type": "number", "minimum": 0, "maximum": 1},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "words": {"type": "string", "enum": ["red", "dark blue", "null", "5"]},
    "values": {"enum": [1, "a", None, True, 2.5, [1, "x"], {"k": []}]},
    "odd words": {"enum": ["", "it's", 'say "x"', "a\\b", "a\nb", "a/b", "é\t"]},
    "constant": {"const": "x y"},
    "object": {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"type": "integer"}},
               "required": ["a"], "additionalProperties": False},
    "list": {"type": "array", "items": {"type": ["string", "integer"], "maxLength": 3}, "maxItems": 3},
    "list of objects": {"type": "array", "maxItems": 2, "items": {
        "type": "object", "properties": {"t": {"enum": ["x", "y"]}, "c": POINT_OR_NULL}, "required": ["c"],
        "additionalProperties": False}},
    "names": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
    "nullable": {"type": ["string", "null"], "maxLength": 4},
    "optional number": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "many types": {"type": ["string", "number", "boolean", "null"], "maxLength": 4},
    "text or bounded": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer", "minimum": 3, "maximum": 9}]},
    "text or list": {"anyOf": [{"type": "string", "maxLength": 6},
                               {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
    "reference": {"$ref": "#/$defs/point"},
    "optional reference": POINT_OR_NULL,
    "tree": {"$ref": "#/$defs/tree"},
    "one of": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
    "anything": {},
}  # fmt: skip
ONLY_JSON: dict[str, Schema] = {  # what cannot be a text between tags
    "text of one of": {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "boolean"}]},
    "text of all of": {"allOf": [{"type": "string"}, {"maxLength": 4}]},
}
OF_A_CLASS = ("hermes", "mistral", "glm", "kimi_k3", "lfm2", "gemma4")  # tags without and with types
ROWS = [*OF_A_CLASS, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted({*BY_NAME} - {*OF_A_CLASS}))]


def _urges(spoken: Model, dialect: Dialect) -> list[list[int]]:
    """Return words that end a value, or seem to, as an answer would."""
    words = ['"', "'", "null", "5", "</", "<![CDATA["]
    if isinstance(dialect, TagCalls):
        ends = dialect.line + dialect.end_of("a")
        words += [ends, ends, ends + dialect.end, dialect.end, dialect.closing, dialect.openings[0]]
    if isinstance(dialect, GemmaCalls):
        words += [dialect.quote, dialect.quote]
    return [spoken.tokenizer.encode(word) for word in words if word]


@pytest.mark.parametrize("name", ROWS)
def test_whatever_a_dialects_grammar_allows_is_read_back_and_validates(name: str) -> None:
    spoken, walks, ended = model(name), 0, 0
    urges = _urges(spoken, BY_NAME[name])
    seeds = 4 if name in OF_A_CLASS else 2  # the others differ from one of these in their markers
    for number, (kind, asked_for) in enumerate((KINDS | ({} if name == "minicpm5" else ONLY_JSON)).items()):
        parameters = {
            "type": "object",
            "properties": {"a": asked_for, "b": {"type": "boolean"}},
            "required": ["a"],
            "$defs": DEFINITIONS,
        }
        tools = [{"type": "function", "function": {"name": each, "parameters": parameters}} for each in ("f", "f2")]
        for seed in range(seeds) if examples(4) > 1 else [number % 2]:
            asked = request(tools=tools, tool_choice="required", parallel_tool_calls=seed % 2 == 1)
            tokens = walk(spoken.quick_guide(asked), {EOS, OTHER_EOS}, spoken.count, Random(f"{kind} {seed}"), urges)
            walks += 1
            if not tokens:
                continue
            ended += 1
            said, why = spoken.said(asked, tokens)
            assert (said.content.strip(), why) == ("", "tool_calls")
            for call in said.tool_calls:
                Draft202012Validator(parameters).validate(json.loads(call["function"]["arguments"]))
    assert ended >= 0.6 * walks


@pytest.mark.parametrize("name", ROWS)
def test_one_parameter_that_cannot_be_a_tag_leaves_the_other_tools_as_they_are(name: str) -> None:
    odd = {"type": "object", "properties": {"two words": {"oneOf": [{"type": "string"}, {"type": "integer"}]}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "odd", "parameters": odd}}]
    spoken, asked = model(name), request(tools=tools, tool_choice="required", parallel_tool_calls=False)
    if name == "minicpm5":  # its reader takes no JSON
        with pytest.raises(JobFailure) as refused:
            spoken.quick_guide(asked)
        assert refused.value.message.startswith("tools: odd: this model's calls do not support parameters with ")
        return
    assert spoken.takes(spoken.quick_guide(asked), BY_NAME[name].write([("weather", {"city": "Oslo"})]))
    tokens = walk(
        spoken.quick_guide(request(tools=tools[1:], tool_choice="required", parallel_tool_calls=False)),
        {EOS, OTHER_EOS}, spoken.count, Random(1), _urges(spoken, BY_NAME[name]),
    )  # fmt: skip
    assert [call["function"]["name"] for call in spoken.said(asked, tokens)[0].tool_calls] == ["odd"]


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


async def test_calls_of_a_model_without_calls_cannot_be_forced() -> None:
    refused = await refusal("none", tools=[WEATHER], tool_choice="required")
    message = "tool_choice: this model cannot call tools; leave it out."
    assert (refused.type, refused.message) == ("unsupported", message)


TYPES: dict[str, tuple[Schema, list[str], list[str]]] = {
    "string": ({"type": "string"}, ["Oslo", "", "two\nlines", "<b> </i>", "null", "5"], ["a</parameter>b"]),
    "words": ({"enum": ["red", "dark blue", None]}, ["red", "dark blue", "null"], ["blue", ""]),
    "word": ({"const": "x"}, ["x"], ["y"]),
    "string words": ({"type": "string", "enum": ["red", 3, "null"]}, ["red", "null"], ["3"]),
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
    "integer": ({"type": "integer", "minimum": 0}, ["12", "9" * 17], ["-1", "1.5", "x"]),
    "number": ({"type": "number"}, ["-1.5", "2"], ["x", "1e999"]),
    "boolean": ({"type": "boolean"}, ["true", "False"], ["TRUE", "1"]),
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
        ({"properties": {"two words": {}}}, "with the name two words"),
        ({"anyOf": [{"properties": {"a": {}}}]}, "with anyOf"),
        ({"properties": {}, "minProperties": 1}, "with minProperties"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}]}}}, "with oneOf"),
        ({"properties": {"a": {"type": "string", "allOf": [{"minLength": 2}]}}}, "with allOf"),
        ({"properties": {"a": {"minLength": 2}}}, "with minLength"),
        ({"properties": {"a": {"type": "array", "items": {"const": "</param>"}}}}, "with a tag of its calls in them"),
    ],
)
async def test_parameters_that_cannot_be_tags_are_written_in_json_or_refused(schema: Schema, words: str) -> None:
    asked = {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}],
        "tool_choice": "required",
    }
    refused = await refusal("minicpm5", **asked)
    assert (refused.type, refused.param) == ("unsupported", "tools")
    assert refused.message == f"tools: f: this model's calls do not support parameters {words}."
    assert not (await model("qwen3_coder").guide(**asked)).error


@pytest.mark.parametrize("format", ["qwen3_coder", "minicpm5", "lfm2", "gemma4"])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "not is not supported"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "look-ahead is not supported"),
        ({"properties": {"a": {"type": "string", "pattern": "a^b"}}}, "^ and $ are supported only at the ends"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "it refers back to itself"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "#/$defs/none does not exist"),
        ({"properties": {"a": {}}, "required": "a"}, "#/required: it must list names"),
        ({"properties": {"a": {}}, "required": [1]}, "#/required: it must list names"),
        ({"properties": {"a": 5}}, "a schema must be an object, true or false"),
        ({"properties": {"a": {"type": "string", "maxLength": False}}}, "maxLength: false is not a whole number"),
        ({"type": "string"}, "the parameters of f must be of type object"),
    ],
)
async def test_parameters_that_no_grammar_holds_are_refused_of_a_strict_function(
    format: str, schema: Schema, words: str
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    refused = await refusal(format, tools=tools, tool_choice="required")
    assert refused.type == "invalid_request"
    assert words in refused.message


# Schemas of one tool that cannot be held, and what is left of them: arguments that are taken, and that are not.
ODD: dict[str, tuple[Schema, str, str]] = {
    "format": ({"type": "string", "format": "binary"}, '"x"', "1"),
    "pattern": ({"type": "string", "pattern": r"^(?!https?://)[\w.-]+$", "maxLength": 9}, '"a.org"', '"a.org/abcde"'),
    "type": ({"type": "str"}, '"x"', ""),
    "not": ({"type": "string", "not": {"const": "x"}}, '"x"', "1"),
    "unique": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", '["a"]'),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1", '"a"'),
    "elsewhere": ({"$ref": "https://example.org/schema"}, "1", ""),
    "circle": ({"$ref": "#/properties/odd"}, "1", ""),
    "no schema": (5, "1", ""),  # type: ignore[dict-item]
    "contrary": ({"type": "string", "enum": [1]}, "1", ""),
    "slow": ({"type": "string", "pattern": r"\s.{1,60}\s"}, '"x"', ""),
}


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "harmony", "lfm2", "gemma4", "minicpm5"])
@pytest.mark.parametrize("odd", ODD)
async def test_what_cannot_be_held_of_a_forced_call_is_left_out_and_named(format: str, odd: str) -> None:
    schema, taken, refused = ODD[odd]
    parameters = {"type": "object", "properties": {"odd": schema, "days": {"type": "integer"}}, "required": ["odd"]}
    tools = [WEATHER, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    spoken, warnings = model(format), list[str]()
    asked = request(tools=tools, tool_choice={"type": "function", "function": {"name": "f"}})
    guide = await spoken.guides.create(asked, Prompt((1,), "closed"), warn=warnings.append)
    assert isinstance(guide, RowGrammar)
    assert [line.startswith("tools: f: ") for line in warnings] == [True], warnings
    if format == "hermes":
        for arguments, takes in ((taken, True), (refused, False)):
            guide.reset()
            call = f'<tool_call>\n{{"name": "f", "arguments": {{"odd": {arguments}}}}}\n</tool_call>'
            assert not arguments or spoken.takes(guide, call) == takes
        if odd not in ("contrary", "slow"):  # the rest is held
            guide.reset()
            call = f'<tool_call>\n{{"name": "f", "arguments": {{"odd": {taken}, "days": "x"}}}}\n</tool_call>'
            assert not spoken.takes(guide, call)


async def test_an_unknown_format_is_an_annotation_of_a_strict_function_too_and_not_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "binary", "maxLength": 3}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    asked, warnings = request(tools=tools, tool_choice="required"), list[str]()
    assert await model("hermes").guides.create(asked, Prompt((1,), "closed"), warn=warnings.append)
    assert [line.partition("format: ")[0] for line in warnings] == ["tools: f: #/properties/a/"]
    refused = await refusal(tools=tools, **by(schema))
    assert (refused.param, "binary is not supported" in refused.message) == ("response_format", True)


@pytest.mark.parametrize("format", ["hermes", "qwen3_coder", "kimi_k3", "lfm2", "gemma4"])
@pytest.mark.parametrize(
    "asked",
    [
        {"type": "string", "maxLength": 2**31 - 1},
        {"type": "string", "minLength": 100_000},
        {"type": "array", "items": {"type": "string"}, "maxItems": 10**20},
        {"anyOf": [{"$ref": "#/$defs/fan0"}, {"$ref": "#/$defs/fan0"}]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(300)}},
    ],
    ids=["no limit", "long", "many items", "fan", "wide"],
)
async def test_large_parameters_are_held_in_some_form(format: str, asked: Schema) -> None:
    fan: Schema = {f"fan{i}": {"anyOf": [{"$ref": f"#/$defs/fan{i + 1}"}] * 2} for i in range(30)}
    parameters = {"type": "object", "properties": {"a": asked}, "$defs": {**fan, "fan30": {"type": "null"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert not (await model(format).guide(tools=tools, tool_choice="required")).error


def test_a_call_may_follow_the_name_of_its_recipient() -> None:
    constraint = OutputConstraint(None, (HeldFunction("clock"),), allows_many=False)
    call = BY_NAME["muse_spark"].write([("clock", {})])
    for header, text, fine in (
        (("to=", "<|message|>"), f" to=clock<|message|>{call}", True),
        (("to=", "<|message|>"), call, True),
        ((), f" to=clock<|message|>{call}", False),
    ):
        grammar = Grammars(Markup({}, "muse_spark", header)).grammar(constraint, has_thought=False)
        matcher = compile_grammar(LLTokenizer("byte"), grammar)
        assert (matcher.try_consume_tokens([*text.encode()]) == len(text)) == fine


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
        function = {"name": "f", "parameters": {"properties": {"a": bound}}, "strict": True}
        tools = [{"type": "function", "function": function}]
        refused = await refusal(format, tools=tools, tool_choice="required")
        assert refused.type == "invalid_request"
        place = "a: items: #/" if format == "qwen3_coder" else "#/properties/a/items/"
        assert refused.message.startswith(f"tools: f: {place}maximum: ")
        assert "maximum: a bound beyond 2**53 cannot be enforced exactly; " in refused.message


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
