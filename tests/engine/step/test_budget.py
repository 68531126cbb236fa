from dataclasses import dataclass, replace
from random import Random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.step.cost import CostEstimate, PromptCost
from worker.engine.step.planner import Backlog, DecodingRows, GapLimit, StepBudget, longest_gap_s
from worker.engine.step.tuning import (
    ALONE_STEPS,
    COMPUTED_WITHIN_S,
    MIN_CHUNK,
    SHARED_ALONE_STEPS,
)
from worker.request import Lane

STEP_S = 0.1


@dataclass
class Machine:
    """The true costs of prompts and decoding, to which noise is added."""

    cost: PromptCost
    decode_s: float = 0.02
    noise: float = 0.0

    def __post_init__(self) -> None:
        self.learned, self._dice = CostEstimate(), Random(0)
        self.learned.observe_forward(self.cost.forward_s)
        self._budget = StepBudget(STEP_S, self.learned)

    def prefill(self, tokens: int, *, done: int = 0) -> list[float]:
        """Return the seconds of each step of a prompt that advances as far as there is time."""
        lasted = list[float]()
        while done < tokens:
            spare_s = self._budget.spare_s(DecodingRows(1, 1, self.decode_s), 0.0, Backlog())
            fitting = self.learned.now.longest_chunk(spare_s["batch"], done)
            chunk = min(tokens - done, max(MIN_CHUNK, fitting))
            seconds = self.cost.chunk_s(chunk, done) * self._dice.uniform(1 - self.noise, 1 + self.noise)
            self.learned.observe_chunk(chunk, done, seconds)
            lasted.append(self.decode_s + seconds)
            done += chunk
        return lasted


LANES: tuple[Lane, ...] = get_args(Lane)
ONE = DecodingRows(1, 1)
MUCH = Backlog(seconds=10.0)
DECODES = st.floats(0, 2)
BACKLOGS = st.builds(Backlog, st.floats(0, 5), st.floats(0, 5))


def budget(*, forward_s: float = 0.0, token_s: float = 1e-6) -> StepBudget:
    costs = CostEstimate(1 / token_s)
    costs.observe_forward(forward_s)
    return StepBudget(STEP_S, costs)


def spare_s(decode_s: float, lane: Lane, waiting: Backlog = MUCH, running: DecodingRows = ONE) -> float:
    """Return the seconds that a decode step of `decode_s` leaves."""
    return budget().spare_s(replace(running, decode_s=decode_s), 0.0, waiting)[lane]


@pytest.mark.parametrize("lane", LANES)
@given(decode_s=DECODES, waiting=BACKLOGS)
def test_step_may_take_longer_if_no_row_decodes(lane: Lane, decode_s: float, waiting: Backlog) -> None:
    assert spare_s(decode_s, lane, waiting, DecodingRows(0, 0)) == ALONE_STEPS * STEP_S


def test_a_shared_forward_may_take_longer_only_if_no_row_decodes() -> None:
    assert budget().shared_s(DecodingRows(0, 0)) == SHARED_ALONE_STEPS * STEP_S > ALONE_STEPS * STEP_S
    assert budget().shared_s(ONE) == 0.0


@given(DECODES, BACKLOGS)
def test_offline_prompts_get_the_time_that_decoding_leaves(decode_s: float, waiting: Backlog) -> None:
    assert spare_s(decode_s, "batch", waiting) == pytest.approx(STEP_S - decode_s, abs=1e-6)


@given(DECODES)
def test_interactive_prompts_get_the_longest_gap_if_only_offline_rows_decode(decode_s: float) -> None:
    step_s = decode_s + spare_s(decode_s, "interactive", Backlog(), DecodingRows(4, 0))
    assert step_s * budget().overrun == pytest.approx(longest_gap_s(STEP_S, decode_s), abs=1e-6)


def test_offline_prompts_get_time_for_a_chunk_that_is_worth_its_pass_if_only_offline_rows_decode() -> None:
    made = budget(forward_s=0.04, token_s=0.001)
    assert made.spare_s(DecodingRows(4, 0, 0.12), 0.0, MUCH)["batch"] == pytest.approx(0.04 + 0.04, rel=0.05)
    assert made.spare_s(DecodingRows(4, 1, 0.12), 0.0, MUCH)["batch"] == pytest.approx(STEP_S - 0.12, abs=1e-6)


@given(DECODES, BACKLOGS)
def test_step_with_waiting_prompts_keeps_within_the_longest_gap(decode_s: float, waiting: Backlog) -> None:
    step_s = decode_s + spare_s(decode_s, "interactive", waiting)
    assert step_s <= max(STEP_S, longest_gap_s(STEP_S, decode_s) / budget().overrun) * 1.000001


def test_longest_gap_is_three_targets_or_two_and_a_half_decode_times() -> None:
    assert longest_gap_s(0.1, 0.0) == longest_gap_s(0.1, 0.12) == pytest.approx(0.3)
    assert longest_gap_s(0.1, 0.3) == pytest.approx(2.5 * 0.3)


