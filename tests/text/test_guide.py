import asyncio
import json
import random
import shutil
import signal
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from schemas import ChatRequest
from scripts.stack import TINY_CHAT
from tests.text.structured import Schema, allowed, schema, walk
from worker.engine.upstream import load_tokenizer
from worker.engine.words import Words
from worker.errors import Refusal
from worker.text.definition import unmarked
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
        self.guides = Guides(self.tokenizer, self.dialect, self.count)
        self.vocabulary = LLTokenizer(str(self.tokenizer.definition), eos_token=[OTHER_EOS, EOS])

    async def guide(self, thinking: Thinking = "closed", **fields: Any) -> GrammarGuide:
        guide = await self.guides.guide(request(**fields), Prompt((1,), thinking))
        assert guide
        return guide

    def quick_guide(self, asked: ChatRequest) -> GrammarGuide:
        """Without the trial."""
        wish = wish_of(asked)
        assert wish
        grammar = Grammars(self.tokenizer, self.dialect).of(wish, reasoned=False)
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


SLOW: Schema = {"prefixItems": [{"type": "integer", "multipleOf": 99_991 - i} for i in range(50)]}


def fresh() -> Guides:
    return Guides(model().tokenizer, model().dialect, 1024)


async def test_one_clients_slow_schemas_do_not_hold_up_what_is_quick_or_known() -> None:
    guides, prompt = fresh(), Prompt((1,), "closed")
    known = request(**by({"type": "string", "pattern": "^a+$"}))
    assert await guides.guide(known, prompt)
    slow = [asyncio.ensure_future(guides.guide(request(**by({**SLOW, "title": str(i)})), prompt)) for i in range(8)]
    await asyncio.sleep(0.05)
    for quick in (request(**ANY_OBJECT), request(**by(CITY), tools=[WEATHER]), known):
        assert await guides.guide(quick, prompt)
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_job_that_is_cancelled_takes_its_trial_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, trials = asyncio.create_subprocess_exec, asyncio.Queue[asyncio.subprocess.Process]()

    async def watched(*args: Any, **how: Any) -> asyncio.subprocess.Process:
        await trials.put(process := await begin(*args, **how))
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)
    guiding = asyncio.ensure_future(fresh().guide(request(**by(SLOW)), Prompt((1,), "closed")))
    trial = await trials.get()
    await asyncio.sleep(0)
    guiding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await guiding
    assert trial.returncode == -signal.SIGKILL


async def test_a_schema_is_tried_once_however_many_rows_bring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, trials = asyncio.create_subprocess_exec, list[int]()

    async def watched(*args: Any, **how: Any) -> asyncio.subprocess.Process:
        trials.append(1)
        return await begin(*args, **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)
    guides, asked = fresh(), request(**by({"type": "string", "pattern": "^b+$"}))
    await guides.guide(asked, Prompt((1,), "closed"))
    await asyncio.gather(*(guides.guide(asked, Prompt((1,), "closed")) for _ in range(20)))
    assert len(trials) == 1


@pytest.mark.parametrize(
    "values",
    [[{"minProperties": 3}], [{"exclusiveMinimum": 3, "maximum": 3.5}], [{"properties": {"minProperties": 2}}]],
)
async def test_what_a_schema_lists_as_data_is_no_schema(values: list[Any]) -> None:
    for asked in ({"enum": values}, {"const": values[0]}, {"properties": {"const": {"enum": values}}}):
        value = {"const": values[0]} if "properties" in asked else values[0]
        assert model().takes(await model().guide(**by({"type": "object", **asked})), json.dumps(value))


@pytest.mark.parametrize("name", ["const", "enum", "default"])
async def test_a_property_may_have_a_keywords_name_and_is_held_to_its_schema(name: str) -> None:
    for inner in ({"properties": {name: {"minProperties": 2}}}, {"$defs": {name: {"minProperties": 2}}}):
        assert "minProperties above 1" in (await refusal(**by({"type": "object", **inner}))).message


