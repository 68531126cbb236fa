"""Each row of a batch equals its answer alone."""

import random
from functools import cache
from pathlib import Path

import pytest

from tests.engine.driver import Run
from tests.engine.tiny import (
    CONFIGS,
    FAMILIES,
    ONLY_MLX_VLM,
    VOCAB,
    alone,
    greedy_with_logprobs,
    network,
    prompt,
    write_checkpoint,
)
from tests.engine.tiny import model as family_model
from worker.engine.batch.decode_batch import DecodeBatch
from worker.engine.engine import Engine
from worker.engine.model.load import Model, open_model
from worker.engine.options import EngineOptions
from worker.outcomes import StepReport
from worker.request import GenerationRequest, Sampling

LENGTHS = (1, 2, 37, 5, 64, 16, 3, 90, 17, 8, 33, 150, 4, 48)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    return open_model(str(write_checkpoint(CONFIGS[request.param], folder)))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(write_checkpoint(CONFIGS["qwen3_5"], tmp_path_factory.mktemp("qwen3_5"))))


NINE = tuple(range(9))


def asked(i: int) -> tuple[tuple[int, ...], int]:
    """The prompt and max_tokens of row i."""
    return prompt(LENGTHS[i], i), 8 + 7 * i % 17


@cache
def outcomes_alone(family: str, i: int) -> list[tuple[int, float]]:
    return greedy_with_logprobs(network(family), *asked(i))


@pytest.mark.parametrize(
    "step_s",
    [
        pytest.param(0.0, id="no time to spare"),
        pytest.param(0.02, id="some", marks=pytest.mark.slow),
        pytest.param(1.0, id="plenty", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", [*FAMILIES, *ONLY_MLX_VLM])
def test_rows_that_join_leave_and_are_preempted_equal_their_answers_alone(family: str, step_s: float) -> None:
    run, rng = Run(family_model(family), step_s=step_s), random.Random(f"{family} {step_s}")
    cancelled, preempted = {"3": rng.randrange(4, 20), "8": rng.randrange(4, 20)}, set[str]()
    while len(run.generated) < len(NINE) or len(run.engine):
        if run.steps % 2 == 0 and (i := run.steps // 2) in NINE:
            tokens, max_tokens = asked(i)
            run.add(str(i), tokens, max_tokens=max_tokens, top_logprobs=0)
        for id in [id for id, after in cancelled.items() if run.steps == 2 * int(id) + after]:
            run.engine.remove(id)
        if rng.random() < 0.45 and run.active:
            preempted.add(id := rng.choice(run.active))
            run.preempt(id)
        elif rng.random() < 0.3:
            run.readmit(keep_caches=rng.random() < 0.7)
        if not run.active:
            run.readmit()
        run.step()
        assert run.steps < 2000
    assert len(preempted) > 2
    for i in NINE:
        expected, generated = outcomes_alone(family, i), run.generated[str(i)]
        if str(i) in cancelled:
            expected = expected[: len(generated)]
        assert generated == [token for token, _ in expected], i
        assert run.logprobs[str(i)] == pytest.approx([logprob for _, logprob in expected], abs=1e-4), i


def test_interactive_row_preempts_an_offline_one_at_the_row_limit(model: Model) -> None:
    run, offline = Run(model, rows=2), {id: prompt(20, seed) for seed, id in enumerate(("old", "young"))}
    for id, tokens in offline.items():
        run.add(id, tokens, max_tokens=30, lane="batch")
    while not all(run.generated.values()):
        run.step()
    run.add("talk", prompt(20, 9), max_tokens=5)
    run.step()
    assert sorted(run.active) == ["old", "talk"]
    while "talk" not in run.ended:
        run.step()
    run.drain()
    for id, tokens in offline.items():
        assert run.generated[id] == [token for token, _ in greedy_with_logprobs(model.network, tokens, 30)], id


def test_long_prompt_in_chunks_gives_the_same_answer(model: Model) -> None:
    run = Run(model, step_s=0.0)  # no time to spare: the least budget at every step
    run.add("short", prompt(4, 1), max_tokens=40)
    run.step()
    run.add("long", prompt(300, 2), max_tokens=5)
    run.step()
    assert not run.generated["long"]
    assert run.drain() == {
        "short": alone(model.network, prompt(4, 1), 40),
        "long": alone(model.network, prompt(300, 2), 5),
    }


def test_removed_row_frees_its_slot_at_once(qwen: Model) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1))
    run.add("b", prompt(200, 2))
    run.step()
    run.engine.remove("b")
    assert len(run.engine) == 1
    run.engine.remove("a")
    assert len(run.engine) == 0
    run.engine.remove("never there")


def test_an_answer_ends_at_its_limit(qwen: Model) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1), max_tokens=7, sampling=Sampling(logit_bias=((2, -100.0),)))
    assert len(run.drain()["a"]) == 7
    assert run.ended == {"a": "length"}


