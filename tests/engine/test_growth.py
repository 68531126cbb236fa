"""Rows without a stated limit: their memory grows with their answers, and none fails for it."""

import gc
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.speculation.oracle import WRONG, Oracle, any_width, pause_nothing, speculator_of
from tests.engine.test_memory import DEAR_LENGTH, built
from tests.engine.tiny import alone, prompt
from worker.engine import admission
from worker.engine.model.load import Model
from worker.engine.speculation import speculator
from worker.schedule import growth
from worker.schedule.grouping import StepCost
from worker.schedule.speculation.offer import MAX_DRAFT

PROMPT, FIRST = 60, 64  # tokens; `FIRST` are reserved for an answer at first
SEEDS = 0, 1, 2, 6  # of prompts whose answers have more than 1,000 tokens


@pytest.fixture
def wide_model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """Return a model whose weights include what other tests have left in memory."""
    monkeypatch.setattr(growth, "_FIRST", FIRST)
    monkeypatch.setattr(growth, "_KNOWN", 1_000)
    for module in growth, admission:
        monkeypatch.setattr(module, "BUFFER_TOKENS", FIRST)
    gc.collect()
    return replace(built(), costs=replace(built().costs, weights_bytes=mx.get_active_memory()))


@cache
def whole(seed: int, answer: int) -> list[int]:
    return alone(built().network, prompt(PROMPT, seed), answer)


def memory_for(model: Model, rows: int, answer: int) -> int:
    """Return the bytes in which this number of rows fits at their end."""
    return model.costs.peak_bytes([[PROMPT + answer] * rows])


def run_in(model: Model, memory: int, cost: StepCost = ONE_GROUP) -> Run:
    run = Run(model, step_s=1.0, memory=memory)
    run.group_by(cost)
    return run


@pytest.mark.parametrize("cost", [ONE_GROUP, EACH_ALONE, DEAR_LENGTH])
def test_rows_start_together_without_memory_for_their_ends_and_all_end_as_alone_the_oldest_first(
    wide_model: Model, cost: StepCost
) -> None:
    answer, rows = 500, 5
    limit = memory_for(wide_model, 2, answer)
    run = run_in(wide_model, limit, cost)
    for i in range(rows):
        run.add(str(i), prompt(PROMPT, SEEDS[i % 4]), max_tokens=answer, grows=True)
    run.until(lambda: len(run.engine._running) == rows)
    preemptions, ended_at = 0, dict[str, int]()
    while len(run.engine):
        preemptions += run.step().num_preemptions
        ended_at |= {id: run.steps for id in run.ended if id not in ended_at}
        assert mx.get_peak_memory() <= limit
        assert run.steps < 20_000
    assert all(run.generated[str(i)] == whole(SEEDS[i % 4], answer) for i in range(rows))
    assert preemptions > 0
    assert not run.cut
    times = [ended_at[str(i)] for i in range(rows)]
    assert times[0] == min(times), "the oldest first"


