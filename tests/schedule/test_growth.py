"""Rows without a stated limit. A row of 1,000 tokens takes `cost(1000)` bytes, and nothing here computes."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.admission import Limits, RowEstimate, group_lengths
from worker.schedule.growth import AnswerLengths, Growth, must_grow, plan_growth
from worker.schedule.memory import BUFFER_TOKENS, KVLayers, MemoryModel
from worker.schedule.request import Lane

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
    return plan_growth(active, Limits(COSTS, max_bytes))


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
    limit = room_for(*active) + spare - 7_000_000_000  # memory may be shorter than what is reserved: see `Correction`
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


def run_to_the_end(answers: Sequence[tuple[int, int, bool]], limit: int) -> list[str]:
    """Return the ids in the order in which rows end that decode a token in each turn. `answers`: tokens of each, tokens
    reserved at first, and if its limit is stated."""
    waiting = [str(i) for i in range(len(answers))]
    drawn, reserved, ended = dict.fromkeys(waiting, 0), dict[str, int](), list[str]()
    turns = 0
    while waiting or reserved:
        turns += 1
        assert turns < 100_000, "no progress"

        def estimate(id: str) -> RowEstimate:
            tokens, _, stated = answers[int(id)]
            least = min(tokens, drawn[id] + BUFFER_TOKENS) if reserved[id] < min(tokens, drawn[id] + 100) else 0
            likely = min(tokens, max(least, drawn[id] + 500))
            return RowEstimate(id, "interactive", 500, reserved[id], grows=not stated, least=least, likely=likely)

        growth = grown([estimate(id) for id in sorted(reserved, key=int)], limit)
        assert not growth.cut
        reserved.update(growth.reserve)
        for id in growth.preempt:
            del reserved[id]
        waiting = sorted([*waiting, *growth.preempt], key=int)
        while waiting and not growth.preempt:
            id = waiting[0]
            tokens, first, stated = answers[int(id)]
            reserved[id] = tokens if stated else min(tokens, max(first, drawn[id] + BUFFER_TOKENS))
            if COSTS.peak_bytes([[500 + each for each in reserved.values()]]) > limit:
                del reserved[id]
                break
            waiting.pop(0)
        for id in [*reserved]:
            drawn[id] += 100
            if drawn[id] >= answers[int(id)][0]:
                ended.append(id)
                del reserved[id]
    return ended


@given(st.lists(st.tuples(st.integers(100, 9_000), st.integers(256, 2_000), st.booleans()), min_size=1, max_size=8))
def test_all_rows_end_and_of_equal_ones_the_oldest_first(answers: list[tuple[int, int, bool]]) -> None:
    limit = COSTS.peak_bytes([[500 + 9_000]])
    assert sorted(run_to_the_end(answers, limit), key=int) == [str(i) for i in range(len(answers))]
    equal = [(9_000, 256, False)] * len(answers)
    assert run_to_the_end(equal, limit) == [str(i) for i in range(len(answers))]


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
