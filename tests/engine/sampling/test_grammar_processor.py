"""Rows with a grammar keep to it, and the other rows of the batch equal their answers alone."""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from schemas import ChatRequest
from tests.engine.driver import answer, answers, tokens
from tests.engine.stepwise_grammar import StepwiseGrammar
from tests.engine.tiny import CONFIGS, EOS, VOCAB, prompt, write_checkpoint
from tests.selection import examples
from tests.support.stack import TINY_CHAT
from tests.text.structured import Schema, schema
from worker.engine.batch.row import Row
from worker.engine.model.load import Model, open_model
from worker.engine.sampling.processors import Processor, processors_for
from worker.engine.tokenizer import MLXTokenizer
from worker.outcomes import Sampled
from worker.request import GenerationRequest, Sampling
from worker.text.codec import TextCodec
from worker.text.grammar.lark import Grammar
from worker.text.grammar.row.grammar import RowGrammar
from worker.text.grammar.sandbox import compile_grammar

FREE = [GenerationRequest(f"free {i}", prompt(5 + 9 * i, i), 60, Sampling(temperature=i / 2, seed=i)) for i in range(4)]


class RecordingGrammar(StepwiseGrammar):
    """A grammar with a given mask, which records the tokens that it accepts."""

    def __init__(self, allowed: Iterable[int] | None) -> None:
        self.answer = list[int]()
        self.error = None
        self._mask = None if allowed is None else sum(1 << token for token in allowed).to_bytes(8, "little")

    @property
    def accepted(self) -> int:
        return len(self.answer)

    def accept(self, token: int) -> None:
        self.answer.append(token)

    def bitmask(self) -> bytes | None:
        return self._mask

    def reset(self) -> None:
        self.answer.clear()

    def rollback(self, count: int) -> None:
        del self.answer[len(self.answer) - count :]


def processor(grammars: Mapping[int, RecordingGrammar], fed_drawn: Collection[int] = ()) -> Processor:
    """Return what masks the logits of rows with these grammars, by index; rows between them have none."""
    requests = [GenerationRequest("row", (7,), 9, grammar=grammars.get(index)) for index in range(1 + max(grammars))]
    (found,) = processors_for([*map(Row.of, requests)], [index in fed_drawn for index in range(len(requests))])
    return found


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("width", [50, 64, 100])
def test_forbidden_tokens_get_minus_infinity_and_others_are_unchanged(dtype: mx.Dtype, width: int) -> None:
    logits = mx.arange(width)[None].astype(dtype)
    processed = processor({0: RecordingGrammar({0, 31, 32, 49, 63})})(logits, mx.array([7]))
    assert processed.dtype == dtype
    possible = [token for token, logit in enumerate(processed[0].tolist()) if logit != -float("inf")]
    assert possible == [token for token in (0, 31, 32, 49, 63) if token < width]
    assert mx.array_equal(processed[0, mx.array(possible)], logits[0, mx.array(possible)])


@pytest.mark.parametrize("constrained", [(), (0,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("free", [False, True])
def test_each_mask_changes_its_own_row(constrained: tuple[int, ...], free: bool) -> None:
    logits = mx.random.normal((4 if free else 3, 64), key=mx.random.key(0))
    before: Any = logits.tolist()
    grammars = {row: RecordingGrammar({row, 40 + row} if row in constrained else None) for row in range(3)}
    processed: Any = processor(grammars)(logits, mx.zeros(len(before), mx.int32)).tolist()
    expected = [
        [logit if row not in constrained or token in (row, 40 + row) else -math.inf for token, logit in enumerate(own)]
        for row, own in enumerate(before)
    ]
    assert processed == expected


def test_grammar_accepts_each_token_that_its_row_has_drawn() -> None:
    first, second = RecordingGrammar(None), RecordingGrammar({5})
    process = processor({0: first, 2: second}, {2})
    for fed in ([7, 8, 9], [20, 21, 22]):
        process(mx.zeros((3, 64)), mx.array(fed))
    assert (first.answer, second.answer) == ([20], [9, 22])


def test_device_begins_to_compute_the_logits_before_a_mask_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, calls = mx.zeros((2, 64)) + 1, list[object]()
    grammars = {row: RecordingGrammar({5}) for row in range(2)}
    monkeypatch.setattr(mx, "async_eval", calls.append)
    for grammar in grammars.values():
        monkeypatch.setattr(grammar, "accept", calls.append)
        monkeypatch.setattr(grammar, "bitmask", lambda: calls.append("mask"))
    processor(grammars, {0, 1})(logits, mx.array([7, 8]))
    assert calls[0] is logits
    assert calls[1:] == [7, 8, "mask", "mask"]


def test_new_row_resets_its_grammar_which_then_accepts_the_resumed_tokens() -> None:
    grammar = RecordingGrammar(None)
    for known in ((20,), (20, 21)):
        Row.of(GenerationRequest("a", (7,), 9, grammar=grammar, resume_tokens=known))
        assert grammar.answer == [*known]


def test_logits_are_unchanged_if_any_token_is_allowed() -> None:
    logits = mx.zeros((1, 64))
    assert processor({0: RecordingGrammar(None)})(logits, mx.array([7])) is logits


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(write_checkpoint(CONFIGS["qwen3_5"], tmp_path_factory.mktemp("qwen3_5"))))


def read_by_llguidance(model: Model, count: int, ends: list[int]) -> LLTokenizer:
    definition = model.tokenizer._tokenizer.backend_tokenizer.to_str()
    return LLTokenizer(definition, n_vocab=count, eos_token=ends)


@pytest.fixture(scope="module")
def vocabulary(model: Model) -> LLTokenizer:
    return read_by_llguidance(model, VOCAB, [EOS])


def guide(vocabulary: LLTokenizer, asked: Schema, ends: frozenset[int] = frozenset({EOS})) -> RowGrammar:
    grammar = Grammar({})
    return RowGrammar(compile_grammar(vocabulary, grammar.starting_with(grammar.json(asked, "response_format"))), ends)


def text(model: Model, outcomes: list[Sampled]) -> str:
    return str(model.tokenizer.decode(tokens(outcomes)))


@pytest.fixture(scope="module")
def free_alone(model: Model) -> dict[str, list[Sampled]]:
    return {free.id: answer(model, free) for free in FREE}


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (50, 100, 150))])
def test_every_answer_that_a_random_model_finishes_is_valid(
    model: Model, vocabulary: LLTokenizer, free_alone: dict[str, list[Sampled]], first: int
) -> None:
    asked = {str(seed): schema(seed) for seed in range(first, first + examples(32, by_default=8))}
    rows = [
        GenerationRequest(
            id, prompt(3 + i % 20, i), 150, Sampling(temperature=float(i % 2), seed=i), grammar=guide(vocabulary, each)
        )
        for i, (id, each) in enumerate(asked.items())
    ]
    half = len(rows) // 2
    together = answers(model, [*rows[:half], *FREE, *rows[half:]])
    finished = [id for id in asked if together[id][-1].finish_reason == "stop"]
    for id in finished:
        Draft202012Validator(asked[id]).validate(json.loads(text(model, together[id])))
    assert len(finished) >= 0.8 * len(asked)
    assert {id: together[id] for id in free_alone} == free_alone


