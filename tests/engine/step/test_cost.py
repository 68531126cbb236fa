"""What chunks of prompts and joins of rows cost."""

from dataclasses import astuple
from math import isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.step.cost import CostEstimate, PromptCost
from worker.engine.step.tuning import MAX_CHUNK, MIN_CHUNK

COSTS = st.builds(PromptCost, st.floats(0, 0.05), st.floats(1e-6, 1e-2), st.floats(0, 1e-6))


@given(COSTS, st.floats(0, 1), st.integers(0, 100_000))
def test_the_longest_chunk_within_a_time_is_found(cost: PromptCost, seconds: float, done: int) -> None:
    tokens = cost.longest_chunk(seconds, done)
    assert tokens == 0 or cost.chunk_s(tokens, done) <= seconds * 1.000001
    assert tokens == MAX_CHUNK or cost.chunk_s(tokens + 1, done) > seconds * 0.999999


def estimate(forward_s: float) -> CostEstimate:
    made = CostEstimate(1e6)
    made.observe_forward(forward_s)
    return made


def chunks(made: CostEstimate, *lengths: int, pass_s: float = 0.04, token_s: float = 0.0025) -> PromptCost:
    for tokens in lengths:
        made.observe_chunk(tokens, 0, pass_s + tokens * token_s)
    return made.now


def test_chunks_of_different_length_tell_what_a_pass_costs() -> None:
    """While all decode steps have many rows, a step of one row is not known well."""
    cost = chunks(estimate(0.15), *[20, 250, 70, 30] * 5)
    assert cost.forward_s == pytest.approx(0.04, rel=0.1)
    assert cost.token_s == pytest.approx(0.0025, rel=0.1)


def test_a_pass_takes_at_most_as_long_as_a_decode_step_of_one_row() -> None:
    made = estimate(0.02)
    assert chunks(made, *[20] * 20).forward_s <= 0.02
    made.observe_forward(0.01)
    assert made.now.forward_s <= 0.01


@given(COSTS)
def test_a_worthwhile_chunk_is_the_shortest_that_is_worth_its_pass(cost: PromptCost) -> None:
    tokens = cost.worthwhile
    assert MIN_CHUNK <= tokens <= MAX_CHUNK
    assert tokens == MAX_CHUNK or tokens * cost.token_s >= cost.forward_s
    assert tokens == MIN_CHUNK or (tokens - 2) * cost.token_s < cost.forward_s


def test_pass_for_a_cut_does_not_raise_the_cost_of_a_token() -> None:
    straight, cut = CostEstimate(), CostEstimate()
    for learned in (straight, cut):
        learned.observe_forward(0.02)
    straight.observe_chunk(50, 0, 0.07)
    cut.observe_chunk(50, 0, 0.07 + 2 * 0.02, cuts=2)
    assert astuple(cut.now) == pytest.approx(astuple(straight.now))


SEEN = st.lists(st.tuples(st.integers(0, 4096), st.integers(0, 10**6), st.floats(1e-6, 5)), max_size=30)


@given(SEEN)
def test_cost_is_finite_for_any_measurements(seen: list[tuple[int, int, float]]) -> None:
    learned = CostEstimate()
    for tokens, done, seconds in seen:
        learned.observe_chunk(tokens, done, seconds)
        learned.observe_join(tokens + done, 10_000 * tokens, seconds)
    assert all(isfinite(each) and each >= 0 for each in astuple(learned.now))
    assert 0 <= learned.now.longest_chunk(0.1, 1000) <= MAX_CHUNK


def test_chunks_of_one_forward_share_its_pass_over_the_weights() -> None:
    alone, together = CostEstimate(), CostEstimate()
    for learned in alone, together:
        learned.observe_forward(0.02)
    alone.observe_chunk(MIN_CHUNK, 0, 0.02 + 0.1)
    together.observe_chunk(MIN_CHUNK, 0, 0.02 + 4 * 0.1, rows=4)
    assert astuple(together.now) == pytest.approx(astuple(alone.now))


def test_chunk_of_a_few_tokens_is_not_measured() -> None:
    learned = CostEstimate()
    before = learned.now
    for _ in range(50):
        learned.observe_chunk(MIN_CHUNK - 1, 0, 1.0)
    assert learned.now == before


def test_join_cost_is_learned_for_short_and_long_rows() -> None:
    learned, true = CostEstimate(), PromptCost(join_s=0.002, joined_s=20e-6)
    for tokens in (24, 24, 24, 1500, 24, 24, 24, 3000) * 3:
        learned.observe_join(tokens, 0, true.joining_s(tokens))
    assert learned.now.joining_s(24) == pytest.approx(true.joining_s(24), rel=0.1)
    assert learned.now.joining_s(2000) == pytest.approx(true.joining_s(2000), rel=0.1)


def test_cost_of_growing_buffers_is_learned_from_few_joins() -> None:
    learned, true = CostEstimate(), PromptCost(join_s=0.002, joined_s=20e-6, grown_s=0.5e-9)
    for rows in range(1, 24):
        growth = 6_000_000 * rows if rows in (1, 2, 3, 4, 6, 8, 11, 14, 18) else 0
        learned.observe_join(60, growth, true.joining_s(60, growth))
    assert learned.now.joining_s(60) == pytest.approx(true.joining_s(60), rel=0.2)
    assert learned.now.joining_s(60, 140_000_000) == pytest.approx(true.joining_s(60, 140_000_000), rel=0.1)
