import json
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from schemas import ChatRequest
from scripts.stack import TINY_CHAT
from tests.text.structured import Schema, allowed, schema, walk
from worker.engine.upstream import load_tokenizer
from worker.engine.words import Words
from worker.errors import Refusal
from worker.text.detokenize import Vocabulary
from worker.text.dialect import Dialect
from worker.text.grammar import Grammars, wish_of
from worker.text.guide import GrammarGuide, Guides
from worker.text.harmony import MARKERS
from worker.text.output import Output, Said
from worker.text.prompt import Prompt, Thinking
from worker.text.trial import compiled

EOS, OTHER_EOS = 2, 0
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
# Of formats, and the tokens that they need besides the tiny model's.
ADDED = {
    "json_tools": [],
    "mistral": ["[TOOL_CALLS]", "[ARGS]"],
    "mistral_list": ["[TOOL_CALLS]"],
    "qwen3_coder": [],
    "harmony": [*MARKERS, "<|constrain|>"],
    "glm47": [],
    "none": [],
}
FORCED = {
    "json_tools": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Oslo"}',
    "mistral_list": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "a1B2c3D4e"}]',
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}',
}


class Model:
    """The tiny model's tokenizer, were it another model's."""

    def __init__(self, format: str) -> None:
        self.tokenizer = Words(load_tokenizer(_folder(format), eos_token_ids=[EOS, OTHER_EOS]))
        self.count = len(self.tokenizer.tokens)
        self.dialect = Dialect(self.tokenizer)
        self.guides = Guides(self.tokenizer, self.count)
        self.vocabulary = LLTokenizer(str(self.tokenizer.definition), eos_token=[OTHER_EOS, EOS])

    async def guide(self, thinking: Thinking = "closed", **fields: Any) -> GrammarGuide:
        guide = await self.guides.guide(request(**fields), Prompt((1,), thinking), self.dialect)
        assert guide
        return guide

    def quick_guide(self, asked: ChatRequest) -> GrammarGuide:
        """Without the trial."""
        wish = wish_of(asked)
        assert wish
        grammar = Grammars(self.tokenizer).of(wish, reasoned=False)
        return GrammarGuide(compiled(self.vocabulary, grammar), frozenset({EOS, OTHER_EOS}))

    def takes(self, guide: GrammarGuide, text: str) -> bool:
        """Whether all of it is allowed, and may be the end."""
        for token in self.tokenizer.encode(text):
            if token not in allowed(guide, self.count):
                return False
            guide.accept(token)
        return guide.broken is None and {EOS, OTHER_EOS} <= set(allowed(guide, self.count))

    def said(self, asked: ChatRequest, tokens: list[int]) -> tuple[Said, str]:
        output = Output(Vocabulary(self.tokenizer), self.dialect, asked, "none", "job")
        said = sum((output.feed(token) for token in tokens), Said()) + output.flush()
        return said, output.finish_reason("stop")


def _folder(format: str) -> Path:
    folder = Path(mkdtemp())
    definition = json.loads((TINY_CHAT / "tokenizer.json").read_text())
    for token in ADDED[format]:
        entry = {**definition["added_tokens"][0], "id": 1014 + len(definition["added_tokens"]), "content": token}
        definition["added_tokens"].append(entry)
    config = json.loads((TINY_CHAT / "tokenizer_config.json").read_text())
    if format in ("none", "harmony"):
        config["chat_template"] = "{{ messages }}"
    elif format.startswith("mistral"):
        config["chat_template"] = "[TOOL_CALLS][ARGS]" if format == "mistral" else "[TOOL_CALLS]"
    else:
        config["tool_parser_type"] = format
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    shutil.copyfile(TINY_CHAT / "config.json", folder / "config.json")
    return folder


@cache
def model(format: str = "json_tools") -> Model:
    return Model(format)


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "Hello"}], **fields})


def by(asked: Schema) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked}}}


ANY_OBJECT = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize("indent", [None, 1, 2, 4, "\t"])
async def test_json_is_taken_as_people_write_it(indent: int | str | None) -> None:
    value = {"name": "Zoë 🎈", "list": [1, 2.5e3, {"deep": [True, None, {}]}], "empty": [], "quote": 'a "b" \\ \n'}
    assert model().takes(await model().guide(**ANY_OBJECT), json.dumps(value, indent=indent, ensure_ascii=False))


@pytest.mark.parametrize("text", ['{"a":1}', '{ "a" : 1 }', '{"a": 1 ,\n\t"b":\n  2\n}', "{}", "{\n}"])
async def test_space_may_stand_where_json_has_it(text: str) -> None:
    assert model().takes(await model().guide(**ANY_OBJECT), text)