def after(begun: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": begun}]}


@pytest.mark.parametrize(
    "begun", ['{"city": ', '{"city": "Os', '<think>so</think>\n{"city": "Os', [{"type": "text", "text": "{"}]]
)
@pytest.mark.parametrize("thinking", ["closed", "none"])
async def test_an_answer_goes_on_with_the_json_that_its_message_began(begun: Any, thinking: Thinking) -> None:
    text = begun if isinstance(begun, str) else begun[0]["text"]
    rest = '{"city": "Oslo"}'.removeprefix(text.rpartition("\n")[2])
    assert model().takes(await model().guide(thinking, **by(CITY), **after(begun)), rest)
    assert not model().takes(await model().guide(thinking, **by(CITY), **after(begun)), '{"city": "Oslo"}')


async def test_harmony_goes_on_with_json_in_the_final_message() -> None:
    spoken = model("harmony")
    assert spoken.takes(await spoken.guide("none", **by(CITY), **after('{"city": "Os')), 'lo"}')


async def test_after_space_alone_nothing_has_begun() -> None:
    assert model().takes(await model().guide("none", **by(CITY), **after(" \n")), '<think>so</think>{"city": "Oslo"}')


@pytest.mark.parametrize("begun", ["It is", '{"town', '{"city": "Oslo"} '])
async def test_a_message_that_begins_no_such_answer_is_refused(begun: str) -> None:
    refused = await refusal(**by(CITY), **after(begun))
    assert (refused.type, refused.message) == (
        "invalid_request", "response_format: the last message begins no answer that it allows."
    )  # fmt: skip


async def test_an_answer_in_several_parts_is_not_gone_on_with() -> None:
    parts = [{"type": "text", "text": "{"}, {"type": "text", "text": '"city"'}]
    assert (await refusal(**by(CITY), **after(parts))).type == "unsupported"


@pytest.mark.parametrize("begun", ["", '{"ci'])
async def test_a_guide_that_is_rewound_allows_what_it_allowed(begun: str) -> None:
    guide = await model().guide("none", **by(CITY), **(after(begun) if begun else {}))
    said = model().tokenizer.encode('ty": "Oslo"}' if begun else '<think>so</think>{"city": "Oslo"}')

    def masks() -> list[bytes]:
        seen = list[bytes]()
        for token in said:
            seen.append(guide.allowed())
            guide.accept(token)
        return [*seen, guide.allowed()]

    first = masks()
    guide.rewind()
    assert masks() == first
    guide.rewind()
    guide.accept(said[0])
    guide.rewind()
    assert masks() == first


async def test_a_schema_is_too_large_by_so_much() -> None:
    refused = await refusal(**by({"enum": ["x" * 600_000]}))
    assert refused.type == "too_large"
    assert "characters too long" in refused.message


async def test_json_schema_needs_a_schema() -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer"}}}
    assert (await refusal(**asked)).message == "response_format: json_schema needs a schema in it."


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"tools": [WEATHER]}])
async def test_an_answer_that_may_be_anything_has_no_guide(fields: dict[str, Any]) -> None:
    assert await model().guides.guide(request(**fields), Prompt((1,), "none")) is None


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
    guides = Guides(tokenizer, model().dialect, 1024)
    for fields, named in (
        (ANY_OBJECT, "response_format"),
        ({"tools": [CLOCK], "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(Refusal) as refused:
            await guides.guide(request(**fields), Prompt((1,), "none"))
        assert refused.value.message == f"{named}: this model's tokenizer cannot be guided; leave it out."


TYPES: dict[str, tuple[Schema, list[str], list[str]]] = {
    "string": ({"type": "string"}, ["Oslo", "", "two\nlines", "<b> </i>", "nullify", "5"], ["null", "a</parameter>b"]),
    "words": ({"enum": ["red", "dark blue", None]}, ["red", "dark blue", "null"], ["blue", ""]),
    "word": ({"const": "x"}, ["x"], ["y"]),
    "string words": ({"type": "string", "enum": ["red", 3, "null"]}, ["red"], ["3", "null"]),
    "pattern": ({"type": "string", "pattern": "^[a-z/]+(-[0-9]{2})?$"}, ["ab/c-12", "x"], ["", "ab-1", "Ab", "a\n"]),
    "escaped": ({"type": "string", "pattern": r"^a\\/[/b]$"}, [r"a\//", r"a\/b"], ["a/b", r"a\b"]),
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
    "anything": ({}, ["Oslo"], []),
}  # fmt: skip


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
            Draft202012Validator(schema).validate(json.loads(said.tool_calls[0]["function"]["arguments"]))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"two words": {}}}, "cannot name a parameter 'two words'"),
        ({"anyOf": [{"properties": {"a": {}}}]}, "tools: f: this model's calls cannot be held to parameters by anyOf"),
        ({"properties": {}, "minProperties": 1}, "by minProperties"),
        ({"properties": {"a": {"oneOf": [{"type": "string"}]}}}, "by oneOf"),
        ({"properties": {"a": {"type": "string", "allOf": [{"minLength": 2}]}}}, "by allOf"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "by not"),
        ({"properties": {"a": {"anyOf": [{"anyOf": [{"type": "string"}]}]}}}, "by anyOf"),
        ({"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}, "by type integer within anyOf"),
        ({"properties": {"a": {"properties": {"b": {}}}}}, "by properties"),
        ({"properties": {"a": {"minLength": 2}}}, "by minLength"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "by format"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "by pattern ^a|b$"),
        ({"properties": {"a": {"type": "string", "pattern": "(?=a)b"}}}, "by pattern (?=a)b"),
        ({"properties": {"a": {"type": "string", "pattern": "a^b"}}}, "by pattern a^b"),
        ({"properties": {"a": {"type": ["string", "null"]}}}, "by a list of types; try anyOf"),
        ({"properties": {"a": {"enum": [1, 2]}}}, "by an enum of numbers without their type"),
        ({"properties": {"a": {"type": "string", "const": "null"}}}, "by this const"),
        ({"properties": {"a": True}}, "by a schema of true"),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "by $ref #/properties/a"),
        ({"properties": {}, "required": ["a"], "additionalProperties": False}, "by required"),
        ({"properties": {"a": {}}, "required": "a"}, "the parameters of f are no JSON schema"),
        ({"properties": {"a": {}}, "required": [1]}, "the parameters of f are no JSON schema"),
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
    assert ended >= 20


def _functions(format: str, seed: int) -> list[dict[str, Any]]:
    """Whose calls can be forced."""
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
    except Refusal:
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


# It compiles, and some twenty tokens later the lexer has had enough of it.
TIRING = by({"type": "string", "pattern": "^(([a-z]{1,9} ){1,9}|.{3,60}[aeiou]){5,40}$"})


async def test_a_guide_that_breaks_says_why_and_ends_the_answer_and_harms_no_other() -> None:
    breaking, other = await model().guide(**TIRING), await model().guide(**TIRING)
    assert walk(breaking, {EOS, OTHER_EOS}, 1024, random.Random(1), [])
    assert breaking.broken
    assert "too many expressions" in breaking.broken.why
    assert not breaking.broken.ours
    assert set(allowed(breaking, 1024)) == {EOS, OTHER_EOS}
    later = await model().guide(**TIRING)
    assert not {EOS, OTHER_EOS} & {*allowed(other, 1024), *allowed(later, 1024)}
    assert other.broken is later.broken is None


async def test_a_token_that_was_not_allowed_breaks_the_guide() -> None:
    guide = await model().guide(**ANY_OBJECT)
    guide.accept(*model().tokenizer.encode("x"))
    assert guide.broken
    assert guide.broken.ours
    assert set(allowed(guide, 1024)) == {EOS, OTHER_EOS}


async def test_a_network_may_be_wider_than_its_tokenizer() -> None:
    guide = await Guides(model().tokenizer, model().dialect, 1100).guide(request(**ANY_OBJECT), Prompt((1,), "open"))
    assert guide
    assert set(allowed(guide, 1100)) == set(range(1100)) - {EOS, OTHER_EOS, CALL}
    guide.accept(THOUGHT)
    assert not [token for token in allowed(guide, 1100) if token >= 1024]


LITERALS: list[Schema] = [
    {"properties": {"a": {"const": "<|im_end|>"}}, "required": ["a"]},
    {"properties": {"a": {"const": "see <tool_call> ok"}}, "required": ["a"]},
    {"properties": {"<think>": {"enum": ["</think>"]}}, "required": ["<think>"]},
]


@pytest.mark.parametrize("asked", LITERALS, ids=str)
async def test_words_of_a_schema_may_look_like_markers(asked: Schema) -> None:
    asked = {"type": "object", **asked, "additionalProperties": False}
    for seed in range(5):
        guide = await model().guide(**by(asked))
        tokens = walk(guide, {EOS, OTHER_EOS}, model().count, random.Random(seed), [])
        assert guide.broken is None
        written = b"".join(map(Vocabulary(model().tokenizer).bytes_of, tokens)).decode()
        Draft202012Validator(asked).validate(json.loads(written))


@pytest.mark.parametrize(
    "asked",
    [
        {"properties": {f"p{i}": {"const": i} for i in range(700)}, "additionalProperties": False},
        {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "string"}}} for i in range(200)]},
    ],
    ids=["many properties", "many branches"],
)
async def test_a_schema_with_much_that_is_optional_is_held_to(asked: Schema) -> None:
    guide = await model().guide(**by({"type": "object", **asked}))
    for token in model().tokenizer.encode('{"p1": '):
        assert token in allowed(guide, 1024)
        guide.accept(token)


