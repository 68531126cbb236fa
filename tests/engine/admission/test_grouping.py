from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.admission.grouping import MeasuredCost, StepCost, partition, place, regroup

# As measured on a small model: 8 rows of 64 tokens 8 ms, one row of 4,000 makes that 59.
MACHINE = StepCost(group_s=0.004, row_s=0.0003, cell_s=1.5e-6)
LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=7)
COSTS = st.builds(StepCost, st.floats(0, 0.1), st.floats(0, 0.01), st.floats(0, 1e-5))


def grouped(lengths: list[int], cost: StepCost) -> list[list[int]]:
    return [[lengths[i] for i in group] for group in partition(lengths, cost)]


def test_long_row_decodes_separately_from_many_short_ones() -> None:
    assert sorted(grouped([64] * 7 + [4000], MACHINE)) == [[64] * 7, [4000]]


def test_rows_of_similar_length_decode_together() -> None:
    assert len(grouped([60, 64, 80, 100], MACHINE)) == 1


def test_rows_stay_together_if_length_costs_nothing() -> None:
    assert len(grouped([64] * 7 + [4000], StepCost(group_s=0.004))) == 1


def all_partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    first, rest = items[0], items[1:]
    return [
        [[first, *(rest[i] for i in chosen)], *others]
        for size in range(len(rest) + 1)
        for chosen in combinations(range(len(rest)), size)
        for others in all_partitions([rest[i] for i in range(len(rest)) if i not in chosen])
    ]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=5), COSTS)
def test_no_other_grouping_is_cheaper(lengths: list[int], cost: StepCost) -> None:
    best = min(cost.step_s(groups) for groups in all_partitions(lengths))
    assert cost.step_s(grouped(lengths, cost)) == pytest.approx(best)


def cheapest_runs_s(lengths: list[int], cost: StepCost) -> float:
    """Return the least seconds, by trying every beginning of every group."""
    ordered, best = sorted(lengths), [0.0]
    for end in range(1, len(ordered) + 1):
        best.append(min(best[begin] + cost.rows_s(end - begin, ordered[end - 1]) for begin in range(end)))
    return best[-1]


@given(st.lists(st.integers(1, 5000), min_size=6, max_size=60), COSTS)
def test_no_other_contiguous_groups_of_many_rows_are_cheaper(lengths: list[int], cost: StepCost) -> None:
    assert cost.step_s(grouped(lengths, cost)) == pytest.approx(cheapest_runs_s(lengths, cost))


@dataclass(frozen=True, slots=True)
class Counted(StepCost):
    asked: list[int] = field(default_factory=list)

    def rows_s(self, rows: int, longest: int) -> float:
        self.asked.append(longest)
        return super(Counted, self).rows_s(rows, longest)


@given(st.lists(st.integers(1, 5000), min_size=200, max_size=512))
def test_number_of_evaluated_costs_is_linear_in_the_rows(lengths: list[int]) -> None:
    """Every 32 steps, so their square would be felt: 60 ms for 512 rows."""
    cost = Counted(MACHINE.group_s, MACHINE.row_s, MACHINE.cell_s)
    partition(lengths, cost)
    assert len(cost.asked) <= 5 * len(lengths)


@given(LENGTHS, COSTS)
def test_every_row_is_in_one_group(lengths: list[int], cost: StepCost) -> None:
    assert sorted(i for group in partition(lengths, cost) for i in group) == list(range(len(lengths)))


def test_row_joins_a_group_of_its_length_or_a_new_one() -> None:
    groups = [[64, 70, 80], [4000]]
    assert [place(length, groups, MACHINE) for length in (75, 4100, 70_000)] == [0, 1, 2]
    assert place(5, [], MACHINE) == 0


def test_row_gets_a_new_group_only_if_well_worth_it() -> None:
    """A group is faster beyond 445 tokens; but with a small gain, rows would be moved back and forth."""
    together, groups = [64] * 7, [[64] * 7]
    assert [len(grouped([*together, length], MACHINE)) for length in (440, 450)] == [1, 2]
    assert [place(length, groups, MACHINE) for length in (450, 600, 700)] == [0, 0, 1]


def test_rows_are_not_moved_for_a_small_gain() -> None:
    for length, moves in (450, False), (600, False), (700, True):
        assert (regroup([[64] * 7 + [length]], MACHINE) is not None) == moves


def test_rows_are_moved_only_if_that_makes_steps_faster() -> None:
    assert regroup([[64] * 7, [4000]], MACHINE) is None
    assert regroup([[64] * 7 + [150]], MACHINE) is None
    better = regroup([[64] * 7 + [4000]], MACHINE)
    assert better is not None
    assert sorted(map(sorted, better)) == [[0, 1, 2, 3, 4, 5, 6], [7]]


