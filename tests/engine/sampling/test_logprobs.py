"""Logprobs equal those of mlx-lm's single-request path, in the order of a full sort."""

import math
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

from tests.engine.driver import answer, answers, tokens
from tests.engine.tiny import CONFIGS, EOS, prompt, write_checkpoint
from tests.selection import examples
from worker.engine.model.load import Model, open_model
from worker.engine.sampling.sampler import StepLogprobs
from worker.outcomes import Logprobs
from worker.request import GenerationRequest, Sampling

NO_END = ((EOS, -100.0),)
FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


@pytest.fixture(scope="module", params=["qwen3_5", "gpt_oss", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(write_checkpoint(CONFIGS[request.param], tmp_path_factory.mktemp(request.param))))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(write_checkpoint(CONFIGS["qwen3"], tmp_path_factory.mktemp("qwen3"))))


def ranked(row: list[float], n: int) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))[:n]


def test_a_greedy_row_reports_what_generate_step_reports(model: Model) -> None:
    mine = GenerationRequest("mine", prompt(13, 1), 20, top_logprobs=5)
    beside = [
        GenerationRequest(str(i), prompt(6 + 9 * i, 2 + i), 30, top_logprobs=[None, 0, 20][i % 3]) for i in range(6)
    ]
    outcomes = answers(model, [*beside[:3], mine, *beside[3:]], steps_apart=1)["mine"]
    steps = generate_step(mx.array(prompt(13, 1)), model.network, max_tokens=20)
    for sampled, (token, row) in zip(outcomes, steps, strict=False):
        if sampled.token is None:
            assert token == EOS
            break
        assert sampled.token == token
        assert sampled.logprobs is not None
        assert sampled.logprobs.token == pytest.approx(row[token].item(), abs=1e-4)
        assert [other for other, _ in sampled.logprobs.top] == ranked(row.tolist(), 5)  # type: ignore[arg-type]
        for other, logprob in sampled.logprobs.top:
            assert logprob == pytest.approx(row[other].item(), abs=1e-4)


def test_a_drawn_row_reports_its_logprobs_before_temperature_and_filters(qwen: Model) -> None:
    how = Sampling(temperature=3.0, top_k=8, seed=4, logit_bias=NO_END)
    outcomes = answer(qwen, GenerationRequest("a", prompt(9, 1), 16, how, top_logprobs=3))
    generated = tokens(outcomes)
    logits = qwen.network(mx.array([[*prompt(9, 1), *generated]]))[0, 8:-1]
    logits[:, EOS] -= 100.0
    rows: Any = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).tolist()
    for sampled, token, row in zip(outcomes, generated, rows, strict=True):
        assert sampled.logprobs is not None
        assert sampled.logprobs.token == pytest.approx(row[token], abs=1e-3)
        assert [other for other, _ in sampled.logprobs.top] == ranked(row, 3)
    assert any(token != ranked(row, 1)[0] for token, row in zip(generated, rows, strict=True))


def test_penalties_and_bias_are_in_the_logprobs(qwen: Model) -> None:
    plain, biased = (
        answer(qwen, GenerationRequest("a", prompt(9, 1), 1, Sampling(logit_bias=bias), top_logprobs=1))[0].logprobs
        for bias in ((), ((77, 100.0),))
    )
    assert biased == Logprobs(pytest.approx(0.0, abs=1e-6), ((77, pytest.approx(0.0, abs=1e-6)),))
    assert plain != biased


def test_only_rows_that_want_logprobs_get_them_for_every_token(qwen: Model) -> None:
    asked = {"none": None, "own": 0, "three": 3, "more": 20}
    outcomes = answers(
        qwen,
        [
            GenerationRequest(id, prompt(7, 1), 9, Sampling(logit_bias=NO_END), top_logprobs=n)
            for id, n in asked.items()
        ],
        steps_apart=3,
    )
    assert [sampled.logprobs for sampled in outcomes["none"]] == [None] * 9
    for id, n in asked.items():
        assert tokens(outcomes[id]) == tokens(outcomes["none"])
        if n is not None:
            assert [len(s.logprobs.top) for s in outcomes[id] if s.logprobs] == [n] * 9
    for three, more in zip(outcomes["three"], outcomes["more"], strict=True):
        assert three.logprobs
        assert more.logprobs
        assert dict(more.logprobs.top[:3]) == pytest.approx(dict(three.logprobs.top), abs=1e-4)


def test_an_end_of_sequence_has_no_logprobs(qwen: Model) -> None:
    (only,) = answer(
        qwen, GenerationRequest("a", prompt(5, 1), 9, Sampling(logit_bias=((EOS, 100.0),)), top_logprobs=2)
    )
    assert (only.token, only.logprobs) == (None, None)


# Coarse, so that equal ones are common; half precision makes more of them.
LOGIT = st.integers(-60, 60).map(lambda n: n / 4) | st.just(-math.inf)


@settings(max_examples=examples(150), deadline=None)
@given(st.data(), st.sampled_from(list(FLOATS)), st.integers(1, 50), st.integers(1, 4))
def test_alternatives_are_those_of_a_full_sort(data: st.DataObject, dtype: str, vocab: int, rows: int) -> None:
    logits = [[0.0, *data.draw(st.lists(LOGIT, min_size=vocab - 1, max_size=vocab - 1))] for _ in range(rows)]
    made = mx.array(logits).astype(FLOATS[dtype])
    given_ = made - mx.logsumexp(made, axis=-1, keepdims=True)
    exact: Any = (given_.astype(mx.float32) - mx.logsumexp(given_.astype(mx.float32), axis=-1, keepdims=True)).tolist()
    alternatives = data.draw(st.lists(st.integers(0, 20), min_size=rows, max_size=rows))
    generated = data.draw(st.lists(st.integers(0, vocab - 1), min_size=rows, max_size=rows))
    found = StepLogprobs(given_, mx.array(generated, dtype=mx.uint32), alternatives).rows
    for logprobs, row, token, n in zip(found, exact, generated, alternatives, strict=True):
        likely = [other for other in ranked(row, n) if row[other] > -math.inf]
        assert [other for other, _ in logprobs.top] == likely
        assert [logprob for _, logprob in logprobs.top] == pytest.approx([row[other] for other in likely], abs=1e-5)
        assert logprobs.token == pytest.approx(row[token], abs=1e-5)
        assert all(logprob <= 0 for _, logprob in [(token, logprobs.token), *logprobs.top])


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
def test_probabilities_add_up_to_one_in_any_precision(dtype: mx.Dtype) -> None:
    logits = (mx.random.normal((1, 20), key=mx.random.key(1)) * 6 + 20).astype(dtype)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    (found,) = StepLogprobs(logprobs, mx.array([3]), [20]).rows
    assert sum(math.exp(logprob) for _, logprob in found.top) == pytest.approx(1.0, abs=1e-5)