def test_end_of_sequence_token_is_not_reported(qwen: Model) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1), sampling=Sampling(logit_bias=((2, 100.0),)))
    assert run.drain() == {"a": []}
    assert run.ended == {"a": "stop"}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=5),
        Sampling(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3),
    ],
    ids=["greedy", "seeded", "penalties"],
)
@pytest.mark.parametrize(
    "delivered", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(23, marks=pytest.mark.slow)]
)
def test_resumed_row_continues_as_if_never_interrupted(model: Model, sampling: Sampling, delivered: int) -> None:
    whole = Run(model)
    whole.add("a", prompt(40, 3), max_tokens=24, sampling=sampling)
    generated = whole.drain()["a"]
    if len(generated) <= delivered:
        return
    resumed = Run(model)
    resumed.add("beside", prompt(11, 4))
    resumed.step()
    resumed.add("a", prompt(40, 3), max_tokens=24, sampling=sampling, resume_tokens=generated[:delivered])
    assert resumed.drain()["a"] == generated


DRAWN = Sampling(temperature=1.0, seed=7)


@pytest.mark.parametrize(
    "sampling",
    [DRAWN, Sampling(temperature=0.8, top_p=0.9, seed=1), Sampling(temperature=1.2, top_k=20, min_p=0.05, seed=2)],
)
def test_seeded_row_draws_the_same_in_any_batch(qwen: Model, sampling: Sampling) -> None:
    lonely, busy = Run(qwen), Run(qwen)
    lonely.add("a", prompt(9, 1), sampling=sampling)
    for i in range(6):
        busy.add(str(i), prompt(5 + i, 10 + i), max_tokens=3 + 4 * i, sampling=Sampling(temperature=1.0, seed=i))
        busy.step()
    busy.add("a", prompt(9, 1), sampling=sampling)
    assert busy.drain()["a"] == lonely.drain()["a"]


def test_another_seed_draws_other_tokens(qwen: Model) -> None:
    run = Run(qwen)
    for seed in range(3):
        run.add(str(seed), prompt(9, 1), sampling=Sampling(temperature=1.0, seed=seed))
    generated = run.drain()
    assert len({tuple(tokens) for tokens in generated.values()}) == 3