def test_shrunken_groups_are_merged() -> None:
    assert regroup([[64], [90], [70]], MACHINE) is not None


STEPS = [[[64] * n] for n in range(1, 9)] + [[[400 * k] * 4] for k in range(1, 9)] + [[[64] * 5, [3000]]]


def learned(machine: StepCost, steps: list[list[list[int]]], times: int = 20) -> StepCost:
    measured = MeasuredCost()
    for _ in range(times):
        for groups in steps:
            measured.observe(groups, machine.step_s(groups))
    return measured.cost()


@given(st.floats(0.001, 0.1), st.floats(0, 0.005), st.floats(1e-7, 1e-5))
def test_the_cost_of_a_machine_is_learned_from_its_steps(group_s: float, row_s: float, cell_s: float) -> None:
    machine = StepCost(group_s, row_s, cell_s)
    found = learned(machine, STEPS)
    for groups in ([[64] * 8], [[3000] * 2], [[64] * 7, [4000]]):
        assert found.step_s(groups) == pytest.approx(machine.step_s(groups), rel=0.1, abs=5e-4)


def test_rows_are_not_divided_before_the_cost_of_length_is_measured() -> None:
    """All steps are equal, so the costs of a group, a row and a cell cannot be distinguished."""
    found = learned(MACHINE, [[[64] * 8]])
    assert len(grouped([64] * 7 + [80], found)) == 1


def test_slower_machine_is_learned_again() -> None:
    measured, slower = MeasuredCost(), StepCost(0.008, 0.0006, 3e-6)
    for machine, times in ((MACHINE, 30), (slower, 150)):
        for _ in range(times):
            for groups in STEPS:
                measured.observe(groups, machine.step_s(groups))
    assert measured.cost().step_s([[64] * 8]) == pytest.approx(slower.step_s([[64] * 8]), rel=0.05)


def test_expected_time_follows_rows_that_join_and_leave_at_once() -> None:
    measured = MeasuredCost()
    for groups in STEPS * 20:
        measured.observe(groups, MACHINE.step_s(groups))
    for groups in ([[64]], [[64] * 8], [[64] * 5, [3000]]):
        assert measured.expected_s(groups) == pytest.approx(MACHINE.step_s(groups), rel=0.05)


def test_slower_steps_are_expected_within_ten() -> None:
    measured = MeasuredCost()
    for slowdown in [1] * 200 + [2] * 10:
        measured.observe([[64] * 8], slowdown * MACHINE.step_s([[64] * 8]))
    assert measured.expected_s([[64] * 8]) > 0.9 * 2 * MACHINE.step_s([[64] * 8])


def test_fast_step_after_slow_ones_ends_their_expectation() -> None:
    measured = MeasuredCost()
    for slowdown in [1] * 50 + [6] * 10 + [1]:
        measured.observe([[64] * 8], slowdown * MACHINE.step_s([[64] * 8]))
    assert measured.expected_s([[64] * 8]) < 1.5 * MACHINE.step_s([[64] * 8])


def test_nothing_is_expected_before_a_measurement() -> None:
    assert MeasuredCost().expected_s([[64]]) == 0.0


def test_another_row_is_expected_to_cost_a_row_in_its_group_or_a_group() -> None:
    measured = MeasuredCost()
    for groups in STEPS * 20:
        measured.observe(groups, MACHINE.step_s(groups))
    together_s = MACHINE.step_s([[64] * 8]) - MACHINE.step_s([[64] * 7])
    assert measured.added_s([[64] * 7], 64) == pytest.approx(together_s, rel=0.1)
    assert measured.added_s([[64] * 7], 4000) == pytest.approx(MACHINE.step_s([[4000]]), rel=0.1)
    assert measured.added_s([], 64) == pytest.approx(MACHINE.step_s([[64]]), rel=0.1)


def test_the_time_of_a_step_is_divided_among_its_groups_by_what_each_costs() -> None:
    measured, groups = MeasuredCost(), [[64] * 8, [3000]]
    for step in STEPS * 20:
        measured.observe(step, MACHINE.step_s(step))
    whole_s = MACHINE.step_s(groups)
    (many, short_s), (one, long_s) = measured.divided(groups, whole_s)
    assert (many, one) == (8, 1)
    assert (short_s, long_s) == pytest.approx([MACHINE.step_s([group]) for group in groups], rel=0.1)
    assert short_s + long_s == pytest.approx(whole_s)


def test_the_time_of_a_step_is_divided_evenly_before_a_measurement() -> None:
    assert MeasuredCost().divided([[64] * 2, [3000]], 6.0) == [(2, 3.0), (1, 3.0)]