@pytest.mark.parametrize(
    "text", ["[1]", "1", '{"a": 1', "{'a': 1}", '{"a":   1}', '{"a":\n\n1}', '{"a": 1}}', '{"a": 1}\n', ' {"a": 1}', ""]
)
async def test_what_is_no_json_object_or_never_gets_on_is_not(text: str) -> None:
    assert not model().takes(await model().guide(**ANY_OBJECT), text)


async def test_an_answer_ends_with_its_json_and_not_before() -> None:
    guide = await model().guide(**by({"enum": [True]}))
    for token in model().tokenizer.encode("true"):
        assert not {EOS, OTHER_EOS} & set(allowed(guide, 1024))
        guide.accept(token)
    assert set(allowed(guide, 1024)) == {EOS, OTHER_EOS}


async def test_the_end_itself_changes_nothing() -> None:
    guide = await model().guide(**ANY_OBJECT)
    for token in (*model().tokenizer.encode("{}"), EOS, OTHER_EOS):
        guide.accept(token)
    assert guide.broken is None


async def test_a_property_cannot_be_spelled_another_way_than_its_schema_knows() -> None:
    asked = by({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert model().takes(await model().guide(**asked), '{"a": 1, "b": "x"}')
    for text in (r'{"\u0061": "x"}', '{"a": 1, "a": "x"}', '{"a": "x"}'):
        assert not model().takes(await model().guide(**asked), text)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"exclusiveMinimum": 3, "maximum": 3.5}, "3.25", "3"),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, "-0.25", "-0"),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, "0.1", "0.0"),
        ({"exclusiveMinimum": 0}, "0.001", "0"),
    ],
)
def test_a_bound_that_is_excluded_stays_out(bounds: Schema, inside: str, outside: str) -> None:
    asked = request(**by({"type": "number", **bounds}))
    assert model().takes(model().quick_guide(asked), inside)
    assert not model().takes(model().quick_guide(asked), outside)


async def refusal(format: str = "json_tools", **fields: Any) -> Refusal:
    with pytest.raises(Refusal) as refused:
        await model(format).guide(**fields)
    return refused.value


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"type": "object", "properties": {"a": 5}}, "must be an object or boolean"),
        ({"type": "object", "required": "a"}, "Expected array for 'required'"),
        ({"type": "string", "pattern": "["}, "unclosed character class"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"type": "string", "format": "binary"}, "Unknown format: binary"),
        ({"$ref": "#/$defs/none"}, "'/$defs/none' does not exist"),
        ({"$ref": "https://example.org/schema"}, "'https://example.org/schema' is not present"),
        ({"$ref": "#"}, "NoExtension"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, '"not"'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"enum": []}, "Unsatisfiable"),
        ({"type": "object", "minProperties": 2}, "minProperties above 1"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    ],
)
async def test_a_schema_that_cannot_be_held_to_is_refused_with_the_reason(asked: Schema, words: str) -> None:
    refused = await refusal(**by(asked))
    assert refused.type == "invalid_request"
    assert words in refused.message
    assert len(refused.message) < 400


async def test_a_refusal_says_where_the_schema_stands() -> None:
    assert (await refusal(**by({"type": "nonsense"}))).message.startswith("response_format: ")
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"properties": {"a": {"type": "x"}}}}}
    for fields in ({"tool_choice": "required"}, by(CITY)):
        refused = await refusal(tools=[WEATHER, bad], **fields)
        assert refused.message == "tools: bad: no answer can be held to this schema: Invalid type: x"


def links(count: int) -> Schema:
    chain: Schema = {f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$defs": chain | {f"d{count}": {}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "asked",
    [
        links(8_000),  # overflows the stack
        {"prefixItems": [{"type": "integer", "multipleOf": 99_991 - i} for i in range(50)]},  # takes a minute, and 2 GB
    ],
    ids=["deep", "slow"],
)
async def test_a_schema_that_would_end_the_process_or_hold_it_up_is_refused(asked: Schema) -> None:
    refused = await refusal(**by({"type": "array", **asked}))
    assert refused.message == (
        "response_format: no answer can be held to this schema: it is too large, too deep or too slow to compile."
    )
    assert await model().guide(**ANY_OBJECT)


async def test_a_schema_is_too_large_by_so_much() -> None:
    refused = await refusal(**by({"enum": ["x" * 600_000]}))
    assert refused.type == "too_large"
    assert "characters too long" in refused.message