SAMPLED = Sampling(temperature=1.0, seed=3)
PEOPLE: Schema = {
    "type": "array",
    "minItems": 2,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "delivered", [pytest.param(1, marks=pytest.mark.slow), 9, pytest.param(20, marks=pytest.mark.slow)]
)
def test_resumed_row_continues_as_if_never_interrupted(
    model: Model, vocabulary: LLTokenizer, sampling: Sampling, delivered: int
) -> None:
    row = GenerationRequest("a", prompt(9, 1), 60, sampling)
    whole = answer(model, replace(row, grammar=guide(vocabulary, PEOPLE)))
    earlier = tuple(tokens(whole)[:delivered])
    rest = answer(model, replace(row, grammar=guide(vocabulary, PEOPLE), resume_tokens=earlier))
    assert rest == whole[delivered:]


def test_no_bias_or_penalty_overrides_the_grammar(model: Model, vocabulary: LLTokenizer) -> None:
    tempted = Sampling(logit_bias=((EOS, 100.0), (700, 100.0)), presence_penalty=2.0, repetition_penalty=1.5)
    outcomes = answer(model, GenerationRequest("a", prompt(9, 1), 150, tempted, grammar=guide(vocabulary, PEOPLE)))
    assert outcomes[-1].finish_reason == "stop"
    Draft202012Validator(PEOPLE).validate(json.loads(text(model, outcomes)))


def test_failing_grammar_ends_only_its_row(
    model: Model, vocabulary: LLTokenizer, free_alone: dict[str, list[Sampled]]
) -> None:
    tiring = {"type": "string", "pattern": "^(.{0,40}[aeiou].{0,40}[^a].{0,40}){5,40}$"}
    breaking, beside = guide(vocabulary, tiring), guide(vocabulary, PEOPLE)
    row = GenerationRequest("beside", prompt(4, 4), 60, SAMPLED)
    tired = GenerationRequest("tired", prompt(5, 5), 150, SAMPLED, grammar=breaking)
    together = answers(model, [tired, replace(row, grammar=beside), *FREE])
    assert breaking.error
    assert together["tired"][-1].finish_reason == "stop"
    assert beside.error is None
    assert together["beside"] == answer(model, replace(row, grammar=guide(vocabulary, PEOPLE)))
    assert {id: together[id] for id in free_alone} == free_alone


TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
WISHES = {
    "Answer in JSON. What is the capital of Norway?": {"response_format": {"type": "json_object"}},
    "Call the weather tool for Oslo.": {"tools": [TOOL], "tool_choice": "required"},
    "Think: what is 8 plus 3?": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "integer"}}}
    },
}


@pytest.fixture(scope="module")
def chat() -> Model:
    return open_model(str(TINY_CHAT))


def test_every_answer_that_a_trained_model_finishes_is_valid(chat: Model) -> None:
    ends, asked = (
        frozenset(chat.tokenizer.eos_token_ids),
        {str(seed): schema(seed) for seed in range(200, 200 + examples(32, by_default=8))},
    )
    vocabulary = read_by_llguidance(chat, chat.vocab, sorted(ends))
    messages = [{"role": "user", "content": "Answer in JSON."}]
    generated = tuple(chat.tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    rows = [
        GenerationRequest(
            id, generated, 100, Sampling(temperature=i % 2, seed=i), grammar=guide(vocabulary, each, ends)
        )
        for i, (id, each) in enumerate(asked.items())
    ]
    together = answers(chat, rows)
    finished = [id for id in asked if together[id][-1].finish_reason == "stop"]
    for id in finished:
        Draft202012Validator(asked[id]).validate(json.loads(text(chat, together[id])))
    assert len(finished) >= 0.7 * len(asked)


@pytest.mark.parametrize("words", WISHES)
async def test_grammar_does_not_change_a_valid_answer(chat: Model, words: str) -> None:
    language = TextCodec(MLXTokenizer(chat.tokenizer), chat.vocab)
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": words}], **WISHES[words]})
    rendered = await language.prompt(request)
    row = GenerationRequest("a", rendered.tokens, 60)
    held = replace(row, grammar=await language.grammar(request, rendered))
    assert held.grammar
    assert answer(chat, held) == answer(chat, row)