@given(st.floats(0.001, 1), DECODES, st.floats(0, 0.1))
def test_longest_gap_grows_with_the_decode_time_and_never_jumps(step_s: float, decode_s: float, more_s: float) -> None:
    now_s, then_s = longest_gap_s(step_s, decode_s), longest_gap_s(step_s, decode_s + more_s)
    assert now_s <= then_s <= now_s + 1.000001 * 2.5 * more_s + 1e-9


@given(st.floats(0, 0.05))
def test_target_is_kept_if_hardly_anything_waits(decode_s: float) -> None:
    step_s = decode_s + spare_s(decode_s, "interactive", Backlog(0.01, 0.0))
    assert step_s == pytest.approx(STEP_S, abs=1e-6)


@given(DECODES, BACKLOGS, st.floats(0, 1), st.floats(0, 1))
def test_share_grows_with_the_backlog_and_the_age_of_the_oldest(
    decode_s: float, waiting: Backlog, seconds: float, age_s: float
) -> None:
    more = Backlog(waiting.seconds + seconds, waiting.oldest_s + age_s)
    assert spare_s(decode_s, "interactive", more) >= spare_s(decode_s, "interactive", waiting) - 1e-9


def test_share_computes_what_waits_by_the_time_that_the_oldest_may_wait() -> None:
    decode_s, waiting = 0.08, Backlog(seconds=0.2, oldest_s=0.1)
    prompts_s = spare_s(decode_s, "interactive", waiting)
    assert STEP_S < decode_s + prompts_s < longest_gap_s(STEP_S, 0.0) / budget().overrun
    steps = waiting.seconds / prompts_s
    assert waiting.oldest_s + steps * (decode_s + prompts_s) == pytest.approx(COMPUTED_WITHIN_S)


@given(st.sampled_from(LANES), st.floats(0, 0.5), st.floats(0, 0.5))
def test_elapsed_time_of_the_step_is_not_left_for_prompts(lane: Lane, decode_s: float, other_s: float) -> None:
    made, running = budget(), DecodingRows(1, 1, decode_s)
    before_s = made.spare_s(running, 0.0, MUCH)[lane]
    assert made.spare_s(running, other_s, MUCH)[lane] == pytest.approx(before_s - other_s, abs=1e-9)


# Gaps that lasted longer than planned


def after_gaps(*seconds: float) -> StepBudget:
    """Return a budget that has measured gaps that were planned to last 0.25 s, after many of 0.24 s."""
    made = budget()
    for each in (*[0.24] * 200, *seconds):
        made.observe_gap(0.25, each)
    return made


def test_gaps_that_end_early_leave_more_time_for_prompts() -> None:
    waiting, running = Backlog(10.0, 1.0), DecodingRows(1, 1, 0.1)
    earlier, later = (made.spare_s(running, 0.0, waiting)["interactive"] for made in (budget(), after_gaps()))
    assert later > earlier


def test_gaps_planned_to_be_short_are_ignored() -> None:
    made = budget()
    before = made.overrun
    for _ in range(200):
        made.observe_gap(longest_gap_s(STEP_S, 0.0) / 2 - 0.001, 1.0)
    assert made.overrun == before


@given(st.floats(1_000, 15_000), st.floats(0, 0.06), st.floats(0, 0.02))
def test_a_step_settles_at_its_target(tokens_per_s: float, decode_s: float, forward_s: float) -> None:
    machine = Machine(PromptCost(forward_s, 1 / tokens_per_s), decode_s)
    steps = machine.prefill(60_000)[20:-1]
    assert all(0.9 * STEP_S <= step_s <= 1.1 * STEP_S for step_s in steps)


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


def test_one_slow_chunk_does_not_halve_the_next() -> None:
    machine = Machine(PromptCost(token_s=1 / 5000))
    machine.prefill(10_000)
    before = machine.learned.now.longest_chunk(STEP_S, 0)
    machine.learned.observe_chunk(400, 0, 0.4)
    assert machine.learned.now.longest_chunk(STEP_S, 0) > before / 2


@given(st.floats(1e-3, 1), st.floats(1e-3, 5), st.booleans())
def test_a_forward_with_drafts_keeps_the_longest_gap(step_s: float, decode_s: float, running: bool) -> None:
    limit_s = GapLimit(step_s).verify_s(decode_s, running=running)
    before_s = decode_s if running else 0.0
    assert before_s + limit_s <= longest_gap_s(step_s, decode_s) + 1e-9
    assert limit_s < 0.9 * longest_gap_s(step_s, decode_s)
    assert limit_s > decode_s / 2


def test_prompts_leave_less_time_for_drafts() -> None:
    free_s = GapLimit(STEP_S).verify_s(0.05, running=False)
    assert GapLimit(STEP_S, elapsed_s=0.2).verify_s(0.05, running=False) == pytest.approx(free_s - 0.2)
