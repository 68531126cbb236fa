"""Draws: right by definition, the same together as alone, and every field reaches its row."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driver import answer, answers, tokens
from tests.engine.tiny import CONFIGS, EOS, prompt, write_checkpoint
from tests.selection import examples
from worker.engine import memory
from worker.engine.batch.row import Row
from worker.engine.model.load import Model, open_model
from worker.engine.sampling import sampler
from worker.engine.sampling.sampler import Sampler, _RowsAlike, draw, draw_key, sampling_kind
from worker.request import GenerationRequest, Sampling

FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def row(sampling: Sampling, *, drawn: int = 0) -> Row:
    return Row.of(GenerationRequest("a", (5,), 99, sampling, resume_tokens=(7,) * drawn))


def logprobs_of(logits: list[list[float]], dtype: mx.Dtype = mx.float32) -> mx.array:
    """As upstream makes them."""
    made = mx.array(logits).astype(dtype)
    return made - mx.logsumexp(made, axis=-1, keepdims=True)


def drawn_by_many(logits: list[float], sampling: Sampling, rows: int) -> Counter[int]:
    every = draw(
        mx.repeat(logprobs_of([logits]), rows, axis=0), [row(replace(sampling, seed=seed)) for seed in range(rows)]
    )
    return Counter(every.tolist())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS.values(), ids=FLOATS)
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=least) for least in (1e-3, 1e-5, 1e-9, 1e-39, 1e-320)]
    + [
        Sampling(temperature=1.0, top_p=1e-300),
        Sampling(temperature=1e9, top_k=1),
        Sampling(temperature=2.0, min_p=1.0),
        Sampling(temperature=1e-320, top_p=1e-320, top_k=2, min_p=1e-320),
    ],
    ids=str,
)
def test_lowest_temperature_draws_the_best_token(sampling: Sampling, dtype: mx.Dtype) -> None:
    logprobs = mx.repeat(mx.array([[-3.0, -0.5, -1.5, -7.0]]).astype(dtype), 8, axis=0)
    assert draw(logprobs, [row(replace(sampling, seed=seed)) for seed in range(8)]).tolist() == [1] * 8


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e9),
        Sampling(temperature=1e9, top_p=1 - 1e-12),
        Sampling(temperature=1e9, top_k=4),
        Sampling(temperature=1e9, top_k=10**12),
        Sampling(temperature=1e9, min_p=1e-320),
    ],
    ids=str,
)
def test_highest_temperature_draws_any_possible_token(sampling: Sampling) -> None:
    assert set(drawn_by_many([3.0, -2.0, -math.inf, 0.0, 1.0], sampling, 400)) == {0, 1, 3, 4}


LOGITS = [0.3, -1.2, 2.1, 0.9, -3.0, 1.6, -0.4, 2.9, -2.2, 0.0, 1.1, -0.8]


def kept(how: Sampling) -> set[int]:
    """Return the tokens that remain by the definitions of the filters, the best first."""
    mass, total = 0.0, sum(map(math.exp, LOGITS))
    found: set[int] = set()
    for place, token in enumerate(sorted(range(len(LOGITS)), key=lambda token: -LOGITS[token])):
        p = math.exp(LOGITS[token]) / total
        if mass < how.top_p and (not how.top_k or place < how.top_k) and p >= how.min_p * math.exp(2.9) / total:
            found.add(token)
        mass += p
    return found


@pytest.mark.parametrize("min_p", [0.0, 0.08, 0.4])
@pytest.mark.parametrize("top_k", [0, 2, 5, 12, 50])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.6, 0.1])
def test_filters_follow_their_definitions(top_p: float, top_k: int, min_p: float) -> None:
    how = Sampling(temperature=50.0, top_p=top_p, top_k=top_k, min_p=min_p)
    assert set(drawn_by_many(LOGITS, how, 600)) == kept(how)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_tokens_are_drawn_as_often_as_they_are_probable(temperature: float) -> None:
    often, rows = drawn_by_many(LOGITS, Sampling(temperature=temperature), 20_000), 20_000
    weights = [math.exp(logit / temperature) for logit in LOGITS]
    for token, weight in enumerate(weights):
        p = weight / sum(weights)
        assert abs(often[token] - rows * p) < 5 * math.sqrt(rows * p)


def test_a_draw_is_mlx_s_own_with_the_key_of_seed_and_count() -> None:
    logprobs = logprobs_of([LOGITS] * 6)
    for seed in (0, 7, 2**63 - 1, -(2**63)):
        rows = [row(Sampling(temperature=1.0, seed=seed), drawn=k) for k in range(6)]
        keys = [mx.random.key(draw_key(seed, k)) for k in range(6)]
        expected = [mx.random.categorical(logprobs[k], key=keys[k]).item() for k in range(6)]
        assert draw(logprobs, rows).tolist() == expected


def test_a_row_counts_its_draws() -> None:
    logprobs, whole = logprobs_of([LOGITS]), row(Sampling(temperature=1.0, seed=3))
    generated = [draw(logprobs, [whole]).item() for _ in range(9)]
    resumed = row(Sampling(temperature=1.0, seed=3), drawn=4)
    assert [draw(logprobs, [resumed]).item() for _ in range(5)] == generated[4:]
    assert len(set(generated)) > 1


HOW = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-320, 0.3, 1.0, 30.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 1e-300]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, 7, 1000]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
# Coarse, so that equal logits are common.
LOGIT = st.integers(-40, 40).map(lambda n: n / 4) | st.just(-math.inf)


@settings(max_examples=examples(80), deadline=None)
@given(st.data(), st.lists(HOW, min_size=1, max_size=9), st.sampled_from(list(FLOATS)), st.integers(2, 40))
def test_rows_of_a_batch_draw_what_each_draws_alone(
    data: st.DataObject, hows: list[Sampling], dtype: str, vocab: int
) -> None:
    logits = data.draw(
        st.lists(st.lists(LOGIT, min_size=vocab, max_size=vocab), min_size=len(hows), max_size=len(hows))
    )
    logprobs = logprobs_of([[0.0, *rest[1:]] for rest in logits], FLOATS[dtype])
    together = [row(how) for how in hows]
    alone = [row(how) for how in hows]
    for _ in range(2):
        assert draw(logprobs, together).tolist() == [
            draw(logprobs[i : i + 1], [mine]).item() for i, mine in enumerate(alone)
        ]


def test_rows_with_large_vocabularies_draw_what_each_draws_alone() -> None:
    """With a vocabulary of the usual size, for which a device may divide its work differently."""
    filters: list[dict[str, Any]] = [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 50, "top_p": 0.8}, {"min_p": 0.02}]
    hows = [Sampling(temperature=1.0 + i / 10, seed=i, **filters[i % 5]) for i in range(10)]
    mx.random.seed(1)
    logits = 3 * mx.random.normal((10, 152_000))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    together = draw(logprobs, [row(how) for how in hows]).tolist()
    assert together == [draw(logprobs[i : i + 1], [row(how)]).item() for i, how in enumerate(hows)]


def test_of_equal_tokens_greedy_takes_the_first() -> None:
    logprobs = logprobs_of([[1.0, 2.0, 2.0]] * 2)
    assert draw(logprobs, [row(Sampling()), row(Sampling(temperature=1.0, top_k=1, seed=5))]).tolist() == [1, 1]


def test_rows_are_of_one_kind_whose_draws_can_share_a_call() -> None:
    kinds = [sampling_kind(how) for how in (Sampling(1.0, top_p=0.9), Sampling(0.4, top_p=0.5, seed=3))]
    assert len(set(kinds)) == 1
    others = [Sampling(1.0), Sampling(1.0, top_k=5), Sampling(1.0, top_k=6), Sampling(1.0, min_p=0.1), Sampling()]
    assert len({*kinds, *map(sampling_kind, others)}) == 6


# Through the engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(write_checkpoint(CONFIGS["qwen3"], tmp_path_factory.mktemp("qwen3"))))


def request(sampling: Sampling, *, id: str = "a", **more: Any) -> GenerationRequest:
    return GenerationRequest(
        id, prompt(9, 1), 24, replace(sampling, logit_bias=sampling.logit_bias or ((EOS, -100.0),)), **more
    )


DRAWN = Sampling(temperature=1.0, seed=7)
CHANGED = {
    "temperature": (DRAWN, replace(DRAWN, temperature=3.0)),
    "top_p": (DRAWN, replace(DRAWN, top_p=0.3)),
    "top_k": (DRAWN, replace(DRAWN, top_k=3)),
    "min_p": (DRAWN, replace(DRAWN, min_p=0.3)),
    "repetition_penalty": (Sampling(), Sampling(repetition_penalty=2.0)),
    "presence_penalty": (Sampling(), Sampling(presence_penalty=2.0)),
    "frequency_penalty": (Sampling(), Sampling(frequency_penalty=2.0)),
    "logit_bias": (Sampling(), Sampling(logit_bias=((EOS, -100.0), (50, 8.0)))),
    "seed": (DRAWN, replace(DRAWN, seed=8)),
}


def test_every_sampling_field_is_tested() -> None:
    assert {field.name for field in fields(Sampling)} == CHANGED.keys()


@pytest.mark.parametrize("field", CHANGED)
def test_each_field_reaches_the_row(model: Model, field: str) -> None:
    without, with_it = CHANGED[field]
    assert [f.name for f in fields(Sampling) if getattr(without, f.name) != getattr(with_it, f.name)] == [field]
    assert tokens(answer(model, request(without))) != tokens(answer(model, request(with_it)))


def filtered(model: Model, **filters: Any) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    """Yield each token that a row of high temperature draws, and the ranked tokens at that step."""
    for outcome in answer(model, request(Sampling(temperature=5.0, seed=1, **filters), top_logprobs=1024)):
        assert outcome.token is not None
        assert outcome.logprobs is not None
        yield outcome.token, list(outcome.logprobs.top)


def test_top_k_leaves_the_k_best(model: Model) -> None:
    assert all(token in dict(ranked[:3]) for token, ranked in filtered(model, top_k=3))


def test_top_p_leaves_the_nucleus(model: Model) -> None:
    for token, ranked in filtered(model, top_p=0.6):
        before = ranked[: [other for other, _ in ranked].index(token)]
        assert sum(math.exp(logprob) for _, logprob in before) < 0.6 + 1e-5


def test_min_p_leaves_what_is_near_the_best(model: Model) -> None:
    for token, ranked in filtered(model, min_p=0.2):
        assert dict(ranked)[token] >= ranked[0][1] + math.log(0.2) - 1e-5


def test_a_low_temperature_is_nearly_greedy_and_a_high_one_is_not(model: Model) -> None:
    greedy = tokens(answer(model, request(Sampling())))
    assert tokens(answer(model, request(Sampling(temperature=0.001, seed=4)))) == greedy
    hot = [tokens(answer(model, request(Sampling(temperature=1000.0, seed=seed)))) for seed in range(2)]
    assert all(len(set(generated)) > 20 for generated in hot)


def test_strongly_biased_token_is_always_drawn(model: Model) -> None:
    assert tokens(answer(model, request(Sampling(temperature=1.0, logit_bias=((77, 100.0),))))) == [77] * 24


def test_presence_counts_once_and_frequency_each_time(model: Model) -> None:
    """The bias favours one of two leading tokens until the penalties of its repetitions add up."""
    bias = ((77, 60.0), (78, 50.0))
    once = request(Sampling(presence_penalty=2.0, logit_bias=bias))
    assert set(tokens(answer(model, once))) == {77}
    each = request(Sampling(frequency_penalty=2.0, logit_bias=bias))
    generated = tokens(answer(model, each))
    assert set(generated) == {77, 78}
    assert generated[:3] == [77] * 3


def test_seeded_row_draws_the_same_while_others_join_and_leave(model: Model) -> None:
    mine = request(Sampling(temperature=1.0, top_p=0.95, seed=11), id="mine")
    others = [
        GenerationRequest(str(i), prompt(4 + 3 * i, i), 2 + 5 * i, CHANGED[field][1])
        for i, field in enumerate(sorted(CHANGED))
    ]
    expected = answer(model, mine)
    for place in (0, 4, 9):
        crowd = [*others[:place], mine, *others[place:]]
        assert answers(model, crowd, steps_apart=2)["mine"] == expected


MIXED = [Sampling(1.0, top_p=0.9), Sampling(), Sampling(0.7, top_p=0.5), Sampling(1.2, min_p=0.1)]


def test_rows_that_are_drawn_in_parts_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    mx.random.seed(1)
    logprobs = mx.log(mx.softmax(3 * mx.random.normal((40, 100))))

    def drawn() -> list[int]:
        rows = [row(replace(MIXED[index % 4], seed=index)) for index in range(40)]
        return draw(logprobs, rows).tolist()  # type: ignore[return-value]

    whole = drawn()
    for rows_at_once in 1, 3, 7, 10:
        monkeypatch.setattr(sampler, "DRAWN_AT_ONCE", rows_at_once * 100 + 99)
        assert drawn() == whole
    assert len({*whole}) > 10


def test_memory_of_drawing_is_what_admission_reserves_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocab = 48, 1 << 14
    for module in memory, sampler:
        monkeypatch.setattr(module, "DRAWN_AT_ONCE", 6 * vocab)
    logits = mx.random.normal((rows, vocab))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logits, logprobs)
    held = mx.get_active_memory() - 8 * rows * vocab
    mx.reset_peak_memory()
    mx.eval(draw(logprobs, [row(Sampling(0.8, top_p=0.9, min_p=0.01, seed=seed)) for seed in range(rows)]))
    reserved = memory.MemoryModel(weights_bytes=0, vocab=vocab).logit_bytes(rows)
    assert 0.4 * reserved < mx.get_peak_memory() - held <= reserved


def test_rows_of_one_kind_are_drawn_in_one_call(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[list[int]] = []  # the rows of each call, for each step

    def step(each: Sampler, logprobs: mx.array) -> mx.array:
        steps.append([])
        return draw_step(each, logprobs)

    def call(alike: _RowsAlike, logprobs: mx.array) -> mx.array:
        steps[-1].append(logprobs.shape[0])
        return draw_alike(alike, logprobs)

    draw_step, draw_alike = Sampler.__call__, _RowsAlike.draw
    monkeypatch.setattr(Sampler, "__call__", step)
    monkeypatch.setattr(_RowsAlike, "draw", call)
    hows = [
        Sampling(),
        Sampling(1.0, seed=1),
        Sampling(0.5, seed=2),
        Sampling(1.0, top_p=0.9),
        Sampling(2.0, top_p=0.5),
        Sampling(),
    ]
    answers(model, [request(how, id=str(i)) for i, how in enumerate(hows)])
    assert steps == [[2, 2, 2]] * 24
