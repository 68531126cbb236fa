"""Schemas that cannot be enforced are refused, and trying them delays no other job."""

import asyncio
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import decoders

from tests.support.stack import TINY_CHAT
from tests.text.guided import ANY_OBJECT, CITY, CLOCK, WEATHER, by, fresh, model, refusal, request
from tests.text.structured import Schema, allowed
from worker.engine.tokenizer import MLXTokenizer
from worker.engine.upstream.mlx_lm import load_tokenizer
from worker.errors import JobFailure
from worker.process.child import Child
from worker.process.frames import Frame
from worker.text.grammar import guide, lark, trial
from worker.text.grammar.builder import Grammars, Markup, OutputConstraint
from worker.text.grammar.guide import GrammarStates, constraint_of, is_quick
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.tool_grammars import HeldFunction
from worker.text.grammar.trial import (
    TOO_MANY_STATES,
    CompiledGrammar,
    CompileError,
    RefusedConstraint,
    Verdict,
    question,
)
from worker.text.prompt.prompt import Prompt
from worker.text.tokenizer import Vocabulary


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"type": "nonsense"}, "#/type: nonsense is not a type"),
        ({"type": "object", "properties": {"a": 5}}, "#/properties/a: a schema must be an object"),
        ({"type": "object", "required": "a"}, "#/required: it must list names"),
        ({"type": "string", "pattern": "["}, "#/pattern: the pattern [ is not supported: it ends too early"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "format": "binary"}, "#/format: binary is not supported"),
        ({"$ref": "#/$defs/none"}, "#/$ref: #/$defs/none does not exist"),
        ({"$ref": "https://example.org/schema"}, "#/$ref: https://example.org/schema is not within this schema"),
        ({"$ref": "#"}, "#/$ref: it refers back to itself"),
        ({"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}}, "it refers back to itself"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems: uniqueItems is not supported"),
        ({"not": {"type": "string"}}, "#/not: not is not supported"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/oneOf: alternatives 1 and 2 may hold at once"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#/minimum: no number satisfies it and maximum"),
        ({"enum": []}, "#/enum: it must be a list of at least one value"),
        ({"type": "object", "minProperties": 2}, "#/minProperties: above 1 it is not supported"),
        ({"type": "string", "enum": [1, 2]}, "its keywords contradict each other, so nothing satisfies it"),
        ({"type": "string", "pattern": "^\\p{Nothing}$"}, "a Unicode property that does not exist"),
        ({"properties": {"a": {}, "b": {}}, "maxProperties": 1}, "with optional properties"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "may match one name"),
    ],
)
async def test_a_schema_that_cannot_be_held_to_is_refused_with_the_reason(asked: Schema, words: str) -> None:
    refused = await refusal(**by(asked))
    assert (refused.type, refused.param) == ("invalid_request", "response_format")
    assert words in refused.message
    assert len(refused.message) < 400


async def test_a_refusal_says_where_the_schema_stands() -> None:
    assert (await refusal(**by({"type": "nonsense"}))).message.startswith("response_format: ")
    function = {"name": "bad", "parameters": {"properties": {"a": {"type": "x"}}}, "strict": True}
    bad = {"type": "function", "function": function}
    for fields in ({"tool_choice": "required"}, by(CITY)):
        refused = await refusal(tools=[WEATHER, bad], **fields)
        assert refused.message.startswith("tools: bad: #/properties/a/type: x is not a type of JSON Schema; ")


