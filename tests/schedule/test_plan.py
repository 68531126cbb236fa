from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.budget import MIN_CHUNK, MIN_TOKENS_TIME_PER_PASS, PromptCost
from worker.schedule.outcomes import Phase
from worker.schedule.plan import OLDEST_FIRST_EVERY, Chunk, Forward, PromptState, may_advance, plan
from worker.schedule.request import Lane

SECOND_A_TOKEN = PromptCost(token_s=1.0)
UNBOUNDED = 10**9


def waiting(id: str, remaining: int, *, done: int = 0, waited: int = 0, lane: Lane = "interactive") -> PromptState:
    return PromptState(id, done, remaining, waited, lane, SECOND_A_TOKEN)


def planned(
    rows: Iterable[PromptState], seconds: float, cost: PromptCost = SECOND_A_TOKEN, step: int = 1
) -> list[Chunk]:
    return chunks_of(plan([replace(row, cost=cost) for row in rows], spare(seconds), step, UNBOUNDED))


def chunks_of(forwards: Iterable[Forward]) -> list[Chunk]:
    return [chunk for forward in forwards for chunk in forward.chunks]


def spare(interactive_s: float, batch_s: float | None = None) -> dict[Lane, float]:
    """Return the time by lane, by default the same for both."""
    return {"interactive": interactive_s, "batch": interactive_s if batch_s is None else batch_s}


def order(*rows: PromptState) -> list[str]:
    return [chunk.id for chunk in planned(rows, seconds=10**9)]


def seconds_of(chunks: list[Chunk], rows: list[PromptState], cost: PromptCost) -> float:
    waiting = {row.id: row for row in rows}
    taken = 0.0
    for chunk in chunks:
        row = waiting[chunk.id]
        end = row.done + chunk.tokens
        computed = chunk.tokens if row.done else max(chunk.tokens, 1)
        passes_more = sum(row.done < cut < end for cut in row.cuts)
        taken += (cost.of(computed, row.done) if computed else 0) + passes_more * cost.forward_s
        taken += cost.join(end) if chunk.joins else 0
    return taken


ROWS = st.lists(
    st.builds(
        PromptState,
        st.uuids().map(str),
        st.integers(0, 3000),
        st.integers(0, 2000),
        st.integers(0, 200),
        st.sampled_from(["interactive", "batch"]),
        st.just(SECOND_A_TOKEN),
        st.lists(st.integers(1, 5000), max_size=3).map(sorted),
    ),
    max_size=12,
)
BUDGETS = st.floats(0, 4000)
STEPS = st.integers(0, 8)
COSTS = st.builds(
    PromptCost, st.floats(0, 100), st.floats(0.1, 2), st.floats(0, 0.01), st.floats(0, 10), st.floats(0, 0.1)
)


