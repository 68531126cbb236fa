"""Sixteen rows with different parameters in one batch: each equals its answer alone."""

import asyncio
import json

import pytest

from schemas import ChatRequest
from tests.engine.driver import answer, answers, tokens
from tests.engine.tiny import CONFIGS, EOS, prompt, write_checkpoint
from worker.engine.model.load import Model, open_model
from worker.engine.tokenizer import MLXTokenizer
from worker.outcomes import Sampled
from worker.request import GenerationRequest, GrammarState, Sampling
from worker.text.codec import TextCodec

NO_END = ((EOS, -100.0),)
NO_THINKING = ((3, -100.0),)  # which no grammar ends, and a random model neither
HOWS: dict[str, Sampling] = {
    "greedy": Sampling(),
    "greedy beside it": Sampling(),
    "seeded": Sampling(temperature=1.0, seed=5),
    "seeded alike": Sampling(temperature=1.0, seed=6),
    "hot": Sampling(temperature=2.0, seed=7),
    "top_k": Sampling(temperature=1.0, top_k=20, seed=8),
    "top_k, colder": Sampling(temperature=0.6, top_k=20, top_p=0.9, seed=9),
    "top_p": Sampling(temperature=1.0, top_p=0.8, seed=10),
    "min_p": Sampling(temperature=1.2, min_p=0.1, seed=11),
    "all filters": Sampling(temperature=0.9, top_p=0.95, top_k=40, min_p=0.02, seed=12),
    "repetition": Sampling(repetition_penalty=1.3),
    "presence, frequency": Sampling(presence_penalty=1.0, frequency_penalty=0.5, temperature=0.8, seed=13),
    "bias": Sampling(logit_bias=(*NO_END, (40, 6.0))),
    "logprobs": Sampling(temperature=1.0, seed=14),
    "json": Sampling(logit_bias=NO_THINKING),
    "json, drawn": Sampling(temperature=1.0, top_p=0.95, seed=15, logit_bias=NO_THINKING),
}
LOGPROBS = {"greedy beside it": 3, "logprobs": 5, "all filters": 0, "json, drawn": 4}


@pytest.fixture(scope="module", params=["qwen3_5", "gpt_oss", pytest.param("mamba2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(write_checkpoint(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))))


JSON = ChatRequest.model_validate(
    {
        "messages": [{"role": "user", "content": "A number and whether it is large."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "number",
                "schema": {
                    "type": "object",
                    "properties": {"number": {"type": "integer", "maximum": 999}, "large": {"type": "boolean"}},
                    "required": ["number", "large"],
                    "additionalProperties": False,
                },
            },
        },
    }
)


async def guide(language: TextCodec) -> GrammarState | None:
    return await language.grammar(JSON, await language.prompt(JSON))


def requests(language: TextCodec) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            id,
            prompt(5 + 11 * i % 40, i),
            100 if id.startswith("json") else 10 + 3 * i % 9,
            how,
            grammar=asyncio.run(guide(language)) if id.startswith("json") else None,
            top_logprobs=LOGPROBS.get(id),
        )
        for i, (id, how) in enumerate(HOWS.items())
    ]


def test_each_of_sixteen_mixed_rows_equals_its_answer_alone(model: Model) -> None:
    language = TextCodec(MLXTokenizer(model.tokenizer), model.vocab)
    together = answers(model, requests(language), steps_apart=1)
    for alone in requests(language):
        mine, expected = together[alone.id], answer(model, alone)
        assert tokens(mine) == tokens(expected), alone.id
        assert mine[-1].finish_reason == expected[-1].finish_reason
        assert logprobs(mine) == [pytest.approx(each, abs=1e-4) for each in logprobs(expected)]
        assert all((each.logprobs is None) == (alone.id not in LOGPROBS) for each in mine if each.token is not None)
    for id in ("json", "json, drawn"):
        generated = json.loads(model.tokenizer.decode(tokens(together[id])))
        assert (type(generated["number"]), type(generated["large"])) == (int, bool)


def logprobs(outcomes: list[Sampled]) -> list[dict[int, float]]:
    """Return log probabilities by token; that of the drawn token under -1."""
    return [{-1: each.logprobs.token, **dict(each.logprobs.top)} for each in outcomes if each.logprobs]