@pytest.mark.parametrize("filtered", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_filter_that_leaves_one_token_is_greedy(qwen: Model, filtered: dict[str, float]) -> None:
    run = Run(qwen)
    run.add("a", prompt(9, 1), sampling=Sampling(temperature=1.5, seed=3, **filtered))  # type: ignore[arg-type]
    assert run.drain()["a"] == alone(qwen.network, prompt(9, 1), 20)


def test_penalties_keep_a_row_from_repeating_itself(qwen: Model) -> None:
    run = Run(qwen)
    no_end = ((2, -100.0),)
    run.add("presence", prompt(3, 1), max_tokens=60, sampling=Sampling(presence_penalty=1000.0, logit_bias=no_end))
    run.add("frequency", prompt(3, 1), max_tokens=60, sampling=Sampling(frequency_penalty=1000.0, logit_bias=no_end))
    run.add("free", prompt(3, 1), max_tokens=60, sampling=Sampling(logit_bias=no_end))
    generated = run.drain()
    assert len(set(generated["presence"])) == len(set(generated["frequency"])) == 60
    assert len(set(generated["free"])) < 60


def test_a_repetition_penalty_counts_the_prompt(qwen: Model) -> None:
    tokens = tuple(range(10, VOCAB))  # all but ten
    run = Run(qwen)
    run.add("a", tokens, max_tokens=4, sampling=Sampling(repetition_penalty=1e6))
    assert all(token < 10 for token in run.drain()["a"])


def test_engine_survives_a_decode_step_that_fails_its_rows(qwen: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1))
    run.step()
    monkeypatch.setattr(DecodeBatch, "launch", _broken)
    run.until(lambda: bool(run.ended))  # at the first failure an earlier step may have been the cause
    monkeypatch.undo()
    assert run.ended == {"a": "faulted"}
    run.add("b", prompt(5, 1))
    assert run.drain()["b"] == alone(qwen.network, prompt(5, 1), 20)


def test_a_prompt_that_cannot_be_prefilled_fails_alone(qwen: Model) -> None:
    run = Run(qwen)
    run.add("a", prompt(5, 1))
    run.add("bad", ("no token", 1), max_tokens=2)  # type: ignore[arg-type]
    assert run.drain()["a"] == alone(qwen.network, prompt(5, 1), 20)
    assert run.ended["bad"] == "faulted"


def _broken(rows: DecodeBatch) -> None:
    raise RuntimeError("no such luck")


def test_open_model_finds_the_checkpoint(tmp_path: Path) -> None:
    model = open_model(str(write_checkpoint(CONFIGS["qwen3"], tmp_path)))
    assert (model.context, model.vocab, model.generation) == (2048, VOCAB, {"eos_token_id": 2, "do_sample": False})


def reports(engine: Engine, request: GenerationRequest) -> list[StepReport]:
    """Run a request to its end, and return the reports of its steps and of the one after it."""
    engine.add(request)
    found = list[StepReport]()
    while engine.needs_step:
        found.append(engine.step())
    return found


def marked(id: str, seed: int, *ends: int) -> GenerationRequest:
    return GenerationRequest(id, prompt(200, seed), 4, Sampling(), marks=tuple((f"{id}{end}", end) for end in ends))


def test_marks_are_held_with_their_tokens_and_reported_when_these_are_evicted(model: Model) -> None:
    first = reports(Engine(model, EngineOptions(1.0, prefix_bytes=1 << 30)), marked("a", 1, 20, 199))[-1]
    assert (first.prefix.marks, first.prefix.lost, first.prefix.emptied) == (2, (), False)
    engine = Engine(model, EngineOptions(1.0, prefix_bytes=first.prefix.nbytes))
    reports(engine, marked("a", 1, 20, 199))
    lost = {name for report in reports(engine, marked("b", 2, 199)) for name in report.prefix.lost}
    assert "a199" in lost
    assert not any(name.startswith("b") for name in lost)


def test_marks_of_a_prompt_that_is_not_cached_are_lost(model: Model) -> None:
    last = reports(Engine(model, EngineOptions(1.0, prefix_bytes=0)), marked("a", 1, 20, 199))
    assert [name for report in last for name in report.prefix.lost] == ["a20", "a199"]


def test_marks_of_a_prompt_that_is_given_up_are_lost(qwen: Model) -> None:
    engine = Engine(qwen, EngineOptions(0.0, prefix_bytes=1 << 30))
    engine.add(marked("a", 1, 199))
    engine.step()
    engine.remove("a")
    assert engine.step().prefix.lost == ("a199",)


def test_a_step_reports_the_measured_cost_of_prompts(qwen: Model) -> None:
    engine = Engine(qwen, EngineOptions(1.0))
    before = engine._prefills.token_cost
    costs = [report.prompt_cost for report in reports(engine, marked("a", 1))]
    assert costs[-1] == engine._prefills.token_cost != before
    assert costs[-1][0] > 0
