"""Rows that do not fit together wait for each other, which changes no answer."""

import gc
from dataclasses import replace
from functools import cache

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.driver import EACH_ALONE, ONE_GROUP, Run
from tests.engine.tiny import CONFIGS, alone, build, model, model_of, prompt
from tests.selection import examples
from tests.support.chaos.churn import churn, growth
from worker.engine.admission.grouping import StepCost
from worker.engine.admission.tuning import MAX_OVERTAKES
from worker.engine.batch import groups
from worker.engine.model.calibration import calibrated
from worker.engine.model.load import Model
from worker.outcomes import Admitted, Preempted

# Its keys and values take far more than anything else.
WIDE = {**CONFIGS["llama"], "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
PROMPT, ANSWER = 200, 24
DEAR_LENGTH = StepCost(group_s=1e-5, row_s=1e-6, cell_s=1e-8)
TOKENS = PROMPT + ANSWER


@cache
def built() -> Model:
    network = build(WIDE)
    guessed = model_of(network, WIDE)
    return replace(guessed, costs=calibrated(guessed.costs, network, guessed.context))


@pytest.fixture
def wide_model() -> Model:
    """Return a model whose weights include what other tests have left in memory."""
    gc.collect()
    return replace(built(), costs=replace(built().costs, weights_bytes=mx.get_active_memory()))


@cache
def lonely(seed: int, answer: int = ANSWER) -> list[int]:
    return alone(built().network, prompt(PROMPT, seed), answer)


def memory_for(wide_model: Model, rows: int) -> int:
    """Return the bytes in which this number of rows fits, and one saved cache of a preempted row."""
    return wide_model.costs.peak_bytes([[TOKENS] * rows]) + wide_model.costs.row_bytes(1) - 1


def run_in(wide_model: Model, memory: int) -> Run:
    run = Run(wide_model, step_s=1.0, memory=memory)
    run.group_by(ONE_GROUP)
    return run


def test_with_no_memory_every_row_is_refused(wide_model: Model) -> None:
    run = Run(wide_model, step_s=1.0, memory=0)
    run.add("a", prompt(PROMPT, 1), max_tokens=ANSWER)
    run.drain()
    assert run.ended["a"] == "refused"


def test_jobs_that_need_ten_times_the_memory_all_finish_within_it(wide_model: Model) -> None:
    limit, jobs, answer, highest = memory_for(wide_model, 3), 76, 4, 0
    spare = limit - wide_model.costs.resident_bytes
    assert wide_model.costs.rectangle_bytes([TOKENS] * jobs) > 10 * spare
    run = Run(wide_model, step_s=1.0, memory=limit)
    for i in range(jobs):
        run.add(str(i), prompt(PROMPT, i % 6), max_tokens=answer, lane="batch" if i % 3 else "interactive")
    while len(run.engine):
        report = run.step()
        highest = max(highest, mx.get_peak_memory())
        if report.memory:  # the peak was reset
            predicted, measured = report.memory
            highest = max(highest, measured + wide_model.costs.resident_bytes)
            assert measured < predicted
        assert run.steps < 5000
    assert all(run.generated[str(i)] == lonely(i % 6, answer) for i in range(jobs))
    assert limit - spare / 2 < highest < limit


def test_rows_are_grouped_together_only_as_memory_allows(wide_model: Model) -> None:
    """A short row in the group of a long one takes as much memory."""
    short = [30 + 100] * 6
    memory = wide_model.costs.peak_bytes([[1000 + 40], short]) + wide_model.costs.row_bytes(1)
    run = Run(wide_model, step_s=1.0, memory=memory)
    run.group_by(EACH_ALONE)
    run.add("long", prompt(1000, 9), max_tokens=40)
    run.until(lambda: bool(run.engine._running.lengths))
    for i in range(len(short)):
        run.add(f"short {i}", prompt(30, i), max_tokens=100)
    run.until(lambda: all(run.generated.values()))
    run.group_by(ONE_GROUP)
    for _ in range(3):
        run.step()
        assert len(run.engine._running) == 7
        assert [len(group) for group in run.engine._running.lengths if max(group) > 1000] == [1]
    run.drain()
    assert all(run.generated[f"short {i}"] == alone(wide_model.network, prompt(30, i), 100) for i in range(6))


@settings(max_examples=examples(4), deadline=None)
@given(st.lists(st.integers(20, 900), min_size=12, max_size=24), st.sampled_from([DEAR_LENGTH, ONE_GROUP, EACH_ALONE]))
def test_rows_of_any_lengths_stay_within_memory_in_any_classes(lengths: list[int], cost: StepCost) -> None:
    gc.collect()
    wide_model = replace(built(), costs=replace(built().costs, weights_bytes=mx.get_active_memory()))
    limit = wide_model.costs.peak_bytes([[900 + 40] * 3])
    run = Run(wide_model, step_s=1.0, memory=limit)
    run.group_by(cost)
    for i, tokens in enumerate(lengths):
        run.add(str(i), prompt(tokens, i % 6), max_tokens=4 + 3 * i % 40)
    while len(run.engine):
        run.step()
        assert mx.get_peak_memory() <= limit
    assert set(run.ended.values()) <= {"length", "stop"}


def test_rows_are_divided_by_length_if_that_admits_more(wide_model: Model) -> None:
    limit = wide_model.costs.peak_bytes([[1000 + 20] * 4])
    run = Run(wide_model, step_s=1.0, memory=limit)
    run.group_by(DEAR_LENGTH)
    for i in range(20):
        run.add(str(i), prompt(30 if i % 5 else 1000, i % 6), max_tokens=20)
    run.step()
    assert len(run.active) >= 8, "one group would have four"
    assert run.drain()["1"] == alone(wide_model.network, prompt(30, 1), 20)


def test_rows_change_their_groups_only_if_memory_holds_both_groups_meanwhile(
    wide_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that gains short rows and loses a long one is large until this one has left."""
    mixed = True

    def regrouped(lengths: list[list[int]], *_: object) -> list[list[int]]:
        order = sorted(range(8), key=[tokens for group in lengths for tokens in group].__getitem__)
        shorts, longs = order[:6], order[6:]
        return [[*longs[:1], *shorts[:3]], [*longs[1:], *shorts[3:]]] if mixed else [longs, shorts]

    run = Run(wide_model, step_s=1.0)
    run.group_by(EACH_ALONE)
    for i in range(8):
        run.add(str(i), prompt(1000 if i < 2 else 30, i % 6), max_tokens=60)
    run.until(lambda: len(run.engine._running) == 8)
    monkeypatch.setattr(groups, "regroup", regrouped)
    run.group_by(EACH_ALONE)
    run.step()
    assert [*map(len, run.engine._running.lengths)] == [4, 4]
    limits, mixed = run.engine._admission._limits, False
    limit = wide_model.costs.peak_bytes([[1060, 90, 90, 90]] * 2)
    run.engine._admission._limits = replace(limits, max_bytes=limit)
    while len(run.engine):
        run.group_by(EACH_ALONE)
        run.step()
        assert mx.get_peak_memory() <= limit
    assert run.generated["7"] == alone(wide_model.network, prompt(30, 1), 60)


def test_request_that_never_fits_is_refused_at_once_with_the_numbers(wide_model: Model) -> None:
    run = run_in(wide_model, memory_for(wide_model, 2))
    run.add("fits", prompt(PROMPT, 1), max_tokens=ANSWER)
    run.step()
    run.add("never", prompt(PROMPT, 2), max_tokens=100_000)
    run.step()
    assert run.ended["never"] == "refused"
    assert "200 prompt and 100,000 answer tokens" in run.refused["never"]
    assert "MB for requests" in run.refused["never"]
    assert run.drain()["fits"] == lonely(1)


def offline_rows(wide_model: Model, rows: int = 3) -> Run:
    """Return a run with offline rows that decode, and no memory for another."""
    run = run_in(wide_model, memory_for(wide_model, rows))
    for i in range(rows):
        run.add(f"offline {i}", prompt(PROMPT, i), max_tokens=ANSWER, lane="batch")
    run.until(lambda: all(run.generated.values()))
    return run


@pytest.mark.parametrize("keep", [True, False], ids=["with its cache", "from its tokens"])
def test_interactive_row_preempts_the_youngest_offline_row_which_continues_exactly(
    wide_model: Model, keep: bool
) -> None:
    run = offline_rows(wide_model)
    run.add("interactive", prompt(PROMPT, 7), max_tokens=6)
    report = run.step()
    assert (run.waiting, report.num_preemptions, report.num_preempted) == (["offline 2"], 1, 1)
    moves = [outcome for outcome in report.outcomes if isinstance(outcome, Preempted | Admitted)]
    assert moves == [Preempted("offline 2"), Admitted("interactive", at=0)]
    assert 0 < len(run.generated["offline 2"]) < ANSWER
    assert run.held_bytes > 0
    if not keep:
        for candidate in run.engine._admission._waiting.values():
            candidate.drop_cache()
        assert run.held_bytes == 0
    before = run.chunks["offline 2"]
    run.drain()
    assert (run.chunks["offline 2"] == before) == keep
    assert run.generated == {**{f"offline {i}": lonely(i) for i in range(3)}, "interactive": lonely(7, 6)}


def test_offline_row_preempts_no_row(wide_model: Model) -> None:
    run = offline_rows(wide_model, rows=2)
    run.engine.remove("offline 1")
    run.add("interactive", prompt(PROMPT, 7), max_tokens=ANSWER)
    run.step()
    assert run.active == ["offline 0", "interactive"]
    run.add("late", prompt(PROMPT, 3), max_tokens=4, lane="batch")
    for _ in range(3):
        assert run.step().num_preemptions == 0
        assert run.waiting == ["late"]
    run.drain()
    assert run.generated["late"] == lonely(3, 4)


def test_interactive_row_preempts_no_interactive_row(wide_model: Model) -> None:
    run = run_in(wide_model, memory_for(wide_model, 2))
    for i in range(4):
        run.add(str(i), prompt(PROMPT, i), max_tokens=ANSWER)
    run.step()
    assert (run.active, run.waiting) == (["0", "1"], ["2", "3"])
    assert run.drain() == {str(i): lonely(i) for i in range(4)}


def test_rows_of_a_lane_are_admitted_in_order_of_arrival(wide_model: Model) -> None:
    run, began = run_in(wide_model, memory_for(wide_model, 2)), list[str]()
    for i in range(8):
        run.add(f"offline {i}", prompt(PROMPT, i), max_tokens=3 + i, lane="batch")
        run.add(f"interactive {i}", prompt(PROMPT, i), max_tokens=3 + i)
    while len(run.engine):
        run.step()
        began += (id for id in run.active if id not in began)
    assert began == [*(f"interactive {i}" for i in range(8)), *(f"offline {i}" for i in range(8))]


def test_small_rows_do_not_overtake_a_large_one_forever(wide_model: Model) -> None:
    run = run_in(wide_model, memory_for(wide_model, 4))
    for i in range(2):
        run.add(f"first {i}", prompt(20, i), max_tokens=4)
    run.step()
    run.add("large", prompt(2 * PROMPT, 1), max_tokens=ANSWER)
    small, overtaking = 0, set[str]()
    while "large" in run.waiting:
        while len(run.waiting) < 3:
            run.add(f"small {(small := small + 1)}", prompt(20, small), max_tokens=4)
        run.step()
        assert run.steps < 1000
        overtaking |= {id for id in run.active if id.startswith("small")} if "large" in run.waiting else set()
    assert 0 < len(overtaking) <= MAX_OVERTAKES
    run.drain()
    assert set(run.ended.values()) <= {"length", "stop"}


def test_waiting_or_preempted_row_can_be_cancelled(wide_model: Model) -> None:
    run = offline_rows(wide_model)
    run.add("interactive", prompt(PROMPT, 7), max_tokens=6)
    run.add("waits", prompt(PROMPT, 8), max_tokens=6, lane="batch")
    run.step()
    assert run.waiting == ["offline 2", "waits"]
    for id in run.waiting:
        run.engine.remove(id)
    assert (run.waiting, run.held_bytes, len(run.engine)) == ([], 0, 3)
    run.drain()
    assert set(run.ended) == {"offline 0", "offline 1", "interactive"}
    assert run.generated["offline 2"] == lonely(2)[: len(run.generated["offline 2"])]


def test_predicted_and_measured_memory_are_reported(wide_model: Model) -> None:
    run, compared = run_in(wide_model, memory_for(wide_model, 6)), list[tuple[int, int]]()
    for i in range(4):
        run.add(str(i), prompt(PROMPT, i), max_tokens=80)
    while len(run.engine):
        if memory := run.step().memory:
            compared.append(memory)
    assert compared
    for predicted, measured in compared:
        assert 0.4 * predicted < measured < 1.05 * predicted


@pytest.mark.slow
def test_memory_stays_flat_while_rows_come_and_go() -> None:
    """scripts/chaos long-life does it for longer."""
    samples = churn(model("qwen3_5"), steps=500, num_samples=20)
    assert growth([each.resident for each in samples]) < 0.05
