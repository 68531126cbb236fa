"""Rows that decode in separate classes if memory is short. A token takes 1,000 bytes here."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker.engine.admission.classes import (
    Bounds,
    Decoding,
    Trial,
    by_class,
    candidate_bounds,
    choose_bounds,
    class_of,
    rows_after,
    still_waiting,
)
from worker.engine.admission.decision import AdmissionLimits, RowEstimate, admit_in_turn
from worker.engine.admission.decision import group_lengths as by_groups
from worker.engine.admission.grouping import StepCost
from worker.engine.memory import KVLayers, MemoryModel

KILO = MemoryModel(weights_bytes=0, kv_layers=(KVLayers(1000, 10),))
DEAR = StepCost(group_s=0.02, row_s=0.0002, cell_s=1e-8)
MIXED = StepCost(group_s=0.002, row_s=0.0002, cell_s=1e-6)
LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=40)


def rows(*tokens: int, passed: int = 0) -> list[RowEstimate]:
    return [RowEstimate(f"{passed} {i}", "interactive", each - 1, 1, overtaken=passed) for i, each in enumerate(tokens)]


def chosen(
    waiting: Sequence[RowEstimate],
    limit: int,
    *,
    running: Sequence[RowEstimate] = (),
    cost: StepCost = DEAR,
    now: Bounds = (),
) -> Bounds:
    def classed(those: Sequence[RowEstimate], bounds: Bounds) -> list[RowEstimate]:
        return [
            RowEstimate(
                each.id, each.lane, each.prompt_tokens, each.max_tokens, class_of(each.tokens, bounds), each.overtaken
            )
            for each in those
        ]

    def attempt(bounds: Bounds) -> Trial | None:
        here = classed(running, bounds)
        if KILO.peak_bytes(by_groups(here)) > limit:
            return None
        decided = admit_in_turn(classed(waiting, bounds), here, AdmissionLimits(KILO, limit))
        return Trial(bounds, [each.tokens for each in rows_after(here, decided)], still_waiting(decided))

    return choose_bounds(
        now, [each.tokens for each in (*running, *waiting)], cost, attempt, lambda tokens: KILO.max_rows(tokens, limit)
    )


TAIL = rows(*[2000, 100, 100, 100, 100, 100, 100, 100, 100, 100] * 6)


def test_short_rows_get_their_own_class_if_that_admits_many_more() -> None:
    assert chosen(TAIL, 25_000_000, cost=MIXED) == (100,)


def test_no_classes_if_decoding_one_length_after_the_other_is_faster() -> None:
    assert chosen(TAIL, 25_000_000, cost=DEAR) == ()


def test_no_classes_if_all_rows_fit_or_no_cost_is_known() -> None:
    assert chosen(TAIL, 10**12) == ()
    assert chosen(TAIL, 25_000_000, cost=StepCost()) == ()


def test_classes_end_once_all_rows_fit() -> None:
    assert chosen(rows(100, 2000), 10**12, now=(100,)) == ()


def test_no_classes_for_rows_of_similar_length() -> None:
    """Two classes would admit a few more rows, but take twice as long."""
    assert chosen(rows(*range(50, 1500, 20)), 25_000_000) == ()


def test_ten_short_rows_are_not_slowed_by_a_pass_for_one_long_row() -> None:
    short, limit = rows(*[100] * 10), 12_000_000
    assert KILO.peak_bytes([[100] * 10, [2000]]) < limit < KILO.peak_bytes([[100] * 10 + [2000]])
    assert chosen(rows(2000, passed=1), limit, running=short) == ()


def test_bounds_stay_if_active_rows_do_not_fit_without_them() -> None:
    running = rows(*[100] * 10, 2000)
    assert chosen(rows(4000), 12_000_000, running=running, now=(100,)) == (100,)


def test_a_row_joins_the_group_of_its_class_or_opens_one() -> None:
    decoding = Decoding(DEAR, [[90], [1900, 80]], [[100], [2000, 90]])
    assert [*map(decoding.groups_by_length((100, 1000)), (50, 500, 1500))] == [0, 3, 1]
    assert [*map(decoding.groups_by_length(()), (50, 500, 1500))] == [0, 0, 1]


@given(LENGTHS)
def test_classes_never_take_more_memory_than_one_group(lengths: list[int]) -> None:
    needed = [KILO.peak_bytes(by_class(lengths, bounds)) for bounds in candidate_bounds(lengths)]
    assert max(needed, default=0) <= KILO.peak_bytes([lengths])


@given(LENGTHS)
def test_bounds_are_lengths_of_rows_and_leave_no_class_empty(lengths: list[int]) -> None:
    for bounds in candidate_bounds(lengths):
        assert {*bounds} < {*lengths}
        assert all(by_class(lengths, bounds))
        assert list(bounds) == sorted({*bounds})
        assert [class_of(length, bounds) for length in bounds] == list(range(len(bounds)))