def links(count: int) -> Schema:
    chain: Schema = {f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    return {"$defs": chain | {f"d{count}": {}}, "$ref": "#/$defs/d0"}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(links(7_000), id="deep"),  # overflows the stack
        pytest.param(  # takes a minute, and 2 GB
            {"prefixItems": [{"type": "integer", "multipleOf": 99_991 - i} for i in range(50)]},
            id="slow",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_a_schema_that_would_end_the_process_or_hold_it_up_is_refused(asked: Schema) -> None:
    refused = await refusal(**by({"type": "array", **asked}))
    assert refused.message == (
        "response_format: this schema cannot be enforced: it is too large, too deep or too slow to compile."
    )
    assert await model().guide(**ANY_OBJECT)


SLOW: Schema = {"prefixItems": [{"type": "integer", "multipleOf": 99_991 - i} for i in range(50)]}


async def test_one_clients_slow_schemas_do_not_hold_up_what_is_quick_or_known() -> None:
    guides, prompt = fresh(), Prompt((1,), "closed")
    known = request(**by({"type": "string", "pattern": "^a+$"}))
    assert await guides.create(known, prompt)
    slow = [asyncio.ensure_future(guides.create(request(**by({**SLOW, "title": str(i)})), prompt)) for i in range(8)]
    await asyncio.sleep(0.05)
    for quick in (request(**ANY_OBJECT), request(**by(CITY), tools=[WEATHER]), known):
        assert await guides.create(quick, prompt)
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_schemas_do_not_wait_for_the_event_loops_own_threads() -> None:
    """The event loop's own threads are blocked. Texts were once tokenized there."""
    loop, go, few = asyncio.get_running_loop(), threading.Event(), ThreadPoolExecutor(1)
    loop.set_default_executor(few)
    waiting = loop.run_in_executor(None, go.wait)
    begun = {"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": '{"city": '}]}
    for asked in (by(CITY), {**by({"type": "string", "pattern": "^c+$"})}, {**by(CITY), **begun}):
        assert await asyncio.wait_for(fresh().create(request(**asked), Prompt((1,), "closed")), 30)
    go.set()
    await waiting


async def test_no_answer_that_was_begun_is_tokenized_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, normalized = set[threading.Thread](), guide.normalize

    def noted(messages: Any) -> Any:
        threads.add(threading.current_thread())
        return normalized(messages)

    monkeypatch.setattr(guide, "normalize", noted)
    begun = {"messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": '{"city": '}]}
    assert await fresh().create(request(**by(CITY), **begun), Prompt((1,), "closed"))
    assert threads
    assert threading.main_thread() not in threads


def test_only_the_messages_that_the_answer_goes_on_after_are_normalized(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, normalized = list[int](), guide.normalize

    def noted(messages: Any) -> Any:
        lengths.append(len(messages))
        return normalized(messages)

    monkeypatch.setattr(guide, "normalize", noted)
    earlier = [{"role": role, "content": "So?"} for _ in range(50) for role in ("user", "assistant")]
    last = [("user", "Where?"), ("assistant", '{"city":'), ("assistant", '"Os')]
    asked = request(messages=[*earlier, *({"role": role, "content": text} for role, text in last)])
    assert guide._continued_text(asked) == normalized(asked.messages)[-1]["content"]
    assert lengths == [2]


def test_a_large_schema_is_not_written_to_find_out_that_it_is_not_quick() -> None:
    wish = constraint_of(request(**by({"enum": list(range(20_000))})))
    assert wish is not None
    began = time.thread_time()
    assert not is_quick(wish)
    assert time.thread_time() - began < 0.1


async def test_a_job_that_is_cancelled_takes_its_trial_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, trials, loop = Child.ask, asyncio.Queue[Child](), asyncio.get_running_loop()

    def watched(process: Child, *args: Any) -> Frame:
        loop.call_soon_threadsafe(trials.put_nowait, process)
        return ask(process, *args)

    monkeypatch.setattr(Child, "ask", watched)
    guiding = asyncio.ensure_future(fresh().create(request(**by(SLOW)), Prompt((1,), "closed")))
    trial = await trials.get()
    await asyncio.sleep(0)
    guiding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await guiding
    assert trial._process
    assert trial._process.returncode == -signal.SIGKILL


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    """The processes that are asked, each once."""
    ask, asked = Child.ask, list[Child]()

    def watched(process: Child, *args: Any) -> Frame:
        asked.append(process)
        return ask(process, *args)

    monkeypatch.setattr(Child, "ask", watched)
    return asked


async def test_a_schema_is_tried_once_however_many_rows_bring_it(processes: list[Child]) -> None:
    guides, asked = fresh(), request(**by({"type": "string", "pattern": "^b+$"}))
    await guides.create(asked, Prompt((1,), "closed"))
    await asyncio.gather(*(guides.create(asked, Prompt((1,), "closed")) for _ in range(20)))
    assert len(processes) == 1


NOTHING = {"type": "string", "pattern": "^a$", "minLength": 2}


def tool(name: str, parameters: Schema, *, strict: bool = True) -> Schema:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def held_to(pattern: str) -> Schema:
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}


