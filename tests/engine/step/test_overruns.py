from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.step.cost import CostEstimate, StepKind
from worker.engine.step.planner import Backlog, DecodingRows, Overruns, StepBudget, longest_gap_s
from worker.engine.step.tuning import MOST_OVERRUN, OF_GAPS, OVERRAN, STALL

STEP_S = 0.1
GAP_S = longest_gap_s(STEP_S, 0.0)
USUAL = 1.02
JOINS = StepKind(joins=True)
KINDS = [StepKind(joins, shared) for joins in (False, True) for shared in (False, True)]


def after(*ratios: float, usual: int = 150) -> Overruns:
    """Return the overruns after many usual gaps, and then these."""
    overruns = Overruns()
    for ratio in [*[USUAL] * usual, *ratios]:
        overruns.observe(ratio)
    return overruns


def worst_s(budget: StepBudget, decode_s: float) -> float:
    """Return the seconds that a gap is planned to last while much waits."""
    return decode_s + budget.spare_s(DecodingRows(4, 4, decode_s), 0.0, Backlog(10.0, 1.0))["interactive"]


def gaps_s(budget: StepBudget, decode_s: float, ratios: Iterable[tuple[float, StepKind]]) -> list[float]:
    """Return the seconds of gaps that last these multiples of their plans."""
    lasted = list[float]()
    for ratio, kind in ratios:
        planned_s = worst_s(budget, decode_s)
        lasted.append(ratio * planned_s)
        budget.observe_gap(planned_s, lasted[-1], kind)
    return lasted


@given(st.lists(st.floats(STALL + 0.01, 20), max_size=OVERRAN - 1))
def test_stalls_that_do_not_repeat_change_nothing(stalls: list[float]) -> None:
    mixed = after(*[ratio for stall in stalls for ratio in (*[USUAL] * 4, stall)])
    assert mixed.expected == after().expected


def test_stalls_that_repeat_within_a_few_gaps_are_expected_until_they_stop() -> None:
    assert after(1.7, USUAL, 1.8, USUAL, 1.9).expected == pytest.approx(after().expected * 1.7 / USUAL)
    assert after(1.7, USUAL, 1.8, USUAL, 1.9, *[USUAL] * OF_GAPS).expected == after().expected


def test_no_more_is_expected_than_a_shorter_plan_can_prevent() -> None:
    assert after(*[9.0] * 150).expected == pytest.approx(after().expected * MOST_OVERRUN / USUAL)


def test_stalls_of_steps_that_compute_the_same_are_expected() -> None:
    """Steps in which rows join are all underestimated, and come rarely."""
    overruns = Overruns()
    for number in range(90):
        joins = number % 15 == 0
        overruns.observe(1.8 if joins else USUAL, JOINS if joins else StepKind())
    assert overruns.expected == pytest.approx(after().expected * 1.8 / USUAL)


@given(st.floats(1.0, MOST_OVERRUN), st.floats(0.01, 0.06), st.integers(0, 1000))
def test_gaps_keep_their_limit_while_all_plans_are_too_short(ratio: float, decode_s: float, seed: int) -> None:
    """The first three may be too long: they tell by how much."""
    dice = Random(seed)
    steps = ((ratio * dice.uniform(0.95, 1.0), dice.choice(KINDS)) for _ in range(60))
    lasted = gaps_s(StepBudget(STEP_S, CostEstimate()), decode_s, steps)
    assert max(lasted[3:]) <= GAP_S
    assert min(lasted) >= STEP_S / 2


@given(st.floats(1.0, MOST_OVERRUN), st.integers(2, 40), st.sampled_from(KINDS[1:]))
def test_gaps_keep_their_limit_while_the_plans_of_one_kind_are_too_short(
    ratio: float, every: int, kind: StepKind
) -> None:
    steps = [(ratio, kind) if number % every == 0 else (USUAL, StepKind()) for number in range(every * 12)]
    lasted = gaps_s(StepBudget(STEP_S, CostEstimate()), 0.05, steps)
    assert max(lasted[2 * every + 1 :]) <= GAP_S


@given(st.integers(0, 1000))
def test_single_stalls_leave_the_next_gaps_as_long_as_they_were(seed: int) -> None:
    dice, budget = Random(seed), StepBudget(STEP_S, CostEstimate())
    gaps_s(budget, 0.05, [(USUAL, StepKind())] * 150)
    before_s = worst_s(budget, 0.05)
    for _ in range(6):
        steps = [(dice.uniform(2, 5), dice.choice(KINDS)), *[(USUAL, KINDS[number % 4]) for number in range(OF_GAPS)]]
        gaps_s(budget, 0.05, steps)
        assert worst_s(budget, 0.05) == before_s


def test_gaps_are_measured_while_overruns_make_all_plans_short() -> None:
    """Else a few stalls would shorten the plans for ever."""
    budget = StepBudget(STEP_S, CostEstimate())
    gaps_s(budget, 0.05, [(3.0, StepKind())] * 20)
    assert worst_s(budget, 0.05) < GAP_S / 2
    gaps_s(budget, 0.05, [(USUAL, StepKind())] * OF_GAPS)
    assert worst_s(budget, 0.05) > 0.75 * GAP_S
