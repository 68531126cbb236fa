from dataclasses import astuple, dataclass
from math import isfinite
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.budget import (
    ALONE_STEPS,
    MAX_CHUNK,
    MAX_STEP_STRETCH,
    MIN_CHUNK,
    MIN_TOKENS_TIME_PER_PASS,
    PROMPT_SHARE,
    PromptCost,
    StepBudget,
)
from worker.schedule.request import Lane

STEP_S = 0.1
COSTS = st.builds(PromptCost, st.floats(0, 0.05), st.floats(1e-6, 1e-2), st.floats(0, 1e-6))


@dataclass
class Machine:
    """The true costs of prompts and decoding, to which noise is added."""

    cost: PromptCost
    decode_s: float = 0.02
    noise: float = 0.0

    def __post_init__(self) -> None:
        self.budget, self._dice = StepBudget(STEP_S), Random(0)
        self.budget.observe_forward(self.cost.forward_s)
        for _ in range(20):
            self.budget.observe_decode(self.decode_s)

    def prefill(self, tokens: int, *, done: int = 0) -> list[float]:
        """Return the seconds of each step of a prompt that advances as far as there is time."""
        lasted = list[float]()
        while done < tokens:
            fitting = self.budget.cost.within(self.budget.spare_s(1, "batch", self.decode_s), done)
            chunk = min(tokens - done, max(MIN_CHUNK, fitting))
            seconds = self.cost.of(chunk, done) * self._dice.uniform(1 - self.noise, 1 + self.noise)
            self.budget.observe_chunk(chunk, done, seconds)
            lasted.append(self.decode_s + seconds)
            done += chunk
        return lasted


@given(COSTS, st.floats(0, 1), st.integers(0, 100_000))
def test_the_longest_chunk_within_a_time_is_found(cost: PromptCost, seconds: float, done: int) -> None:
    tokens = cost.within(seconds, done)
    assert tokens == 0 or cost.of(tokens, done) <= seconds * 1.000001
    assert tokens == MAX_CHUNK or cost.of(tokens + 1, done) > seconds * 0.999999


LANES: tuple[Lane, ...] = get_args(Lane)


def spare_s(decode_s: float, lane: Lane, rows: int = 1) -> float:
    """Once every step has taken that long to decode."""
    budget = StepBudget(STEP_S)
    for _ in range(100):
        budget.observe_decode(decode_s)
    return budget.spare_s(rows, lane, decode_s)


@pytest.mark.parametrize("lane", LANES)
@given(decode_s=st.floats(0, 2))
def test_step_may_take_longer_if_no_row_decodes(lane: Lane, decode_s: float) -> None:
    assert spare_s(decode_s, lane, rows=0) == ALONE_STEPS * STEP_S


@given(st.floats(0, 2))
def test_offline_prompts_get_the_time_that_decoding_leaves(decode_s: float) -> None:
    assert spare_s(decode_s, "batch") == pytest.approx(STEP_S - decode_s, abs=1e-6)


@given(st.floats(0, 2))
def test_interactive_prompts_get_the_larger_of_their_share_and_the_rest_of_the_target(decode_s: float) -> None:
    step_s = decode_s + spare_s(decode_s, "interactive")
    wanted_s = max(STEP_S, (1 + PROMPT_SHARE) * decode_s)
    assert step_s == pytest.approx(max(STEP_S, min(wanted_s, MAX_STEP_STRETCH * STEP_S)), abs=1e-6)


@given(st.sampled_from(LANES), st.floats(0, 0.5), st.floats(0, 0.5))
def test_elapsed_time_of_the_step_is_not_left_for_prompts(lane: Lane, decode_s: float, other_s: float) -> None:
    budget = StepBudget(STEP_S)
    budget.observe_decode(decode_s)
    before_s = budget.spare_s(1, lane, decode_s)
    assert budget.spare_s(1, lane, decode_s + other_s) == pytest.approx(before_s - other_s, abs=1e-9)