async def test_the_one_tool_that_nothing_satisfies_is_found_by_one_process(processes: list[Child]) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"]}
    tools = [*(tool(f"f{i}", held_to(f"^{i}$")) for i in range(40)), tool("bad", wrong)]
    with pytest.raises(JobFailure) as refused:
        await fresh().create(request(tools=tools, tool_choice="required"), Prompt((1,), "closed"))
    assert refused.value.message.startswith("tools: bad: #/properties/a: this schema cannot be enforced: ")
    assert refused.value.param == "tools"
    assert len(processes) == 1


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        (
            {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": NOTHING}},
            "#/$defs/x",
        ),
        (
            {
                "properties": {"b": {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/x"}]}, "minItems": 1}},
                "required": ["b"],
                "$defs": {"x": {"type": "object", "properties": {"c": NOTHING}, "required": ["c"]}},
            },
            "#/$defs/x/properties/c",
        ),
        ({"properties": {"a": NOTHING, "b": NOTHING}, "required": ["b"]}, "#/properties/b"),
        ({"properties": {"a": {"type": "string", "pattern": r"\s.{1,60}\s"}}}, "#/properties/a"),
        ({"patternProperties": {r"x.{60}y": {}}}, "#"),
    ],
    ids=str,
)
async def test_a_schema_that_does_not_compile_is_refused_with_the_place(asked: Schema, place: str) -> None:
    refused = await refusal(**by({"type": "object", **asked}))
    within = "" if place == "#" else f" {place}:"
    assert refused.message.startswith(f"response_format:{within} this schema cannot be enforced: ")
    assert refused.param == "response_format"


@pytest.mark.slow
async def test_the_search_for_the_wrong_tool_is_bounded(processes: list[Child]) -> None:
    dear = {"type": "array", "prefixItems": [{"type": "integer", "multipleOf": 999_983 - i} for i in range(2)]}
    wrong = {"type": "object", "properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"]}
    tools = [*(tool(f"f{i}", {"type": "object", "properties": {"a": dear}}) for i in range(100)), tool("bad", wrong)]
    before_s = cpu_of_children_s()
    with pytest.raises(JobFailure) as refused:
        await fresh().create(request(tools=tools, tool_choice="required"), Prompt((1,), "closed"))
    assert refused.value.type == "invalid_request"
    assert len(processes) == 1
    assert cpu_of_children_s() - before_s < 20
    # Functions that need not be held are free then.
    asked = [tool(each["function"]["name"], each["function"]["parameters"], strict=False) for each in tools]
    warnings = list[str]()
    state = await fresh().create(
        request(tools=asked, tool_choice="required"), Prompt((1,), "closed"), warn=warnings.append
    )
    assert state
    assert not state.error
    assert warnings
    assert len(processes) <= 3
    assert cpu_of_children_s() - before_s < 40


def cpu_of_children_s() -> float:
    """Return the processor time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def test_schemas_that_are_not_quick_are_rewritten_by_a_process_of_their_own(
    monkeypatch: pytest.MonkeyPatch, processes: list[Child]
) -> None:
    def rewritten_here(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(lark, "rewrite", rewritten_here)
    for asked in (by({"type": "string", "pattern": "^d+$"}), {"tools": [tool("f", held_to("^e$"))], **ANY_OBJECT}):
        assert await fresh().create(request(**asked), Prompt((1,), "closed"))
    with pytest.raises(JobFailure) as refused:
        await fresh().create(request(**by({"oneOf": [{}, {}]})), Prompt((1,), "closed"))
    assert refused.value.message.startswith("response_format: #/oneOf: alternatives 1 and 2 may hold at once")
    assert refused.value.param == "response_format"
    assert len(processes) == 3


async def test_what_a_process_finds_out_does_not_depend_on_its_search_being_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sends its verdict before it searches for the part that is wrong, then what it finds; the last one counts."""
    monkeypatch.setattr(trial, "_SEARCH_CPU_S", float("inf"))
    grammars = Grammars(Markup({}, "hermes"))
    nothing = {"type": "object", "properties": {"a": {"type": "string", "enum": [1]}}, "required": ["a"]}
    functions = HeldFunction("f", {"type": "object"}), HeldFunction("g", nothing)
    found = [*trial._verdicts(grammars, OutputConstraint(None, functions, allows_many=False), has_thought=False)]
    assert isinstance(found[0], CompileError)
    places = ("", "tools: g", "tools: g: #/properties/a")
    assert found == [CompileError(found[0].message, place) for place in places]


