from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.contract.keys import Lane
from worker.engine.step.cost import Forward, PromptChunk, PromptCost
from worker.engine.step.plan import PromptState, StepLimits, in_order, may_advance, plan
from worker.engine.step.planner import Backlog
from worker.engine.step.tuning import (
    AGING,
    FIRST_TOKEN_S,
    LATE_FACTOR,
    MIN_CHUNK,
    SHORT_CHUNKS,
    TURN_EVERY,
)
from worker.outcomes import Phase

SECOND_A_TOKEN = PromptCost(token_s=1.0)
UNBOUNDED = 10**9


def waiting(
    id: str, remaining: int, *, done: int = 0, waited_s: float = 0.0, lane: Lane = "interactive"
) -> PromptState:
    return PromptState(id, done, remaining, waited_s, lane, SECOND_A_TOKEN)


def planned(
    rows: Iterable[PromptState], seconds: float, cost: PromptCost = SECOND_A_TOKEN, step: int = 1
) -> list[PromptChunk]:
    return chunks_of(plan([replace(row, cost=cost) for row in rows], limits(seconds), step, UNBOUNDED))


def chunks_of(forwards: Iterable[Forward]) -> list[PromptChunk]:
    return [chunk for forward in forwards for chunk in forward.chunks]


def limits(
    interactive_s: float, batch_s: float | None = None, *, shared_s: float = 0.0, enough_s: float = inf
) -> StepLimits:
    """Return the time by lane, by default the same for both."""
    spare_s: dict[Lane, float] = {"interactive": interactive_s, "batch": interactive_s if batch_s is None else batch_s}
    return StepLimits(spare_s, shared_s, enough_s)


def order(*rows: PromptState) -> list[str]:
    return [chunk.id for chunk in planned(rows, seconds=10**9)]


def seconds_of(forwards: list[Forward], rows: list[PromptState], cost: PromptCost) -> float:
    """Return the seconds of forwards. Those of several prompts take one pass over the weights, and all of them compute
    as many tokens as the longest chunk has."""
    waiting = {row.id: row for row in rows}
    taken = -sum(len(forward.chunks) - 1 for forward in forwards) * cost.forward_s
    for forward in forwards:
        width = max(chunk.tokens for chunk in forward.chunks)
        for chunk in forward.chunks:
            row = waiting[chunk.id]
            computed = width if row.done else max(width, 1)
            passes_more = sum(row.done < cut < row.done + chunk.tokens for cut in row.cuts)
            taken += (cost.chunk_s(computed, row.done) if computed else 0) + passes_more * cost.forward_s
            taken += cost.joining_s(row.done + chunk.tokens) if chunk.joins else 0
    return taken


ROWS = st.lists(
    st.builds(
        PromptState,
        st.uuids().map(str),
        st.integers(0, 3000),
        st.integers(0, 2000),
        st.floats(0, 200),
        st.sampled_from(["interactive", "batch"]),
        st.just(SECOND_A_TOKEN),
        st.lists(st.integers(1, 5000), max_size=3).map(sorted),
        pack=st.sampled_from([None, 0, 1]),
    ),
    max_size=12,
    unique_by=lambda row: row.id,
)
LENGTHS = st.sampled_from([0, 20, 36, 40, 60, 100, 500])  # so that some prompts can share a forward
PACKABLE = st.lists(
    st.builds(
        PromptState,
        st.uuids().map(str),
        st.sampled_from([0, 64, 100]),
        LENGTHS,
        st.floats(0, 5),
        st.sampled_from(["interactive", "interactive", "batch"]),
        st.just(SECOND_A_TOKEN),
        st.lists(st.sampled_from([20, 70, 96, 120]), max_size=2).map(sorted),
        pack=st.sampled_from([None, 0, 0, 0, 1]),
    ),
    max_size=12,
)
PACKABLE |= PACKABLE.map(lambda rows: [replace(row, padded=True) for row in rows])
BUDGETS = st.floats(0, 4000)
STEPS = st.integers(0, 16)
COSTS = st.builds(
    PromptCost, st.floats(0, 100), st.floats(0.1, 2), st.floats(0, 0.01), st.floats(0, 10), st.floats(0, 0.1)
)


