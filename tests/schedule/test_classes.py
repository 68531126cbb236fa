"""Which rows decode apart when memory is short. A token takes 1,000 bytes here."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.admission import RowEstimate, admit_in_turn
from worker.schedule.admission import group_lengths as by_groups
from worker.schedule.classes import Bounds, Decoding, Trial, apart, best, choices, class_of, inside, left
from worker.schedule.grouping import StepCost
from worker.schedule.memory import KVLayers, MemoryModel

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
        decided = admit_in_turn(classed(waiting, bounds), here, KILO, limit)
        return Trial(bounds, [each.tokens for each in inside(here, decided)], left(decided))

    return best(
        now, [each.tokens for each in (*running, *waiting)], cost, attempt, lambda tokens: KILO.max_rows(tokens, limit)
    )


TAIL = rows(*[2000, 100, 100, 100, 100, 100, 100, 100, 100, 100] * 6)


def test_short_rows_decode_apart_from_long_ones_where_many_more_come_in_by_it() -> None:
    assert chosen(TAIL, 25_000_000, cost=MIXED) == (100,)


def test_rows_are_not_parted_where_passes_cost_so_much_that_one_length_after_the_other_is_faster() -> None:
    assert chosen(TAIL, 25_000_000, cost=DEAR) == ()


def test_rows_are_not_parted_where_all_of_them_fit_or_nothing_was_measured() -> None:
    assert chosen(TAIL, 10**12) == ()
    assert chosen(TAIL, 25_000_000, cost=StepCost()) == ()


def test_rows_are_put_together_again_once_all_of_them_fit() -> None:
    assert chosen(rows(100, 2000), 10**12, now=(100,)) == ()


def test_rows_of_like_length_are_not_parted() -> None:
    """Two classes would let in a few more, and take twice as long."""
    assert chosen(rows(*range(50, 1500, 20)), 25_000_000) == ()


def test_ten_short_rows_are_not_slowed_by_a_pass_for_one_long_row() -> None:
    short, limit = rows(*[100] * 10), 12_000_000
    assert KILO.peak_bytes([[100] * 10, [2000]]) < limit < KILO.peak_bytes([[100] * 10 + [2000]])
    assert chosen(rows(2000, passed=1), limit, running=short) == ()


def test_bounds_in_force_are_kept_where_without_them_the_rows_inside_would_not_fit() -> None:
    running = rows(*[100] * 10, 2000)
    assert chosen(rows(4000), 12_000_000, running=running, now=(100,)) == (100,)


def test_a_row_joins_the_group_of_its_class_or_opens_one() -> None:
    decoding = Decoding(DEAR, [[90], [1900, 80]], [[100], [2000, 90]])
    assert [decoding.group_of(length, (100, 1000)) for length in (50, 500, 1500)] == [0, 3, 1]
    assert [decoding.group_of(length, ()) for length in (50, 500, 1500)] == [0, 0, 1]


@given(LENGTHS)
def test_classes_never_take_more_than_rows_that_are_not_parted(lengths: list[int]) -> None:
    needed = [KILO.peak_bytes(apart(lengths, bounds)) for bounds in choices(lengths)]
    assert max(needed, default=0) <= KILO.peak_bytes([lengths])


@given(LENGTHS)
def test_bounds_are_lengths_of_rows_and_leave_no_class_empty(lengths: list[int]) -> None:
    for bounds in choices(lengths):
        assert {*bounds} < {*lengths}
        assert all(apart(lengths, bounds))
        assert list(bounds) == sorted({*bounds})
        assert [class_of(length, bounds) for length in bounds] == list(range(len(bounds)))
