"""Answers of the tiny model whose calls are held, and whose other text is free."""

import json
from dataclasses import replace
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from schemas import ChatRequest
from tests.engine.driver import Run, answer, answers, tokens
from tests.engine.speculation.oracle import Oracle, recurrence_of, verify_everything
from tests.selection import examples
from tests.support.stack import TINY_CHAT
from worker.engine.model.load import Model, open_model
from worker.engine.speculation.forced import GrammarProposer
from worker.engine.speculation.speculator import Speculator
from worker.engine.tokenizer import MLXTokenizer
from worker.outcomes import MAX_DRAFT
from worker.request import GenerationRequest, Sampling
from worker.text.codec import TextCodec
from worker.text.grammar.row.calls import CallsGrammar
from worker.text.output.output import OutputDelta

CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOWNS: dict[str, Any] = {  # which the model does not write by itself
    "type": "object",
    "properties": {"towns": {"type": "array", "items": {"enum": ["Oslo", "Rome"]}, "minItems": 1, "maxItems": 2}},
    "required": ["towns"],
    "additionalProperties": False,
}
ASKED = {"call": "Call the weather tool for Oslo.", "free": "What is the capital of Norway?"}
SAMPLINGS = [Sampling(), Sampling(temperature=0.6, seed=5, repetition_penalty=1.1)]


@pytest.fixture(scope="module")
def chat() -> Model:
    return open_model(str(TINY_CHAT))


class Asking:
    """Requests with one tool, for the engine."""

    def __init__(self, chat: Model, parameters: dict[str, Any], words: str, *, strict: bool = True) -> None:
        function = {"name": "get_weather", "parameters": parameters, "strict": strict}
        self.request = ChatRequest.model_validate(
            {
                "messages": [{"role": "user", "content": ASKED[words]}],
                "tools": [{"type": "function", "function": function}],
            }
        )
        self.codec = TextCodec(MLXTokenizer(chat.tokenizer), chat.vocab)

    async def row(self, id: str, sampling: Sampling, *, held: bool = True, **fields: Any) -> GenerationRequest:
        prompt = await self.codec.prompt(self.request)
        grammar = await self.codec.grammar(self.request, prompt, drafts=True) if held else None
        assert (grammar is not None) == held
        return GenerationRequest(id, prompt.tokens, 120, sampling, grammar=grammar, top_logprobs=1, **fields)

    async def calls(self, said: list[int]) -> list[Any]:
        output = self.codec.output(self.request, await self.codec.prompt(self.request), "job")
        delta = sum((output.feed(token) for token in said), OutputDelta()) + output.flush()
        return [json.loads(call["function"]["arguments"]) for call in delta.tool_calls]


@pytest.mark.parametrize("words", ASKED)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
async def test_a_valid_answer_is_the_same_token_for_token(chat: Model, words: str, sampling: Sampling) -> None:
    asking = Asking(chat, CITY, words)
    free = answer(chat, await asking.row("a", sampling, held=False))
    held = answer(chat, await asking.row("a", sampling))
    calls = await asking.calls(tokens(free))
    assert all(Draft202012Validator(CITY).is_valid(call) for call in calls)
    assert tokens(held) == tokens(free)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
async def test_a_call_satisfies_a_schema_that_the_model_would_break(chat: Model, sampling: Sampling) -> None:
    asking = Asking(chat, TOWNS, "call")
    free = await asking.calls(tokens(answer(chat, await asking.row("a", sampling, held=False))))
    assert not any(Draft202012Validator(TOWNS).is_valid(call) for call in free)
    whole = answer(chat, await asking.row("a", sampling))
    calls = await asking.calls(tokens(whole))
    assert calls
    for call in calls:
        Draft202012Validator(TOWNS).validate(call)
    for delivered in range(1, len(tokens(whole)), 3)[:: 1 if examples(4) > 1 else 10]:
        row = await asking.row("a", sampling, resume_tokens=tuple(tokens(whole)[:delivered]))
        assert answer(chat, row) == whole[delivered:]


async def test_rows_of_a_batch_say_what_they_say_alone(chat: Model) -> None:
    rows = dict[str, GenerationRequest]()
    alone = dict[str, Any]()
    for index, sampling in enumerate(SAMPLINGS * 2):
        for words in ASKED:
            asking, held = Asking(chat, TOWNS, words), index < 2
            id = f"{words} {index}"
            rows[id] = await asking.row(id, replace(sampling, seed=index), held=held)
            alone[id] = answer(chat, await asking.row(id, replace(sampling, seed=index), held=held))
    together = answers(chat, rows.values(), steps_apart=2)
    for id in rows:
        assert tokens(together[id]) == tokens(alone[id])


async def test_drafts_change_no_answer(chat: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {words: Asking(chat, TOWNS, words) for words in ASKED}
    requests = {
        f"{words} {index}": (asking, sampling)
        for words, asking in asked.items()
        for index, sampling in enumerate(SAMPLINGS)
    }
    plain = {id: answer(chat, await asking.row(id, sampling)) for id, (asking, sampling) in requests.items()}
    verify_everything(monkeypatch)
    oracle = Oracle({id: tokens(said) for id, said in plain.items()})
    drafting = Speculator(
        [oracle, GrammarProposer()],
        max_draft=MAX_DRAFT,
        recurrence=recurrence_of(chat),
        eos_ids=chat.tokenizer.eos_token_ids,
    )
    run = Run(chat, speculator=drafting)
    for id, (asking, sampling) in requests.items():
        run.submit(await asking.row(id, sampling))
    run.drain()
    assert run.generated == {id: tokens(said) for id, said in plain.items()}
    assert oracle.accepted > 20


async def test_no_mask_is_computed_before_a_call(chat: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, masks = [Asking(chat, TOWNS, words) for words in ASKED], list[int]()
    bitmask = CallsGrammar.bitmask

    def counting(self: CallsGrammar) -> bytes | None:
        masks.append(self.accepted)
        return bitmask(self)

    monkeypatch.setattr(CallsGrammar, "bitmask", counting)
    call, free = [answer(chat, await each.row("a", Sampling())) for each in asked]
    begins = chat.tokenizer.encode("<tool_call>")
    assert len(tokens(free)) > 3
    assert masks[0] == tokens(call).index(begins[-1]) + 1
    assert len(masks) <= len(tokens(call))