@given(ROWS, BUDGETS, COSTS, STEPS)
def test_plan_keeps_the_time_except_for_the_first_prompts_minimum(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    chunks = planned(rows, seconds, cost, step)
    if seconds_of(chunks, rows, cost) > seconds * 1.000001:
        assert len(chunks) == 1
        assert chunks[0].tokens <= MIN_CHUNK
        assert not (chunks[0].tokens and chunks[0].joins)


@given(ROWS, BUDGETS, COSTS, STEPS)
def test_remaining_time_is_not_worth_a_pass_for_the_next_prompt(
    rows: list[PromptState], seconds: float, cost: PromptCost, step: int
) -> None:
    chunks = planned(rows, seconds, cost, step)
    left = seconds - seconds_of(chunks, rows, cost)
    for chunk in planned(rows, UNBOUNDED, cost, step)[len(chunks) :][:1]:
        (row,) = (row for row in rows if row.id == chunk.id)
        least = min(max(row.remaining, 1), cost.worthwhile)
        cuts = sum(row.done < cut < row.done + least for cut in row.cuts)
        assert left < cost.of(least, row.done) + cuts * cost.forward_s + cost.join(row.done + row.remaining)


@given(ROWS, BUDGETS, BUDGETS, COSTS, STEPS)
def test_offline_prompts_take_no_interactive_time(
    rows: list[PromptState], more: float, target: float, cost: PromptCost, step: int
) -> None:
    rows = [replace(row, cost=cost) for row in rows]
    chunks = chunks_of(plan(rows, spare(target + more, target), step, UNBOUNDED))
    lanes = {row.id: row.lane for row in rows}
    interactive = [row for row in rows if row.lane == "interactive"]
    assert [chunk for chunk in chunks if lanes[chunk.id] == "interactive"] == chunks_of(
        plan(interactive, spare(target + more), step, UNBOUNDED)
    )
    if any(lanes[chunk.id] == "batch" for chunk in chunks[1:]):
        assert seconds_of(chunks, rows, cost) <= target * 1.000001


@given(ROWS, BUDGETS, COSTS, STEPS)
def test_the_first_prompt_always_advances(rows: list[PromptState], seconds: float, cost: PromptCost, step: int) -> None:
    chunks = planned(rows, -1 - seconds, cost, step)  # below zero, since a join without cost fits into no time
    assert len(chunks) == min(1, len(rows))
    for chunk in chunks:
        assert chunk.tokens or chunk.joins


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
    rows = [replace(row, cuts=()) for row in rows]  # a chunk may also end at one
    needs = {row.id: row.remaining for row in rows}
    computed = [chunk for chunk in planned(rows, seconds, step=step) if chunk.tokens]
    assert [chunk for chunk in computed[:-1] if chunk.tokens < needs[chunk.id]] == []


@given(ROWS, BUDGETS, st.randoms())
def test_the_plan_depends_on_the_rows_and_not_on_their_order(
    rows: list[PromptState], seconds: float, dice: object
) -> None:
    distinct = [replace(row, remaining=1000 * i + row.remaining % 1000, waited=0) for i, row in enumerate(rows)]
    shuffled = sorted(distinct, key=lambda _: dice.random())  # type: ignore[attr-defined]
    assert planned(shuffled, seconds) == planned(distinct, seconds)


def test_chunk_has_at_most_the_longest_number_of_tokens() -> None:
    rows = [waiting("a", 900), waiting("b", 900)]
    assert chunks_of(plan(rows, spare(1000), 1, longest=300)) == [Chunk("a", 300), Chunk("b", 300)]


def test_every_chunk_costs_a_pass_over_the_weights() -> None:
    rows = [waiting(str(i), 20) for i in range(6)]
    assert len(planned(rows, 100, PromptCost(token_s=1.0))) == 5
    assert len(planned(rows, 100, PromptCost(forward_s=10.0, token_s=1.0))) == 3


def test_a_chunk_deep_in_a_prompt_is_shorter() -> None:
    cost = PromptCost(token_s=1.0, before_s=0.01)
    chunks = [planned([waiting("a", 5000, done=done)], 200, cost)[0].tokens for done in (0, 1000, 4000)]
    assert chunks == [123, 18, 16]


def test_remaining_time_is_not_spent_on_a_chunk_of_a_few_tokens() -> None:
    rows = [waiting("short", 50), waiting("long", 900)]
    assert planned(rows, 50 + MIN_CHUNK - 1) == [Chunk("short", 50, joins=True)]
    assert planned(rows, 50 + MIN_CHUNK) == [
        Chunk("short", 50, joins=True),
        Chunk("long", MIN_CHUNK),
    ]


def test_only_the_first_chunk_may_be_not_worth_its_pass() -> None:
    rows = [waiting("short", 50), waiting("long", 900)]
    cost = PromptCost(forward_s=40.0, token_s=1.0)
    first_s, worth = 90, round(MIN_TOKENS_TIME_PER_PASS * 40)
    assert len(planned(rows, first_s + 40 + worth - 1, cost)) == 1
    assert planned(rows, first_s + 40 + worth, cost)[1:] == [Chunk("long", worth)]


def test_rest_of_a_prompt_is_worth_a_pass_however_short() -> None:
    rows = [waiting("first", 20), waiting("second", 20, done=900)]
    assert len(planned(rows, 120, PromptCost(forward_s=40.0, token_s=1.0))) == 2


def test_row_joins_in_a_step_that_has_time_for_it() -> None:
    cost = PromptCost(token_s=1.0, joined_s=0.1)
    assert planned([waiting("a", 100, done=900)], 200, cost) == [Chunk("a", 100, joins=True)]
    assert planned([waiting("a", 100, done=900)], 199, cost) == [Chunk("a", 100)]
    assert planned([waiting("a", 0, done=1000)], 100, cost) == [Chunk("a", 0, joins=True)]
    assert planned([waiting("a", 0, done=1000)], 50, cost) == [Chunk("a", 0, joins=True)]  # it will not get cheaper
    rows = [waiting("b", 0, done=900), waiting("a", 0, done=1000)]
    assert planned(rows, 190, cost) == [Chunk("b", 0, joins=True), Chunk("a", 0, joins=True)]
    assert planned(rows, 189, cost) == [Chunk("b", 0, joins=True)]


def test_a_row_that_makes_buffers_grow_joins_in_a_step_that_has_time_for_it() -> None:
    cost = PromptCost(token_s=1.0, grown_s=0.1)
    row = replace(waiting("a", 100), growth=500)
    assert planned([row], 150, cost) == [Chunk("a", 100, joins=True)]
    assert planned([row], 149, cost) == [Chunk("a", 100)]


def test_a_cut_costs_a_pass_over_the_weights() -> None:
    cost = PromptCost(forward_s=10.0, token_s=1.0)
    row = replace(waiting("a", 100), cuts=(96,))
    assert planned([row], 120, cost) == [Chunk("a", 100, joins=True)]
    assert planned([row], 119, cost) == [Chunk("a", 99)]
    assert planned([row], 106, cost) == [Chunk("a", 96)]  # rather than a pass for a token or two
    assert planned([replace(row, cuts=(10,))], 60, cost) == [Chunk("a", 40)]


def test_a_prompt_of_one_token_costs_one() -> None:
    assert len(planned([waiting(str(i), 0) for i in range(100)], 30)) == 30


def test_the_prompt_that_is_done_soonest_is_first() -> None:
    assert order(waiting("long", 900), waiting("short", 10), waiting("middle", 90)) == ["short", "middle", "long"]


def test_prompts_of_one_length_keep_their_order() -> None:
    assert order(waiting("a", 50), waiting("b", 50), waiting("c", 50)) == ["a", "b", "c"]


def test_offline_work_comes_after_interactive_work_however_short_or_old() -> None:
    assert order(waiting("file", 1, waited=10**6, lane="batch"), waiting("chat", 30_000)) == ["chat", "file"]


def test_time_left_by_a_short_prompt_goes_to_the_next() -> None:
    rows = [waiting("long", 900), waiting("short", 10)]
    assert planned(rows, 64) == [Chunk("short", 10, joins=True), Chunk("long", 54)]


def test_one_step_in_four_begins_with_the_prompt_that_has_waited_longest() -> None:
    rows = [waiting("book", 5000, waited=9), waiting("hello", 5, waited=2), waiting("file", 9, waited=99, lane="batch")]
    firsts = [planned(rows, 100, step=step)[0].id for step in range(2 * OLDEST_FIRST_EVERY)]
    assert firsts == (["book"] + ["hello"] * (OLDEST_FIRST_EVERY - 1)) * 2


@dataclass
class Prompt:
    id: str
    remaining: int
    lane: Lane
    waited: int = 0


def steps_to_prefill(length: int, *, budget: int, short: int, max_steps: int) -> int | None:
    """Return the steps that a long prompt takes under an endless stream of short ones, or None if more than `most`."""
    prompts = [Prompt("long", length, "interactive")]
    for step in range(1, max_steps + 1):
        prompts += [Prompt(f"{step}-{k}", short, "interactive") for k in range(budget // short)]
        rows = [waiting(p.id, p.remaining, waited=p.waited, lane=p.lane) for p in prompts]
        chunks = {chunk.id: chunk.tokens for chunk in planned(rows, budget, step=step)}
        for prompt in prompts:
            prompt.waited += 1
            prompt.remaining -= chunks.get(prompt.id, 0)
        prompts = [prompt for prompt in prompts if prompt.remaining]
        if not any(prompt.id == "long" for prompt in prompts):
            return step
    return None


def test_long_prompt_takes_four_times_as_long_under_an_endless_stream_of_short_ones() -> None:
    length, budget = 32_000, 200
    alone = length // budget
    assert steps_to_prefill(length, budget=budget, short=100, max_steps=5 * alone) == OLDEST_FIRST_EVERY * alone


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    chunks = planned([waiting("book", 100_000, waited=100), waiting("hello", 20)], 64)
    assert chunks[0] == Chunk("hello", 20, joins=True)


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
    assert chunks_of(plan([waiting("a", 40), draft], spare(80), 1, UNBOUNDED)) == [
        Chunk("a", 40, joins=True),
        Chunk("scored", 400),
    ]


def test_prompt_with_the_least_time_is_first_not_the_one_with_the_fewest_tokens() -> None:
    draft = replace(waiting("scored", 500), cost=PromptCost(token_s=0.1))
    assert chunks_of(plan([waiting("a", 60), draft], spare(100), 1, UNBOUNDED)) == [
        Chunk("scored", 500, joins=True),
        Chunk("a", 50),
    ]