async def test_a_schema_that_breaks_at_the_first_tokens_is_refused() -> None:
    patterns = ["^(([a-z]{1,9} ){1,9}|.{3,60}[aeiou]){5,40}$", "[a-z]+x.{1,40}y", "b.{3,30}c"]
    refused = await refusal(**by({"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}))
    assert "too many expressions" in refused.message


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"const": "a\u0001b"}, r"control character '\x01'"),
        ({"enum": [[{"a": "\u001f"}]]}, r"control character '\x1f'"),
        ({"properties": {"a\u0000": {}}}, r"control character '\x00'"),
        ({"const": "\u007f"}, r"control character '\x7f'"),
        ({"const": 2**53 + 1}, "9007199254740993"),
        ({"items": {"enum": [{"a": -(2**63)}]}}, "-9223372036854775808"),
    ],
)
async def test_what_cannot_be_written_as_it_is_is_refused(asked: Schema, words: str) -> None:
    assert words in (await refusal(**by(asked))).message


@pytest.mark.parametrize("value", ["a\b\f\n\r\tb \x80é", 2**53, -(2**53), True, 1.5])
async def test_what_can_be_written_is_written_as_it_is(value: Any) -> None:
    tokens = walk(await model().guide(**by({"const": value})), {EOS, OTHER_EOS}, 1024, random.Random(1), [])
    assert json.loads(model().said(request(**by({"const": value})), tokens)[0].content) == value


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
async def test_a_trial_that_is_ended_from_outside_says_nothing_of_the_schema(
    ends: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, guides, prompt = asyncio.create_subprocess_exec, fresh(), Prompt((1,), "closed")

    async def ended(*args: Any, **how: Any) -> asyncio.subprocess.Process:
        process = await begin(*args, **how)
        process.send_signal(ends)
        return process

    asked = request(**by({"type": "string", "pattern": "^c+$"}))
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "create_subprocess_exec", ended)
        with pytest.raises(Refusal) as refused:
            await guides.guide(asked, prompt)
    assert (refused.value.type, refused.value.retryable) == ("overloaded", True)
    assert await guides.guide(asked, prompt)