@given(st.floats(0, 0.3), st.floats(1, 3))
def test_share_counts_the_waiting_rows(decode_s: float, slower: float) -> None:
    budget = StepBudget(STEP_S)
    for _ in range(100):
        budget.observe_decode(decode_s)
    step_s = decode_s + budget.spare_s(1, "interactive", decode_s, slower)
    wanted_s = max(STEP_S, (1 + PROMPT_SHARE) * slower * decode_s)
    assert step_s == pytest.approx(min(wanted_s, MAX_STEP_STRETCH * STEP_S), abs=1e-6)
    assert budget.spare_s(1, "batch", decode_s, slower) == budget.spare_s(1, "batch", decode_s)


def test_the_share_follows_the_slow_steps_of_many_rows_within_ten() -> None:
    budget = StepBudget(STEP_S)
    budget.observe_decode(0.02)
    for _ in range(10):
        budget.observe_decode(0.1)
    assert budget.spare_s(1, "interactive", 0.1) > 0.8 * PROMPT_SHARE * 0.1


def test_fast_step_after_slow_ones_gets_no_share_of_their_time() -> None:
    budget = StepBudget(STEP_S)
    for decode_s in [0.16] * 50 + [0.05]:
        budget.observe_decode(decode_s)
    step_s = 0.05 + budget.spare_s(1, "interactive", 0.05)
    assert step_s <= 1.25 * max(STEP_S, (1 + PROMPT_SHARE) * 0.05) * 1.000001


@given(COSTS)
def test_a_worthwhile_chunk_is_the_shortest_that_is_worth_its_pass(cost: PromptCost) -> None:
    tokens = cost.worthwhile
    assert MIN_CHUNK <= tokens <= MAX_CHUNK
    assert tokens == MAX_CHUNK or tokens * cost.token_s >= MIN_TOKENS_TIME_PER_PASS * cost.forward_s
    assert tokens == MIN_CHUNK or (tokens - 2) * cost.token_s < MIN_TOKENS_TIME_PER_PASS * cost.forward_s


def test_pass_for_a_cut_does_not_raise_the_cost_of_a_token() -> None:
    straight, cut = StepBudget(STEP_S), StepBudget(STEP_S)
    for budget in (straight, cut):
        budget.observe_forward(0.02)
    straight.observe_chunk(50, 0, 0.07)
    cut.observe_chunk(50, 0, 0.07 + 2 * 0.02, cuts=2)
    assert astuple(cut.cost) == pytest.approx(astuple(straight.cost))


@given(st.floats(1_000, 15_000), st.floats(0, 0.06), st.floats(0, 0.02))
def test_a_step_settles_at_its_target(tokens_per_s: float, decode_s: float, forward_s: float) -> None:
    machine = Machine(PromptCost(forward_s, 1 / tokens_per_s), decode_s)
    steps = machine.prefill(60_000)[20:-1]
    assert all(0.9 * STEP_S <= step_s <= 1.05 * STEP_S for step_s in steps)


# As measured on two CPU cores: a token 1,500 tokens into its prompt takes three times as long as the first.
SLOWER_AND_SLOWER = PromptCost(0.013, 0.5e-3, 0.8e-6)


def test_a_step_keeps_its_target_while_a_prompt_grows_long() -> None:
    machine = Machine(SLOWER_AND_SLOWER, noise=0.03)
    machine.prefill(1500)
    assert max(machine.prefill(1500)) < 1.1 * STEP_S


def test_prompt_after_a_long_cached_prefix_keeps_the_target_too() -> None:
    machine = Machine(PromptCost(0.01, 0.1e-3, 0.02e-6), noise=0.03)
    machine.prefill(6_000)
    assert 0.8 * STEP_S < machine.prefill(20_500, done=20_000)[0] < 1.2 * STEP_S