async def test_json_schema_needs_a_schema() -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer"}}}
    assert (await refusal(**asked)).message == "response_format: json_schema needs a schema in it."


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"tools": [WEATHER]}])
async def test_an_answer_that_may_be_anything_has_no_guide(fields: dict[str, Any]) -> None:
    assert await model().guides.guide(request(**fields), Prompt((1,), "none"), model().dialect) is None


THINK, THOUGHT, CALL = 3, 4, 5


async def test_reasoning_goes_before_the_json_and_cannot_end_the_answer() -> None:
    guide = await model().guide("open", **ANY_OBJECT)
    for token in model().tokenizer.encode("Well, {[ hm"):
        assert set(range(1024)) - set(allowed(guide, 1024)) == {EOS, OTHER_EOS, CALL}
        guide.accept(token)
    guide.accept(THOUGHT)
    assert model().takes(guide, '\n\n{"a": 1}')


async def test_a_model_that_may_reason_may_also_answer_at_once() -> None:
    assert model().takes(await model().guide("none", **ANY_OBJECT), "{}")
    guide = await model().guide("none", **ANY_OBJECT)
    assert model().takes(guide, "<think>so</think>{}")
    assert THINK not in allowed(guide, 1024)


async def test_reasoning_begins_with_the_first_token_or_not_at_all() -> None:
    guide = await model().guide("none", **ANY_OBJECT)
    assert THINK in allowed(guide, 1024)
    guide.accept(*model().tokenizer.encode("{"))
    assert THINK not in allowed(guide, 1024)


async def test_where_the_prompt_has_closed_the_reasoning_the_json_comes_at_once() -> None:
    assert not model().takes(await model().guide("closed", **ANY_OBJECT), "<think>so</think>{}")


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


@pytest.mark.parametrize("format", FORCED)
async def test_a_named_function_is_the_one_that_is_called(format: str) -> None:
    clock = {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}}
    assert not model(format).takes(await model(format).guide(**clock), FORCED[format])


@pytest.mark.parametrize("format", ["json_tools", "mistral", "qwen3_coder"])
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


async def test_harmony_reasons_in_messages_of_its_own() -> None:
    spoken, fields = model("harmony"), {"tools": [WEATHER], **ANY_OBJECT}
    analysis = "<|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>{}"
    assert spoken.takes(await spoken.guide("none", **fields), analysis + analysis + final)
    assert spoken.takes(await spoken.guide("none", **fields), analysis + FORCED["harmony"])
    assert not spoken.takes(await spoken.guide("none", **fields), analysis)
    assert not spoken.takes(await spoken.guide("none", **fields), "<|channel|>final<|message|>Hello")


async def test_a_model_without_calls_answers_by_the_schema() -> None:
    assert model("none").takes(await model("none").guide(tools=[WEATHER], **ANY_OBJECT), "{}")


