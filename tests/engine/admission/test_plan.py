"""Plans of admission: complete, consistent, and computed from numbers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.contract.keys import Lane
from worker.engine.admission.classes import Decoding
from worker.engine.admission.decision import AdmissionLimits, Admit, RowEstimate, admit_in_turn
from worker.engine.admission.grouping import StepCost
from worker.engine.admission.plan import NO_GROUP, AdmissionPlan, plan_admission
from worker.engine.memory import KVLayers, MemoryModel

COSTS = MemoryModel(weights_bytes=10, kv_layers=(KVLayers(1000, 1000),))
IDLE = Decoding(StepCost())

lanes: list[Lane] = ["interactive", "batch"]


def row(id: str, tokens: int, lane: Lane = "interactive", held_bytes: int = 0) -> RowEstimate:
    return RowEstimate(id, lane, tokens - 40, 40, NO_GROUP, preempted=held_bytes > 0, held_bytes=held_bytes)


def plan(waiting: list[RowEstimate], active: list[RowEstimate], limit: int, max_rows: int = 100) -> AdmissionPlan:
    return plan_admission(waiting, active, IDLE, (), AdmissionLimits(COSTS, limit, max_rows))


def rows(prefix: str, held: st.SearchStrategy[int]) -> st.SearchStrategy[list[RowEstimate]]:
    return st.lists(st.tuples(st.integers(50, 3000), st.sampled_from(lanes), held), max_size=6).map(
        lambda drawn: [row(f"{prefix}{i}", *each) for i, each in enumerate(drawn)]
    )


@given(rows("w", st.sampled_from([0, 0, 200_000, 900_000])), rows("a", st.just(0)), st.integers(10**6, 2 * 10**7))
def test_every_waiting_row_has_one_decision_and_the_reservation_is_that_of_the_rows_after_it(
    waiting: list[RowEstimate], active: list[RowEstimate], limit: int
) -> None:
    planned = plan(waiting, active, limit)
    assert sorted([*planned.admit, *planned.refuse, *planned.overtaken]) == sorted(each.id for each in waiting)
    after = [each for each in active if each.id not in planned.preempt] + [
        each for each in waiting if each.id in planned.admit
    ]
    held = sum(each.held_bytes for each in waiting if each.id not in planned.drop_caches)
    lengths = [[each.tokens for each in after]] if after else []
    assert planned.reservation.peak_bytes == COSTS.peak_bytes(lengths)
    assert planned.shares == planned.reservation.shares(AdmissionLimits(COSTS, limit, 100), held)
    assert {*planned.drop_caches} <= {each.id for each in waiting if each.held_bytes}
    assert {*planned.preempt} <= {each.id for each in active if each.lane == "batch"}


@given(rows("w", st.sampled_from([0, 300_000, 900_000])), rows("a", st.just(0)), st.integers(10**6, 2 * 10**7))
def test_saved_caches_keep_no_row_out_and_no_more_are_dropped_than_needed(
    waiting: list[RowEstimate], active: list[RowEstimate], limit: int
) -> None:
    def admitted(dropped: tuple[str, ...]) -> set[str]:
        kept = [each._replace(group=0, held_bytes=0 if each.id in dropped else each.held_bytes) for each in waiting]
        decided = admit_in_turn(kept, [each._replace(group=0) for each in active], AdmissionLimits(COSTS, limit, 100))
        return {each.id for each, decision in decided if isinstance(decision, Admit)}

    planned, holding = plan(waiting, active, limit), tuple(each.id for each in waiting if each.held_bytes)
    assert {*planned.admit} == admitted(holding)
    assert planned.drop_caches == holding[::-1][: len(planned.drop_caches)], "the youngest first"
    if planned.drop_caches:
        assert admitted(planned.drop_caches[:-1]) != admitted(holding)


def growing(id: str, tokens: int, age: int, held_bytes: int = 0) -> RowEstimate:
    """Return a row without a limit; it was preempted, or is active."""
    return row(id, tokens, held_bytes=held_bytes)._replace(grows=True, least=1, likely=40, preempted=True, age=age)


def test_saved_cache_is_dropped_before_a_row_of_its_lane_is_preempted() -> None:
    old, young, saved = growing("old", 500, 0), growing("young", 500, 1), growing("saved", 3000, 2, held_bytes=300_000)
    planned = plan([old, saved], [young], COSTS.peak_bytes([[500, 500]]) + 200_000)
    assert (planned.admit, planned.drop_caches) == ({"old": ()}, ("saved",))
    planned = plan([old, saved], [young], COSTS.peak_bytes([[500, 500]]) - 1)
    assert (planned.admit, planned.drop_caches) == ({"old": ("young",)}, ()), "dropping it would not do"


def test_saved_cache_of_an_offline_row_stays_if_another_one_can_be_preempted() -> None:
    running, saved = row("running", 500, "batch"), row("saved", 3000, "batch", held_bytes=300_000)
    planned = plan([row("new", 500), saved], [running], COSTS.peak_bytes([[500, 500]]) + 200_000)
    assert (planned.admit, planned.drop_caches) == ({"new": ("running",)}, ())


rows_that_grow = st.lists(
    st.tuples(st.integers(50, 3000), st.integers(0, 12), st.sampled_from([0, 300_000, 900_000])), max_size=8
)


@given(rows_that_grow, rows_that_grow, st.integers(10**6, 2 * 10**7))
def test_row_is_preempted_only_if_it_would_be_without_saved_caches(
    waiting: list[tuple[int, int, int]], active: list[tuple[int, int, int]], limit: int
) -> None:
    queue = sorted((growing(f"w{i}", *each) for i, each in enumerate(waiting)), key=lambda row: row.age)
    here = sorted((growing(f"a{i}", *each[:2]) for i, each in enumerate(active)), key=lambda row: row.age)
    bare = plan([each._replace(held_bytes=0) for each in queue], here, limit)
    assert plan(queue, here, limit).admit == bare.admit


def test_rows_are_preempted_in_the_order_of_their_admission_s_decisions() -> None:
    active = [row("old", 500, "batch"), row("young", 500, "batch")]
    planned = plan([row("first", 500), row("second", 500)], active, COSTS.peak_bytes([[500, 500]]))
    assert planned.admit == {"first": ("young",), "second": ("old",)}
    assert planned.preempt == ["young", "old"]


@pytest.mark.parametrize(("spare", "must_tighten"), [(1999, True), (2000, False)])
def test_buffers_must_be_tightened_if_the_rows_do_not_fit_beside_their_slack(spare: int, must_tighten: bool) -> None:
    decoding = Decoding(StepCost(), [[100]], [[200]], [COSTS.rectangle_bytes([200]) + 2000])
    limits = AdmissionLimits(COSTS, COSTS.peak_bytes([[200]]) + spare, 100)
    reservation = plan_admission([], [row("here", 200)._replace(group=0)], decoding, (), limits).reservation
    assert (reservation.must_tighten, reservation.slack_bytes) == (must_tighten, 0 if must_tighten else 2000)