def test_cost_of_a_short_prompt_is_still_known_after_a_very_long_one() -> None:
    machine = Machine(PromptCost(0.01, 0.1e-3, 0.01e-6), noise=0.03)
    machine.prefill(60_000)
    assert 0.8 * STEP_S < machine.prefill(2_000)[0] < 1.2 * STEP_S


def test_slower_device_is_measured_within_ten_steps() -> None:
    machine = Machine(SLOWER_AND_SLOWER)
    for _ in range(10):
        machine.prefill(1500)
    machine.cost = PromptCost(0.013, 1e-3, 1.6e-6)
    steps = machine.prefill(2000)
    assert steps[0] > 1.5 * STEP_S
    assert max(steps[10:] + machine.prefill(1000)) < 1.1 * STEP_S


def test_prompt_advances_even_if_decoding_takes_all_the_time() -> None:
    assert max(Machine(PromptCost(token_s=1e-3), decode_s=0.2).prefill(100)) == pytest.approx(0.2 + MIN_CHUNK * 1e-3)


SEEN = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 10**6), st.floats(1e-6, 5)), max_size=30)


@given(SEEN)
def test_cost_is_finite_for_any_measurements(seen: list[tuple[int, int, float]]) -> None:
    budget = StepBudget(STEP_S)
    for tokens, done, seconds in seen:
        budget.observe_chunk(tokens, done, seconds)
        budget.observe_join(tokens + done, 10_000 * tokens, seconds)
    assert all(isfinite(each) and each >= 0 for each in astuple(budget.cost))
    assert 0 <= budget.cost.within(STEP_S, 1000) <= MAX_CHUNK


def test_chunks_of_one_forward_share_its_pass_over_the_weights() -> None:
    alone, together = StepBudget(STEP_S), StepBudget(STEP_S)
    for budget in alone, together:
        budget.observe_forward(0.02)
    alone.observe_chunk(MIN_CHUNK, 0, 0.02 + 0.1)
    together.observe_chunk(MIN_CHUNK, 0, 0.02 + 4 * 0.1, rows=4)
    assert astuple(together.cost) == pytest.approx(astuple(alone.cost))


def test_chunk_of_a_few_tokens_is_not_measured() -> None:
    budget = StepBudget(STEP_S)
    before = budget.cost
    for _ in range(50):
        budget.observe_chunk(MIN_CHUNK - 1, 0, 1.0)
    assert budget.cost == before


def test_one_slow_chunk_does_not_halve_the_next() -> None:
    machine = Machine(PromptCost(token_s=1 / 5000))
    machine.prefill(10_000)
    before = machine.budget.cost.within(STEP_S, 0)
    machine.budget.observe_chunk(400, 0, 0.4)
    assert machine.budget.cost.within(STEP_S, 0) > before / 2


def test_join_cost_is_learned_for_short_and_long_rows() -> None:
    budget, true = StepBudget(STEP_S), PromptCost(join_s=0.002, joined_s=20e-6)
    for tokens in (24, 24, 24, 1500, 24, 24, 24, 3000) * 3:
        budget.observe_join(tokens, 0, true.join(tokens))
    assert budget.cost.join(24) == pytest.approx(true.join(24), rel=0.1)
    assert budget.cost.join(2000) == pytest.approx(true.join(2000), rel=0.1)


def test_cost_of_growing_buffers_is_learned_from_few_joins() -> None:
    budget, true = StepBudget(STEP_S), PromptCost(join_s=0.002, joined_s=20e-6, grown_s=0.5e-9)
    for rows in range(1, 24):
        growth = 6_000_000 * rows if rows in (1, 2, 3, 4, 6, 8, 11, 14, 18) else 0
        budget.observe_join(60, growth, true.join(60, growth))
    assert budget.cost.join(60) == pytest.approx(true.join(60), rel=0.2)
    assert budget.cost.join(60, 140_000_000) == pytest.approx(true.join(60, 140_000_000), rel=0.1)