def spelled(text: str) -> list[int]:
    """Without the tokens of markers."""
    return [token for char in text for token in model().tokenizer.encode(char)]


async def test_reasoning_ends_with_its_marker_spelled_out_too() -> None:
    fields: dict[str, Any] = {**ANY_OBJECT, "tools": [WEATHER]}
    guide = await model().guide("open", **fields)
    for token in spelled("so < / </think>"):
        assert token in allowed(guide, 1024)
        guide.accept(token)
    assert model().takes(guide, '\n{"a": 1}')


async def test_reasoning_cannot_spell_a_call() -> None:
    guide = await model().guide("open", **ANY_OBJECT, tools=[WEATHER])
    *before, last = spelled("so <tool_call>")
    for token in before:
        assert token in allowed(guide, 1024)
        guide.accept(token)
    assert last not in allowed(guide, 1024)
    assert spelled("x")[0] in allowed(guide, 1024)


SIGNS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", *MARKERS, "<b>", "é", '"', " "]


@settings(deadline=None)
@given(words=st.lists(st.sampled_from(SIGNS), max_size=6), more=st.lists(st.sampled_from(SIGNS), max_size=3))
@pytest.mark.parametrize("format", ["json_tools", "mistral", "harmony", "none"])
def test_markers_within_an_answer_by_a_schema_are_content(format: str, words: list[str], more: list[str]) -> None:
    value = {"a": "".join(words), "".join(more) + "b": [1, "".join(more)]}
    before = "<|channel|>final<|message|>" if format == "harmony" else "\n\n"
    for fields in ({}, {"tools": [WEATHER]}):
        tokens = model(format).tokenizer.encode(before) + spelled(json.dumps(value, ensure_ascii=False))
        said, why = model(format).said(request(**ANY_OBJECT, **fields), tokens)
        assert (json.loads(said.content), said.reasoning, said.tool_calls, why) == (value, "", (), "stop")