async def test_a_process_sends_each_kind_of_verdict() -> None:
    markup, fine = Markup({}, "hermes"), HeldFunction("f", {"type": "object"})
    child = Child("worker.text.grammar.trial")

    def verdict(constraint: OutputConstraint) -> Verdict:
        asked = question(markup, constraint, has_thought=False)
        return trial.verdict_of(child.ask(None, asked, trial.LIMITS).head)

    compiled = verdict(OutputConstraint(None, (fine,), allows_many=False))
    refused = verdict(OutputConstraint({"oneOf": [{}, {}]}, (), allows_many=False))
    wrong = verdict(OutputConstraint({"type": "string", "enum": [1]}, (), allows_many=False))
    child.close()
    assert [type(each) for each in (compiled, refused, wrong)] == [CompiledGrammar, RefusedConstraint, CompileError]
    assert isinstance(refused, RefusedConstraint)
    assert refused.type == "invalid_request"


async def test_offline_schemas_leave_a_process_to_interactive_ones() -> None:
    guides, prompt = fresh(), Prompt((1,), "closed")
    offline = [
        asyncio.ensure_future(guides.create(request(**by({**SLOW, "title": str(i)})), prompt, "batch"))
        for i in range(8)
    ]
    await asyncio.sleep(0.05)
    assert await guides.create(request(**by({"type": "string", "pattern": "^g+$"})), prompt)
    assert not any(task.done() for task in offline)
    for task in offline:
        task.cancel()
    await asyncio.gather(*offline, return_exceptions=True)


@pytest.mark.parametrize(
    "asked",
    [
        by({"type": "integer", "maximum": 10**400}),
        {"tools": [tool("f", {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": []})]},
        {"tools": [tool("f", {"type": "object", "properties": {"a": {"type": [["string"]]}}})]},
    ],
    ids=["huge bound", "definitions in a list", "types in a list"],
)
async def test_an_odd_schema_is_the_clients_fault_or_is_held(asked: dict[str, Any]) -> None:
    asked = asked if "tools" not in asked else {**asked, "tool_choice": "required"}
    for format in ("hermes", "qwen3_coder"):
        (ended,) = await asyncio.gather(model(format).guide(**asked), return_exceptions=True)
        types = {ended.type} if isinstance(ended, JobFailure) else {type(ended)}
        assert types <= {"invalid_request", "unsupported", RowGrammar}


async def test_a_schema_is_too_large_by_its_characters() -> None:
    refused = await refusal(**by({"enum": ["x" * 600_000]}))
    assert refused.type == "too_large"
    assert "500,000 characters" in refused.message


async def test_json_schema_needs_a_schema() -> None:
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer"}}}
    assert (await refusal(**asked)).message == "response_format: json_schema has no schema; add one."


async def test_a_tokenizer_that_cannot_be_read_is_refused_by_the_field() -> None:
    tokenizer = MLXTokenizer(load_tokenizer(TINY_CHAT))
    tokenizer._tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    guides = GrammarStates(tokenizer, Vocabulary(tokenizer), model().dialect, 1024)
    for fields, named in (
        (ANY_OBJECT, "response_format"),
        ({"tools": [CLOCK], "tool_choice": "required"}, "tool_choice"),
    ):
        with pytest.raises(JobFailure) as refused:
            await guides.create(request(**fields), Prompt((1,), "none"))
        assert refused.value.message == f"{named}: this model's tokenizer does not support it; leave it out."


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
    assert refused.message.endswith(TOO_MANY_STATES)


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


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGUSR1])
async def test_a_trial_that_is_ended_from_outside_says_nothing_of_the_schema(
    ends: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, guides, prompt = Child.ask, fresh(), Prompt((1,), "closed")

    def ended(process: Child, *args: Any) -> Frame:
        assert process._process
        process._process.send_signal(ends)
        return ask(process, *args)

    asked = request(**by({"type": "string", "pattern": "^c+$"}))
    with monkeypatch.context() as patched:
        patched.setattr(Child, "ask", ended)
        with pytest.raises(JobFailure) as refused:
            await guides.create(asked, prompt)
    assert (refused.value.type, refused.value.retryable) == ("overloaded", True)
    assert await guides.create(asked, prompt)
