"""Rows without a stated limit. A row of 1,000 tokens takes `cost(1000)` bytes, and nothing here computes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.contract.keys import Lane
from tests.support.growing_memory import COSTS as COSTS_OF_ROWS
from tests.support.growing_memory import STEP, Machine, Row, Rule
from worker.engine.admission.classes import Decoding
from worker.engine.admission.decision import AdmissionLimits, RowEstimate, group_lengths
from worker.engine.admission.plan import AdmissionPlan, AnswerLengths, Growth, in_groups, must_grow, plan_growth
from worker.engine.memory import BUFFER_TOKENS, KVLayers, MemoryModel

COSTS = MemoryModel(weights_bytes=1_000_000_000, kv_layers=(KVLayers(token_bytes=100_000, layer_bytes=3_000),))


def row(
    id: str,
    reserved: int = 1_000,
    *,
    lane: Lane = "interactive",
    grows: bool = True,
    must: bool = False,
    group: int = 0,
) -> RowEstimate:
    """`must`: it has nearly used up its reservation."""
    least = reserved + BUFFER_TOKENS if must else 0
    return RowEstimate(id, lane, 500, reserved, group, grows=grows, least=least, likely=reserved + 2_000)


def room_for(*rows: RowEstimate) -> int:
    return COSTS.peak_bytes(group_lengths(rows))


def grown(active: Sequence[RowEstimate], max_bytes: int) -> Growth:
    """`active`: the oldest first."""
    return plan_growth([each._replace(age=age) for age, each in enumerate(active)], AdmissionLimits(COSTS, max_bytes))


def test_row_that_must_grow_gets_what_is_likely_if_there_is_room() -> None:
    old = row("old", must=True)
    assert grown([old, row("other")], 10**12).reserve == {"old": 3_000}


def test_row_gets_the_least_before_another_is_preempted() -> None:
    old, other = row("old", must=True), row("other")
    growth = grown([old, other], room_for(old.reserving(old.least), other))
    assert (growth.reserve, growth.preempt, growth.move) == ({"old": old.least}, [], [])


def test_row_moves_to_a_group_of_its_own_before_another_is_preempted() -> None:
    """In a group every row takes as much as the longest."""
    long, short = row("long", 8_000, must=True), [row(str(i)) for i in range(5)]
    alone = long._replace(max_tokens=long.least, group=1)
    growth = grown([long, *(each._replace(max_tokens=8_000) for each in short[:1]), *short[1:]], 10**12)
    assert growth.move == []
    growth = grown([long, *short], room_for(alone, *short))
    assert (growth.reserve, growth.preempt, growth.move) == ({"long": long.least}, [], ["long"])


def test_offline_rows_are_preempted_first_then_the_youngest_without_a_limit() -> None:
    old, stated = row("old", must=True), row("stated", grows=False)
    offline = row("offline", lane="batch", grows=False)
    young, youngest = row("young"), row("youngest")
    active = [offline, old, young, stated, youngest]
    least = old.reserving(old.least)
    assert grown(active, room_for(least, young, stated, youngest)).preempt == ["offline"]
    assert grown(active, room_for(least, young, stated)).preempt == ["offline", "youngest"]
    assert grown(active, room_for(least, stated)).preempt == ["offline", "youngest", "young"]


def test_row_is_preempted_itself_if_only_older_rows_and_those_with_a_limit_are_beside_it() -> None:
    oldest, young, stated = row("oldest"), row("young", must=True), row("stated", grows=False)
    growth = grown([oldest, young, stated], room_for(oldest, young, stated))
    assert (growth.reserve, growth.preempt) == ({}, ["young"])
    assert [each.id for each in growth.rows] == ["oldest", "stated"]


def test_row_that_outgrows_memory_alone_ends_and_preempts_no_other() -> None:
    old, young = row("old", 9_000, must=True), row("young", group=1)
    growth = grown([old, young], room_for(old))
    assert (growth.cut, growth.preempt, growth.reserve) == ({"old": 9_000}, [], {})


def test_row_grows_to_the_last_token_that_memory_holds_before_it_ends() -> None:
    old = row("old", 9_000, must=True)
    growth = grown([old], room_for(old.reserving(9_100)))
    assert 9_100 <= growth.reserve["old"] < old.least
    assert not growth.cut


lanes: list[Lane] = ["interactive", "batch"]
rows = st.lists(
    st.tuples(st.integers(1, 20_000), st.sampled_from(lanes), st.booleans(), st.booleans(), st.integers(0, 2)),
    max_size=10,
).map(
    lambda given: [
        row(str(i), tokens, lane=lane, grows=grows, must=grows and must, group=group)
        for i, (tokens, lane, grows, must, group) in enumerate(given)
    ]
)


@given(rows, st.integers(0, 15_000_000_000))
def test_growth_keeps_its_promises_whatever_the_rows(active: list[RowEstimate], spare: int) -> None:
    limit = room_for(*active) + spare - 7_000_000_000  # memory may be shorter than what is reserved: see `Calibration`
    growth = grown(active, limit)
    by_id = {each.id: each for each in active}
    left = {each.id: each for each in growth.rows}
    assert left.keys() == by_id.keys() - {*growth.preempt}
    for each in filter(must_grow, active):
        assert each.id in {*growth.reserve, *growth.cut, *growth.preempt}
    growers = {each.id: each for each in active if must_grow(each)}
    for id in growth.preempt:
        lost = by_id[id]
        assert lost.grows or lost.lane == "batch", "a stated limit is a promise"
        older = [each for each in active[: active.index(lost)] if each.lane == lost.lane and each.id in growers]
        for_interactive = [each for each in growers.values() if each.lane == "interactive" and lost.lane == "batch"]
        assert id in growers or older or for_interactive
    for id, tokens in growth.reserve.items():
        assert by_id[id].max_tokens < tokens <= by_id[id].likely
    if growth.reserve:
        assert room_for(*growth.rows) <= limit
    for lane in lanes:  # the oldest that must grow goes on, unless rows that it may not preempt leave no room
        first = next((each for each in growers.values() if each.lane == lane), None)
        if first and first.id in growth.preempt:
            older = active[: active.index(first)]
            assert any(
                lane == "batch" if other.lane != lane else not other.grows or by_id[other.id] in older
                for other in growth.rows
            )


# Runs to the end: the simulation applies plans, and rows draw tokens between two of them

CONTEXT = 4_000  # tokens
chats = st.builds(
    Row,
    id=st.just(""),
    at_s=st.floats(0, 60),
    prompt=st.integers(1, 600),
    answer=st.one_of(st.integers(1, 300), st.integers(300, CONTEXT)),
    limit=st.just(CONTEXT - 600),
    lane=st.sampled_from(["interactive", "interactive", "interactive", "batch"]),
    stated=st.sampled_from([False, False, True]),
)


class Watched(Machine):
    """A machine that checks after each plan what the rule promises."""

    def __init__(self, rows: Sequence[Row], full_rows: float = 1.0) -> None:
        in_order = sorted(rows, key=lambda row: row.at_s)
        self.all = [replace(row, id=str(age)) for age, row in enumerate(in_order)]
        super().__init__(self.all, Rule(quantile=0.8), full_rows, CONTEXT)
        self.preemptions = Counter[str]()
        self.ended = list[str]()

    def run_to_the_end(self) -> None:
        before = {row.id: self.estimate(row) for row in self.all}
        while plan := self.plan():
            self.check(plan, before)
            left = [row for row in self.all if row.drawn < row.answer]
            self.decode()
            assert any(row in self.active or row.drawn for row in left), "no progress"
            self.ended += [row.id for row in left if row not in (*self.active, *self.waiting) and row.drawn]
            before = {row.id: self.estimate(row) for row in self.all}
        for row in self.all:
            assert row.drawn == min(row.answer, row.limit)
            # A row that has outgrown what was reserved for it gets at least `BUFFER_TOKENS` more.
            growths = sum(each.limit // BUFFER_TOKENS + 1 for each in self.all)
            assert self.preemptions[row.id] <= growths, "rows that preempt each other in turn"

    def check(self, plan: AdmissionPlan, before: Mapping[str, RowEstimate]) -> None:
        """`before`: the rows before the plan."""
        rows = {row.id: row for row in self.all}
        active = {row.id for row in self.active}
        self.preemptions.update(plan.preempt)
        assert active, "no row decodes"
        assert plan.reservation.peak_bytes <= self.limits.max_bytes
        for id in plan.preempt:
            row = rows[id]
            assert row.lane == "batch" or not row.stated, "a stated limit is a promise"
            if row.lane == "interactive" and not must_grow(before[id]):
                assert all(each.lane == "interactive" for each in self.active), "offline rows first"
                causes = [rows[each] for each in {*plan.growth.reserve, *plan.admit}]
                assert any(int(each.id) < int(id) and not each.stated for each in causes), "no older row needs it"
        if not plan.growth.preempt:  # a plan that preempts rows for growth admits none: that is for the next one
            self.check_oldest()

    def check_oldest(self) -> None:
        """The oldest interactive row without a limit that has begun goes on, unless rows that stated theirs leave no
        room for it."""
        begun = [row for row in (*self.active, *self.waiting) if row.preempted or row in self.active]
        growing = [row for row in begun if row.lane == "interactive" and not row.stated]
        oldest = min(growing, key=lambda row: int(row.id), default=None)
        if oldest and oldest not in self.active:
            kept = [self.estimate(row) for row in self.active if row.lane == "interactive" and row.stated]
            (alone,) = in_groups([self.estimate(oldest)], Decoding(STEP), ())
            assert COSTS_OF_ROWS.peak_bytes(group_lengths([*kept, alone])) > self.limits.max_bytes


@settings(deadline=None)
@given(st.lists(chats, min_size=1, max_size=12), st.floats(1.0, 4.0))
def test_rows_that_come_at_any_time_end_and_the_oldest_always_goes_on(rows: list[Row], full_rows: float) -> None:
    Watched(rows, full_rows).run_to_the_end()


def test_of_equal_rows_the_oldest_ends_first() -> None:
    machine = Watched([Row("", 0.0, 500, 3_400, 3_400) for _ in range(8)])
    machine.run_to_the_end()
    assert machine.ended == [str(i) for i in range(8)]
    assert machine.preemptions.total() > 0


def test_row_that_has_preempted_itself_is_not_passed_by_younger_ones() -> None:
    """It makes room for an older one, and a younger one takes what is left of it."""
    given = [(0.0, 300, 3_400), (0.1, 550, 3_400), (21.0, 150, 1_200), (24.0, 20, 3_000)]
    machine = Watched([Row("", at_s, prompt, answer, 3_400) for at_s, prompt, answer in given], full_rows=1.3)
    machine.run_to_the_end()
    assert machine.preemptions["1"] > 0
    assert machine.preemptions["2"] > 0
    assert machine.ended == ["0", "1", "2", "3"]


def test_what_is_reserved_first_follows_recent_answers_of_the_lane() -> None:
    lengths = AnswerLengths(quantile=0.8)
    assert lengths.likely("interactive") == 1_024, "none is known"
    for tokens in range(0, 1_000, 10):
        lengths.observe("interactive", tokens)
    assert lengths.likely("interactive") == 790
    assert lengths.likely("batch") == 1_024
    for _ in range(300):
        lengths.observe("interactive", 5)
    assert lengths.likely("interactive") == BUFFER_TOKENS


@given(st.integers(1, 30_000))
def test_what_is_reserved_for_a_longer_answer_is_more_than_it_has(drawn: int) -> None:
    assert AnswerLengths().likely("interactive", drawn) >= drawn + BUFFER_TOKENS
