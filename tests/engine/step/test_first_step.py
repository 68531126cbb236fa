"""The first decode step of rows that have joined: for which prompts it waits."""

from itertools import accumulate
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.step.cost import CostEstimate
from worker.engine.step.planner import StepBudget, delays_first_step, longest_gap_s
from worker.engine.step.tuning import FIRST_STEP_AT_MOST_S, FIRST_STEP_WITHIN_S

STEP_S = 0.1
PROMPTS = st.lists(st.floats(0.01, 5), max_size=40)
SHORT_S = 0.1


def budget(forward_s: float) -> StepBudget:
    costs = CostEstimate()
    costs.observe_forward(forward_s)
    return StepBudget(STEP_S, costs)


def waits(rows: int, prompts: int, *, delayed_s: float = FIRST_STEP_WITHIN_S, slowdown: float = 1.0) -> bool:
    return delays_first_step(rows, delayed_s, slowdown, [SHORT_S] * prompts)


@given(st.integers(1, 32), st.floats(0, 20), st.floats(0, 100))
def test_waits_for_nothing_if_no_prompt_is_left(rows: int, delayed_s: float, slowdown: float) -> None:
    assert not delays_first_step(rows, delayed_s, slowdown, [])


@given(st.integers(1, 32), PROMPTS, st.floats(0, 20), st.floats(0, 100))
def test_never_waits_longer_than_at_most(rows: int, prompts: list[float], delayed_s: float, slowdown: float) -> None:
    if delays_first_step(rows, delayed_s, slowdown, prompts):
        assert delayed_s + min(prompts) <= FIRST_STEP_AT_MOST_S
        assert min(prompts) <= FIRST_STEP_WITHIN_S


def test_waits_while_rows_lose_less_than_the_prompts_gain() -> None:
    assert waits(9, 10)
    assert not waits(10, 10)
    assert waits(19, 10, slowdown=2.0)
    assert not waits(1, 10, slowdown=0.1)
    assert waits(31, 1, slowdown=inf)


def test_waits_for_each_prompt_that_fits_in_the_first_time() -> None:
    assert waits(31, 1, delayed_s=0.0, slowdown=0.0)
    assert not waits(31, 1, slowdown=0.0)


def test_slowdown_is_a_step_and_a_pass_for_what_they_leave_of_the_gap() -> None:
    made = budget(0.02)
    gap_s = longest_gap_s(STEP_S, 0.0) / made.overrun
    assert made.slowdown(0.08) == pytest.approx(0.1 / (gap_s - 0.1))
    assert made.slowdown(10.0) < inf  # two and a half decode times leave time


def test_slowdown_is_infinite_if_no_time_is_left() -> None:
    assert budget(0.15).slowdown(0.14) == inf


@pytest.mark.parametrize(("decode_s", "pass_s"), [(0.05, 0.015), (0.1, 0.05), (0.14, 0.06)])
def test_first_tokens_come_earlier_in_the_mean_than_without_waiting_and_than_after_all_prompts(
    decode_s: float, pass_s: float
) -> None:
    slowdown = budget(pass_s).slowdown(decode_s)
    prompts = [SHORT_S] * 32

    def mean_s(computed: int) -> float:
        """Return the mean first token if the first step waits for so many prompts."""
        first_s = computed * SHORT_S
        later = accumulate([SHORT_S * (1 + slowdown)] * (len(prompts) - computed), initial=first_s)
        return (computed * first_s + sum([*later][1:])) / len(prompts)

    chosen = 1
    while delays_first_step(chosen, FIRST_STEP_WITHIN_S, slowdown, prompts[chosen:]):
        chosen += 1
    assert mean_s(chosen) <= min(mean_s(computed) for computed in range(1, 33)) * 1.01
