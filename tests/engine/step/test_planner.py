"""The planner of steps, with given costs: what it remembers from one step to the next."""

import pytest

from tests.engine.step.running import DECODE_S, Running
from worker.engine.step.cost import CostEstimate
from worker.engine.step.plan import PromptState
from worker.engine.step.planner import StepPlanner
from worker.engine.step.tuning import TURN_EVERY

STEP_S, LONGEST = 0.1, 10**6


def planned_s(planner: StepPlanner, costs: CostEstimate, running: Running | None = None) -> float:
    """Plan a step in which much waits. Returns the seconds that prompts take in it."""
    planner.begin_step()
    prompt = PromptState("long", 0, 100_000, 5.0, "interactive", costs.now)
    return sum(forward.seconds for forward in planner.plan([prompt], running or Running(), 0.0, LONGEST))


@pytest.fixture
def costs() -> CostEstimate:
    return CostEstimate()


@pytest.fixture
def planner(costs: CostEstimate) -> StepPlanner:
    return StepPlanner(STEP_S, costs)


def test_steps_that_last_longer_than_planned_are_planned_shorter(planner: StepPlanner, costs: CostEstimate) -> None:
    before_s = planned_s(planner, costs)
    for _ in range(20):
        planner.observe_gap(1.4 * (planned_s(planner, costs) + DECODE_S))
    assert planned_s(planner, costs) < 0.8 * before_s


def test_a_gap_counts_once_and_only_if_rows_decode(planner: StepPlanner, costs: CostEstimate) -> None:
    before_s = planned_s(planner, costs)
    planner.observe_gap(before_s + DECODE_S)
    for _ in range(20):  # a step without a plan, and steps whose rows have not begun
        planner.observe_gap(5.0)
        planned_s(planner, costs, Running(started=False))
        planner.observe_gap(5.0)
    assert planned_s(planner, costs) == pytest.approx(before_s)


def test_rows_that_have_not_begun_leave_prompts_more_time(planner: StepPlanner, costs: CostEstimate) -> None:
    assert planned_s(planner, costs, Running(started=False)) > 2 * planned_s(planner, costs)


def test_steps_are_counted_however_often_they_are_planned(planner: StepPlanner, costs: CostEstimate) -> None:
    old = PromptState("old", 0, 2000, 1.5, "interactive", costs.now)
    new = PromptState("new", 0, 20, 0.0, "interactive", costs.now)
    firsts = list[str]()
    for _ in range(2 * TURN_EVERY):
        planner.begin_step()
        [[first, *_], [again, *_]] = [planner.plan([new, old], Running(), 0.0, LONGEST) for _ in range(2)]
        assert first == again
        firsts.append(first.chunks[0].id)
    assert [firsts.index("old"), firsts.count("old")] == [TURN_EVERY - 1, 2]