def test_row_that_outgrows_memory_alone_ends_with_length_and_says_so(
    wide_model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_in(wide_model, memory_for(wide_model, 1, 500))
    run.add("endless", prompt(PROMPT, SEEDS[0]), max_tokens=100_000, grows=True)
    run.add("other", prompt(PROMPT, SEEDS[1]), max_tokens=200, grows=True)
    run.drain()
    said = run.generated["endless"]
    assert (run.ended["endless"], run.cut) == ("length", ["endless"])
    assert 500 <= len(said) < 1_000
    assert said == whole(SEEDS[0], 1_000)[: len(said)]
    assert run.generated["other"] == whole(SEEDS[1], 200)
    assert "endless: memory holds no longer row" in caplog.text


def test_row_that_another_worker_has_made_longer_than_memory_ends_where_it_is(wide_model: Model) -> None:
    said = whole(SEEDS[0], 1_000)
    run = run_in(wide_model, memory_for(wide_model, 1, 200))
    run.add("a", prompt(PROMPT, SEEDS[0]), max_tokens=100_000, resume_tokens=said, grows=True)
    run.drain()
    assert (run.ended["a"], run.cut, run.generated["a"]) == ("length", ["a"], said)


def test_prompt_that_leaves_no_memory_for_an_answer_is_refused(wide_model: Model) -> None:
    run = run_in(wide_model, memory_for(wide_model, 1, 200))
    run.add("a", prompt(2_000, 1), max_tokens=100_000, grows=True)
    run.drain()
    assert run.ended["a"] == "refused"
    assert "shorten the prompt by about" in run.refused["a"]


def test_prompt_that_leaves_less_memory_than_is_likely_is_answered(wide_model: Model) -> None:
    run = run_in(wide_model, wide_model.costs.peak_bytes([[PROMPT + 20]]))
    run.add("a", prompt(PROMPT, SEEDS[0]), max_tokens=100_000, grows=True)
    run.drain()
    assert run.ended["a"] == "length"
    assert len(run.generated["a"]) >= 20
    assert run.generated["a"] == whole(SEEDS[0], 1_000)[: len(run.generated["a"])]


def test_stated_limits_are_kept_and_offline_rows_give_way_first(wide_model: Model) -> None:
    at_first = [[PROMPT + tokens] for tokens in (700, 700, FIRST, FIRST)]
    run = run_in(wide_model, wide_model.costs.peak_bytes(at_first), EACH_ALONE)
    run.add("stated", prompt(PROMPT, SEEDS[0]), max_tokens=700)
    run.add("grows", prompt(PROMPT, SEEDS[1]), max_tokens=900, grows=True)
    run.add("young", prompt(PROMPT, SEEDS[2]), max_tokens=900, grows=True)
    run.add("offline", prompt(PROMPT, SEEDS[3]), max_tokens=700, lane="batch")
    lost = list[str]()
    while len(run.engine):
        before = {*run.active}
        run.step()
        lost += sorted(before & {*run.waiting})
    assert lost[0] == "offline"
    assert "stated" not in lost
    assert "grows" not in lost
    expected = {"stated": (0, 700), "grows": (1, 900), "young": (2, 900), "offline": (3, 700)}
    assert run.generated == {id: whole(SEEDS[seed], tokens) for id, (seed, tokens) in expected.items()}


def test_rows_with_drafts_grow_within_memory_and_end_as_alone(
    wide_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, rows = 500, 5
    monkeypatch.setattr(speculator, "choose_width", any_width())
    pause_nothing(monkeypatch)
    answers = {str(i): whole(SEEDS[i % 4], answer) for i in range(rows)}
    costs = replace(wide_model.costs, max_draft=MAX_DRAFT)
    limit = costs.peak_bytes([[PROMPT + answer] * 2])
    oracle = Oracle(answers, seed=1, wrong=WRONG[:20])
    run = Run(wide_model, step_s=1.0, memory=limit, speculator=speculator_of(wide_model, oracle))
    run.group_by(ONE_GROUP)
    for id in answers:
        run.add(id, prompt(PROMPT, SEEDS[int(id) % 4]), max_tokens=answer, grows=True)
    preemptions = 0
    while len(run.engine):
        preemptions += run.step().num_preemptions
        assert mx.get_peak_memory() <= limit
    assert run.generated == answers
    assert preemptions > 0
    assert oracle.accepted > 0


def test_what_is_reserved_follows_the_answers_that_have_ended(
    wide_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growth, "_KNOWN", 2)
    run = run_in(wide_model, memory_for(wide_model, 8, 500))
    for i in range(4):
        run.add(str(i), prompt(PROMPT, SEEDS[i]), max_tokens=300, grows=i < 3)
    run.drain()
    run.add("next", prompt(PROMPT, SEEDS[0]), max_tokens=1_000, grows=True)
    run.step()
    (row,) = run.engine._active
    assert row.reserved == 300