@pytest.mark.parametrize(
    ("format", "fields", "message"),
    [
        (
            "glm47",
            {"tool_choice": "required"},
            "tool_choice: this model writes its calls as glm47, which cannot be forced; use 'auto'.",
        ),
        (
            "glm47",
            ANY_OBJECT,
            "response_format: this model writes its calls as glm47, which cannot be forced; "
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


@pytest.mark.parametrize("definition", [None, "{}", '{"model": 1}'])
async def test_a_tokenizer_that_cannot_be_read_is_refused_by_the_field(definition: str | None) -> None:
    tokenizer = Words(load_tokenizer(TINY_CHAT))
    vars(tokenizer)["definition"] = definition
    guides = Guides(tokenizer, 1024)
    for fields, named in (
        (ANY_OBJECT, "response_format"),
        ({"tools": [CLOCK], "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(Refusal) as refused:
            await guides.guide(request(**fields), Prompt((1,), "none"), model().dialect)
        assert refused.value.message == f"{named}: this model's tokenizer cannot be guided; leave it out."


TYPES: dict[str, tuple[Schema, list[str], list[str]]] = {
    "string": ({"type": "string"}, ["Oslo", "", "two\nlines", "<b> </i>", "nullify", "5"], ["null", "a</parameter>b"]),
    "words": ({"enum": ["red", "dark blue", 3]}, ["red", "dark blue", "3"], ["blue", ""]),
    "word": ({"const": "x"}, ["x"], ["y"]),
    "integer": ({"type": "integer", "minimum": 0}, ["12"], ["-1", "1.5", "x", "9" * 17]),
    "number": ({"type": "number"}, ["-1.5", "2"], ["x", "1e999"]),
    "boolean": ({"type": "boolean"}, ["true", "false"], ["True", "1"]),
    "list": ({"type": "array", "items": {"type": "integer"}}, ["[1, 2]", "[]"], ["1", '["a"]']),
    "reference": ({"$ref": "#/$defs/point"}, ['{"x": 1}'], ["1", '{"x": "a"}']),
    "optional": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["Oslo", "null"], []),
    "nullable": ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, ['{"x": 1}', "null"], ["Oslo"]),
    "anything": ({}, ["Oslo"], []),
}


@pytest.mark.parametrize("kind", TYPES)
def test_a_parameter_between_tags_is_held_to_its_type(kind: str) -> None:
    asked, good, bad = TYPES[kind]
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    schema = {"type": "object", "properties": {"a": asked}, "$defs": {"point": point}}
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


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"two words": {}}}, "cannot name a parameter 'two words'"),
        ({"anyOf": [{"properties": {"a": {}}}]}, "cannot be held to parameters by anyOf"),
        ({"properties": {"a": 5}}, "the parameters of f are no JSON schema"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "the parameters of f are no JSON schema"),
        ({"type": "string"}, "the parameters of f must be of type object"),
    ],
)
async def test_parameters_that_cannot_stand_between_tags_are_refused(schema: Schema, words: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert words in (await refusal("qwen3_coder", tools=tools, tool_choice="required")).message


URGES = {"qwen3_coder": ["\n</parameter>", "null", "</"], "harmony": ["<|end|>"]}


@pytest.mark.parametrize("format", FORCED)
def test_whatever_the_grammar_of_calls_allows_is_a_call(format: str) -> None:
    spoken, ended = model(format), 0
    urges = [spoken.tokenizer.encode(word) for word in URGES.get(format, [])]
    for seed in range(25):
        tools = _functions(seed, named_plainly=format == "qwen3_coder")
        asked = request(tools=tools, tool_choice="required", parallel_tool_calls=seed % 2 == 0)
        dice = random.Random(seed)
        if not (tokens := walk(spoken.quick_guide(asked), {EOS, OTHER_EOS}, spoken.count, dice, urges)):
            continue
        said, why = spoken.said(asked, tokens)
        assert (said.content, why) == ("", "tool_calls")
        ended += 1
        for call in said.tool_calls:
            asked_for = next(each["function"] for each in tools if each["function"]["name"] == call["function"]["name"])
            if format != "qwen3_coder":
                Draft202012Validator(asked_for["parameters"]).validate(json.loads(call["function"]["arguments"]))
    assert ended >= 20


def _functions(seed: int, *, named_plainly: bool) -> list[dict[str, Any]]:
    objects = [each for each in map(schema, range(1000 * seed, 1000 * seed + 100)) if each.get("type") == "object"]
    if named_plainly:
        objects = [
            each for each in objects if "with space" not in each["properties"] and "patternProperties" not in each
        ]
    names = ("weather", "weather2", "clo-ck_2")
    return [
        {"type": "function", "function": {"name": n, "parameters": o}} for n, o in zip(names, objects, strict=False)
    ]


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


# It compiles, and some twenty tokens later the lexer has had enough of it.
TIRING = by({"type": "string", "pattern": "^(([a-z]{1,9} ){1,9}|.{3,60}[aeiou]){5,40}$"})


async def test_a_guide_that_breaks_says_why_and_ends_the_answer_and_harms_no_other() -> None:
    breaking, other = await model().guide(**TIRING), await model().guide(**TIRING)
    assert walk(breaking, {EOS, OTHER_EOS}, 1024, random.Random(1), [])
    assert breaking.broken
    assert "too many expressions" in breaking.broken
    assert set(allowed(breaking, 1024)) == {EOS, OTHER_EOS}
    later = await model().guide(**TIRING)
    assert not {EOS, OTHER_EOS} & {*allowed(other, 1024), *allowed(later, 1024)}
    assert other.broken is later.broken is None


async def test_a_token_that_was_not_allowed_breaks_the_guide() -> None:
    guide = await model().guide(**ANY_OBJECT)
    guide.accept(*model().tokenizer.encode("x"))
    assert guide.broken
    assert set(allowed(guide, 1024)) == {EOS, OTHER_EOS}


async def test_a_network_may_be_wider_than_its_tokenizer() -> None:
    guide = await Guides(model().tokenizer, 1100).guide(request(**ANY_OBJECT), Prompt((1,), "open"), model().dialect)
    assert guide
    assert set(allowed(guide, 1100)) == set(range(1100)) - {EOS, OTHER_EOS, CALL}
    guide.accept(THOUGHT)
    assert not [token for token in allowed(guide, 1100) if token >= 1024]