@given(ROWS | PACKABLE, BUDGETS, COSTS, STEPS)
def test_plan_keeps_the_time_except_for_the_first_prompts_minimum(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    rows = [replace(row, cost=cost) for row in rows]
    forwards = plan(rows, limits(seconds), step, UNBOUNDED)
    if seconds_of(forwards, rows, cost) > seconds * 1.000001:
        [chunk] = chunks_of(forwards)
        assert chunk.tokens <= MIN_CHUNK
        assert not (chunk.tokens and chunk.joins)


@given(ROWS | PACKABLE, BUDGETS, COSTS, STEPS)
def test_forwards_take_as_long_as_planned(rows: list[PromptState], seconds: float, cost: PromptCost, step: int) -> None:
    rows = [replace(row, cost=cost) for row in rows]
    for forward in plan(rows, limits(seconds), step, UNBOUNDED):
        assert forward.seconds == pytest.approx(seconds_of([forward], rows, cost))


@given(ROWS, BUDGETS, COSTS, STEPS)
def test_remaining_time_is_not_worth_a_pass_for_the_next_prompt(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    rows = [replace(row, cost=cost, pack=None) for row in rows]
    forwards = plan(rows, limits(seconds), step, UNBOUNDED)
    left = seconds - seconds_of(forwards, rows, cost)
    for chunk in planned(rows, UNBOUNDED, cost, step)[len(forwards) :][:1]:
        (row,) = (row for row in rows if row.id == chunk.id)
        least = min(max(row.remaining, 1), cost.worthwhile)
        cuts = sum(row.done < cut < row.done + least for cut in row.cuts)
        assert left < cost.chunk_s(least, row.done) + cuts * cost.forward_s + cost.joining_s(row.done + row.remaining)


@given(ROWS | PACKABLE, BUDGETS, BUDGETS, COSTS, STEPS, st.floats(0, 2000))
def test_offline_prompts_take_no_interactive_time(
    rows: list[PromptState], more: float, target: float, cost: PromptCost, step: int, enough: float
) -> None:
    rows = [replace(row, cost=cost) for row in rows]
    forwards = plan(rows, limits(target + more, target, enough_s=enough), step, UNBOUNDED)
    lanes = {row.id: row.lane for row in rows}
    offline = [chunk for chunk in chunks_of(forwards) if lanes[chunk.id] == "batch"]
    interactive = [row for row in rows if row.lane == "interactive"]
    assert [chunk for chunk in chunks_of(forwards) if chunk not in offline] == chunks_of(
        plan(interactive, limits(target + more, enough_s=enough), step, UNBOUNDED)
    )
    if offline and (interactive or step % TURN_EVERY):
        assert seconds_of(forwards, rows, cost) <= target * 1.000001


@given(ROWS, BUDGETS, COSTS, STEPS)
def test_the_first_interactive_prompt_always_advances(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    chunks = planned(rows, -1 - seconds, cost, step)  # below zero, since a join without cost fits into no time
    interactive = any(row.lane == "interactive" for row in rows)
    assert len(chunks) == (interactive or (bool(rows) and step % TURN_EVERY == 0))
    for chunk in chunks:
        assert chunk.tokens or chunk.joins


@given(PACKABLE, BUDGETS, COSTS, STEPS, st.integers(MIN_CHUNK, 300))
def test_prompts_that_share_a_forward_have_as_many_tokens_unless_padded_and_none_crosses_a_cut(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int, longest: int
) -> None:
    given = {row.id: row for row in rows}
    for forward in plan([replace(row, cost=cost) for row in rows], limits(seconds), step, longest):
        tokens = [chunk.tokens for chunk in forward.chunks]
        assert len(tokens) * max(tokens) <= longest
        if len(tokens) == 1:
            continue
        shared = [given[chunk.id] for chunk in forward.chunks]
        assert min(tokens) > 0
        assert min(tokens) == max(tokens) or all(row.padded for row in shared)
        assert len({(row.pack, row.lane) for row in shared}) == 1
        assert shared[0].pack is not None
        for row, computed in zip(shared, tokens, strict=True):
            assert [cut for cut in row.cuts if row.done < cut < row.done + computed] == []


@given(PACKABLE, BUDGETS, COSTS, STEPS)
def test_one_prompt_is_planned_as_if_forwards_were_never_shared(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    for row in rows:
        alone = replace(row, cost=cost)
        assert plan([alone], limits(seconds), step, UNBOUNDED) == plan(
            [replace(alone, pack=None)], limits(seconds), step, UNBOUNDED
        )


@given(PACKABLE, BUDGETS, COSTS, STEPS)
def test_sharing_a_forward_takes_no_time_from_the_first_prompt(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    rows = [replace(row, cost=cost, cuts=()) for row in rows]
    apart = [replace(row, pack=None) for row in rows]
    assert planned(rows, seconds, cost, step)[:1] == planned(apart, seconds, cost, step)[:1]


@given(ROWS, BUDGETS, COSTS, STEPS)
def test_row_joins_only_when_its_prompt_is_computed(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    needs = {row.id: row.remaining for row in rows}
    joining = [chunk for chunk in planned(rows, seconds, cost, step) if chunk.joins]
    assert [chunk for chunk in joining if chunk.tokens < needs[chunk.id]] == []


@given(ROWS, BUDGETS, COSTS, STEPS)
def test_a_row_has_one_chunk_at_most_and_never_more_than_it_needs(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    chunks, needs = planned(rows, seconds, cost, step), {row.id: row.remaining for row in rows}
    assert len({chunk.id for chunk in chunks}) == len(chunks)
    assert [chunk for chunk in chunks if not 0 <= chunk.tokens <= needs[chunk.id]] == []


@given(ROWS, BUDGETS, STEPS)
def test_only_the_last_chunk_is_cut_short(rows: list[PromptState], seconds: float, step: int) -> None:
    rows = [replace(row, cuts=(), pack=None) for row in rows]  # a chunk may also end at a cut
    needs = {row.id: row.remaining for row in rows}
    computed = [chunk for chunk in planned(rows, seconds, step=step) if chunk.tokens]
    assert [chunk for chunk in computed[:-1] if chunk.tokens < needs[chunk.id]] == []


@given(ROWS, BUDGETS, st.randoms())
def test_the_plan_depends_on_the_rows_and_not_on_their_order(
    rows: list[PromptState], seconds: float, dice: object
) -> None:
    distinct = [replace(row, remaining=1000 * i + row.remaining % 1000, waited_s=0) for i, row in enumerate(rows)]
    shuffled = sorted(distinct, key=lambda _: dice.random())  # type: ignore[attr-defined]
    assert planned(shuffled, seconds) == planned(distinct, seconds)


def test_chunk_has_at_most_the_longest_number_of_tokens() -> None:
    rows = [waiting("a", 900), waiting("b", 900)]
    assert chunks_of(plan(rows, limits(1000), 1, longest=300)) == [PromptChunk("a", 300), PromptChunk("b", 300)]


def test_a_chunk_deep_in_a_prompt_is_shorter() -> None:
    cost = PromptCost(token_s=1.0, before_s=0.01)
    chunks = [planned([waiting("a", 5000, done=done)], 200, cost)[0].tokens for done in (0, 1000, 4000)]
    assert chunks == [123, 18, 16]


def test_row_joins_in_a_step_that_has_time_for_it() -> None:
    cost = PromptCost(token_s=1.0, joined_s=0.1)
    assert planned([waiting("a", 100, done=900)], 200, cost) == [PromptChunk("a", 100, joins=True)]
    assert planned([waiting("a", 100, done=900)], 199, cost) == [PromptChunk("a", 100)]
    assert planned([waiting("a", 0, done=1000)], 100, cost) == [PromptChunk("a", 0, joins=True)]
    assert planned([waiting("a", 0, done=1000)], 50, cost) == [
        PromptChunk("a", 0, joins=True)
    ]  # it will not get cheaper
    rows = [waiting("b", 0, done=900), waiting("a", 0, done=1000)]
    assert planned(rows, 190, cost) == [PromptChunk("b", 0, joins=True), PromptChunk("a", 0, joins=True)]
    assert planned(rows, 189, cost) == [PromptChunk("b", 0, joins=True)]


def test_a_row_that_makes_buffers_grow_joins_in_a_step_that_has_time_for_it() -> None:
    cost = PromptCost(token_s=1.0, grown_s=0.1)
    row = replace(waiting("a", 100), join_copy_bytes=500)
    assert planned([row], 150, cost) == [PromptChunk("a", 100, joins=True)]
    assert planned([row], 149, cost) == [PromptChunk("a", 100)]


def test_a_cut_costs_a_pass_over_the_weights() -> None:
    cost = PromptCost(forward_s=10.0, token_s=1.0)
    row = replace(waiting("a", 100), cuts=(96,))
    assert planned([row], 120, cost) == [PromptChunk("a", 100, joins=True)]
    assert planned([row], 112, cost) == [PromptChunk("a", 96)]
    assert planned([row], 106, cost) == [PromptChunk("a", 96)]  # rather than a pass for a token or two
    assert planned([replace(row, cuts=(10,))], 60, cost) == [PromptChunk("a", 40)]


def test_long_prompt_shares_no_forward_of_a_few_tokens() -> None:
    rows = [replace(waiting("rest", 5, done=40), pack=0), replace(waiting("long", 60), pack=0)]
    forwards = plan(
        [replace(row, cost=PromptCost(forward_s=20.0, token_s=1.0)) for row in rows], limits(90), 1, UNBOUNDED
    )
    assert [len(forward.chunks) for forward in forwards] == [1, 1]


def test_a_prompt_of_one_token_costs_one() -> None:
    assert len(planned([waiting(str(i), 0) for i in range(100)], 30)) == 30


def test_the_prompt_that_is_done_soonest_is_first() -> None:
    assert order(waiting("long", 900), waiting("short", 10), waiting("middle", 90)) == ["short", "middle", "long"]


def test_prompts_of_one_length_keep_their_order() -> None:
    assert order(waiting("a", 50), waiting("b", 50), waiting("c", 50)) == ["a", "b", "c"]


def test_offline_work_comes_after_interactive_work_however_short_or_old() -> None:
    assert order(waiting("file", 1, waited_s=10**6, lane="batch"), waiting("chat", 30_000)) == ["chat", "file"]


def in_turn(rows: list[PromptState], step: int = 1) -> list[str]:
    return [row.id for row in in_order(rows, step)]


MILLISECOND_A_TOKEN = PromptCost(token_s=0.001)


def fast(id: str, remaining: int, waited_s: float = 0.0) -> PromptState:
    return replace(waiting(id, remaining, waited_s=waited_s), cost=MILLISECOND_A_TOKEN)


def test_a_prompt_lets_shorter_ones_pass_until_it_has_waited_for_a_multiple_of_the_difference() -> None:
    difference_s = 0.1
    patient, tired = fast("long", 120, 0.9 * difference_s / AGING), fast("long", 120, 1.1 * difference_s / AGING)
    assert in_turn([patient, fast("short", 20)]) == ["short", "long"]
    assert in_turn([tired, fast("short", 20)]) == ["long", "short"]


def test_a_prompt_that_can_no_longer_be_in_time_waits_for_longer_ones_that_can() -> None:
    late, soon = fast("late", 300, FIRST_TOKEN_S), fast("soon", 1500, 0.1)
    assert in_turn([late, soon]) == ["soon", "late"]
    assert in_turn([late, fast("too long", 2500)]) == ["late", "too long"]


def test_a_late_prompt_waits_only_for_those_that_take_less_than_a_multiple_of_its_time() -> None:
    # Waiting for two seconds counts as much as 250 of these tokens.
    late = fast("late", 100, FIRST_TOKEN_S)
    waits_for = 100 * LATE_FACTOR - round(AGING * FIRST_TOKEN_S / MILLISECOND_A_TOKEN.token_s)
    assert in_turn([late, fast("short", waits_for - 1), fast("long", waits_for + 1)]) == ["short", "late", "long"]


def test_one_step_in_eight_begins_with_the_oldest() -> None:
    late, soon = fast("late", 300, FIRST_TOKEN_S), fast("soon", 1500, 0.1)
    firsts = [in_turn([late, soon], step)[0] for step in range(2 * TURN_EVERY)]
    assert firsts == (["late"] + ["soon"] * (TURN_EVERY - 1)) * 2


def test_offline_prompts_are_never_late() -> None:
    rows = [replace(row, lane="batch") for row in (fast("long", 50, 2.5), fast("short", 20, 2.6))]
    assert in_turn(rows) == ["short", "long"]


def test_backlog_is_the_time_of_the_interactive_prompts_and_the_age_of_the_oldest() -> None:
    rows = [fast("a", 100, 0.5), fast("b", 300, 1.5), replace(fast("c", 900, 9.0), lane="batch")]
    found = Backlog.of(rows)
    assert (found.seconds, found.oldest_s) == (pytest.approx(0.4), 1.5)
    assert Backlog.of([replace(fast("joins", 0, 2.0), done=50)]) == Backlog(0.0, 2.0)
    assert Backlog.of([]) == Backlog(0.0, 0.0)


@dataclass
class Prompt:
    id: str
    remaining: int
    lane: Lane = "interactive"
    added_s: float = 0.0


class Steps:
    """Steps of a fixed length in which prompts are computed, at a token per millisecond, as others arrive."""

    def __init__(self, prompts: list[Prompt], seconds: float) -> None:
        self.prompts, self.seconds, self.now_s = prompts, seconds, 0.0
        self.finished: dict[str, float] = {}

    def run(self, steps: int, arriving: int) -> None:
        """Run steps; before each, as many short prompts arrive as fill it."""
        for step in range(1, steps + 1):
            self.prompts += [Prompt(f"{step}-{k}", 20, added_s=self.now_s) for k in range(arriving)]
            rows = [replace(fast(p.id, p.remaining, self.now_s - p.added_s), lane=p.lane) for p in self.prompts]
            chunks = {chunk.id: chunk for chunk in chunks_of(plan(rows, limits(self.seconds), step, UNBOUNDED))}
            self.now_s += self.seconds
            for prompt in self.prompts:
                if chunk := chunks.get(prompt.id):
                    prompt.remaining -= chunk.tokens
                    if chunk.joins:
                        self.finished[prompt.id] = self.now_s
            self.prompts = [prompt for prompt in self.prompts if prompt.id not in self.finished]


@pytest.mark.parametrize("length", [20, 150, 1000])
@pytest.mark.parametrize("arriving", [1, 5, 9])
def test_prompt_takes_eight_times_as_long_as_alone_at_most_however_many_arrive(length: int, arriving: int) -> None:
    steps = Steps([Prompt("long", length)], seconds=0.1)
    steps.run(TURN_EVERY * -(-length // 100), arriving)
    assert "long" in steps.finished


@pytest.mark.parametrize("length", [0, 1, MIN_CHUNK, 100])
def test_offline_prompt_finishes_even_if_decoding_leaves_no_time(length: int) -> None:
    steps = Steps([Prompt("file", length, "batch")], seconds=-0.1)
    steps.run(TURN_EVERY * (length // MIN_CHUNK + 3), arriving=0)
    assert "file" in steps.finished


PASS = PromptCost(forward_s=10.0, token_s=1.0)


Shown = list[list[tuple[str, int, bool]]]


def together(*rows: PromptState, seconds: float = 1000.0, cost: PromptCost = PASS) -> Shown:
    """Return (id, tokens, joins) of each chunk of each forward."""
    forwards = plan([replace(row, cost=cost) for row in rows], limits(seconds), 1, UNBOUNDED)
    return [[(chunk.id, chunk.tokens, chunk.joins) for chunk in forward.chunks] for forward in forwards]


def short(id: str, remaining: int) -> PromptState:
    return replace(waiting(id, remaining), pack=0)


def test_short_prompts_share_a_forward_and_those_that_finish_join() -> None:
    [forward] = together(short("a", 20), short("b", 20), short("c", 40))
    assert forward == [("a", 20, True), ("b", 20, True), ("c", 20, False)]


def test_prompt_shares_no_forward_that_would_leave_a_rest_hardly_worth_a_pass() -> None:
    assert together(short("a", 20), short("b", 21)) == [[("a", 20, True)], [("b", 21, True)]]


def padded(id: str, remaining: int) -> PromptState:
    return replace(short(id, remaining), padded=True)


def test_shorter_chunk_is_padded_if_that_takes_less_than_another_pass() -> None:
    assert together(padded("a", 41), padded("b", 50)) == [[("a", 41, True), ("b", 50, True)]]
    assert together(padded("a", 39), padded("b", 50)) == [[("a", 39, True)], [("b", 50, True)]]
    # The third would pad two.
    assert together(padded("a", 41), padded("b", 45), padded("c", 51))[0] == [("a", 41, True), ("b", 45, True)]
    assert together(padded("a", 41), padded("b", 45), padded("c", 48))[0][2] == ("c", 48, True)


def test_buffers_grow_once_for_rows_that_join_together() -> None:
    cost = replace(PASS, grown_s=1.0)
    rows = [replace(short(id, 20), join_copy_bytes=30) for id in "abc"]
    assert len(together(*rows, seconds=10.0 + 60 + 30, cost=cost)[0]) == 3
    assert len(together(*rows, seconds=10.0 + 60 + 29, cost=cost)[0]) == 2


def test_padding_counts_as_tokens() -> None:
    rows = padded("a", 41), padded("b", 45)
    assert len(together(*rows, seconds=100.0)) == 1
    assert together(*rows, seconds=99.0)[0] == [("a", 41, True)]
    forwards = plan([replace(row, cost=PASS) for row in rows], limits(1000), 1, longest=89)
    assert [len(forward.chunks) for forward in forwards] == [1, 1]


def test_long_prompt_shares_no_forward_with_a_short_one() -> None:
    longest = SHORT_CHUNKS * 20
    assert together(short("a", 20), short("b", longest))[0] == [("a", 20, True), ("b", 20, False)]
    assert together(short("a", 20), short("b", longest + 1)) == [[("a", 20, True)], [("b", longest + 1, True)]]


def test_prompts_share_a_forward_as_far_as_the_time_allows() -> None:
    rows = [short(id, 20) for id in "abc"]
    assert together(*rows, seconds=50.0) == [[("a", 20, True), ("b", 20, True)]]
    assert together(*rows, seconds=50.0, cost=replace(PASS, join_s=1.0)) == [[("a", 20, True)]]


def test_a_forward_that_prompts_share_may_take_longer_but_no_other() -> None:
    def forwards(*rows: PromptState) -> list[list[str]]:
        costly = [replace(row, cost=PASS) for row in rows]
        planned = plan(costly, limits(50.0, shared_s=90.0, enough_s=0.0), 1, UNBOUNDED)
        return [[chunk.id for chunk in forward.chunks] for forward in planned]

    rows = [short(id, 20) for id in "abcdef"]
    assert forwards(*rows) == [["a", "b", "c", "d"]]
    assert forwards(*(replace(row, lane="batch") for row in rows)) == [["a", "b"]]
    [[alone]] = [
        forward.chunks for forward in plan([replace(short("a", 80), cost=PASS)], limits(50.0, shared_s=90.0), 1, 99)
    ]
    assert alone.tokens == 40


def test_prompts_share_a_forward_as_far_as_its_memory_allows() -> None:
    """Each prompt counts with as many copied tokens as the longest of them holds."""
    rows = [replace(waiting(id, 20, done=done), cost=PASS, pack=0) for id, done in (("a", 0), ("b", 40), ("c", 10))]

    def shared(longest: int) -> list[int]:
        forwards = plan(
            rows, limits(1000), 1, longest, packed_tokens=lambda prompts, tokens, done: prompts * (tokens + done)
        )
        return sorted(len(forward.chunks) for forward in forwards)

    assert shared(3 * (20 + 40)) == [3]
    assert shared(3 * (20 + 40) - 1) == [1, 2]
    assert shared(2 * (20 + 10)) == [1, 2]  # the one that holds the most is left out
    assert shared(2 * (20 + 10) - 1) == [1, 1, 1]


def test_prompts_of_different_packs_and_lanes_share_no_forward() -> None:
    other = short("b", 20)
    for apart in replace(other, pack=1), replace(other, pack=None), replace(other, lane="batch"):
        assert together(short("a", 20), apart) == [[("a", 20, True)], [("b", 20, True)]]


def test_chunk_ends_at_a_cut_if_it_is_shared() -> None:
    cut = replace(short("a", 36), cuts=(20,))
    assert together(cut) == [[("a", 36, True)]]
    assert together(cut, short("b", 36)) == [[("a", 20, False), ("b", 20, False)]]


def test_no_further_forward_begins_once_prompts_have_taken_enough_time() -> None:
    rows = [waiting(id, 20) for id in "abcd"]
    planned = [plan(rows, limits(1000, enough_s=enough), 1, UNBOUNDED) for enough in (0, 20, 21, 1000)]
    assert [len(forwards) for forwards in planned] == [1, 1, 2, 4]


SCORED: list[tuple[str, int, Lane]] = [
    ("offline", 10, "batch"),
    ("long", 90, "interactive"),
    ("short", 50, "interactive"),
]


@pytest.mark.parametrize("phase", ["encoding", "scoring"])
def test_one_prompt_at_a_time_advances_in_an_exclusive_phase(phase: Phase) -> None:
    text = waiting("text", 500)
    offline, long, short = (
        replace(waiting(id, remaining, lane=lane), phase=phase, exclusive=True) for id, remaining, lane in SCORED
    )
    started = replace(offline, id="started", started=True)
    assert may_advance([offline, text, long, short]) == [text, short]
    assert may_advance([offline, text, long, started]) == [text, started]
    assert may_advance([offline, text]) == [offline, text]


def test_an_image_and_a_score_may_be_computed_in_one_step() -> None:
    rows = [replace(waiting(phase, 9), phase=phase, exclusive=phase != "prefill") for phase in get_args(Phase)]
    assert may_advance(rows) == rows


def test_each_prompt_costs_what_its_own_model_takes() -> None:
    draft = replace(waiting("scored", 500), cost=PromptCost(token_s=0.1))
    assert chunks_of(plan([waiting("a", 40), draft], limits(80), 1, UNBOUNDED)) == [
        PromptChunk("a", 40, joins=True),
        PromptChunk("scored", 400),
    ]


def test_prompt_with_the_least_time_is_first_not_the_one_with_the_fewest_tokens() -> None:
    draft = replace(waiting("scored", 500), cost=PromptCost(token_s=0.1))
    assert chunks_of(plan([waiting("a", 60), draft], limits(100), 1, UNBOUNDED)) == [
        PromptChunk("scored", 500, joins=True),
        PromptChunk("a", 50),
    ]