@settings(deadline=None)
@given(words=st.lists(st.sampled_from(SIGNS), max_size=6), count=st.integers(1, 2))
@pytest.mark.parametrize("format", ["json_tools", "mistral", "harmony"])
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


@pytest.mark.parametrize("unigram", [False, True], ids=["merges", "unigram"])
def test_a_definition_whose_added_tokens_are_its_models_too_can_still_be_read(unigram: bool) -> None:
    definition = json.loads(str(model().tokenizer.definition))
    left, right = definition["model"]["merges"][0]
    added = [{**definition["added_tokens"][0], "content": text} for text in (left + right, "  ")]
    for entry in added:
        entry["id"] = definition["model"]["vocab"].setdefault(entry["content"], 1024)
    definition["added_tokens"] += added
    if unigram:
        vocab = sorted(definition["model"]["vocab"], key=definition["model"]["vocab"].get)
        definition["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [[token, -1.0] for token in vocab]}
        definition["added_tokens"] = [each for each in definition["added_tokens"] if each["content"] in vocab]
    read = json.loads(unmarked(json.dumps(definition)))
    assert [each["id"] for each in read["added_tokens"]] == [each["id"] for each in definition["added_tokens"]]
    texts = [each["content"] for each in read["added_tokens"]]
    assert "  " in texts
    assert left + right not in texts
    assert LLTokenizer(json.dumps(read)).vocab_size == LLTokenizer(json.dumps(definition)).vocab_size


async def test_harmonys_reasoning_spells_no_marker() -> None:
    spoken = model("harmony")
    guide = await spoken.guide("none", **ANY_OBJECT)
    before = spoken.tokenizer.encode("<|channel|>analysis<|message|>")
    *words, last = [*before, *spelled("so <b> | <|end|>")]
    for token in words:
        assert token in allowed(guide, spoken.count)
        guide.accept(token)
    assert last not in allowed(guide, spoken.count)
