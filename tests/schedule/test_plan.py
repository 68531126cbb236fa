from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.plan import OLDEST_FIRST_EVERY, Chunk, Waiting, plan
from worker.schedule.sequence import Lane


def waiting(id: str, remaining: int, *, waited: int = 0, lane: Lane = "interactive") -> Waiting:
    return Waiting(id, remaining, waited, lane)


def order(*rows: Waiting) -> list[str]:
    return [chunk.id for chunk in plan(rows, budget=10**9, step=1)]


ROWS = st.lists(
    st.builds(
        Waiting,
        st.uuids().map(str),
        st.integers(0, 3000),
        st.integers(0, 200),
        st.sampled_from(["interactive", "batch"]),
    ),
    max_size=12,
)
BUDGETS = st.integers(0, 4000)
STEPS = st.integers(0, 8)


@given(ROWS, BUDGETS, STEPS)
def test_the_budget_is_kept_and_a_row_without_tokens_costs_one(rows: list[Waiting], budget: int, step: int) -> None:
    assert sum(max(chunk.tokens, 1) for chunk in plan(rows, budget, step)) <= budget


@given(ROWS, BUDGETS, STEPS)
def test_no_budget_is_left_while_a_prompt_waits(rows: list[Waiting], budget: int, step: int) -> None:
    chunks = {chunk.id: chunk.tokens for chunk in plan(rows, budget, step)}
    left = budget - sum(max(tokens, 1) for tokens in chunks.values())
    unserved = [row for row in rows if chunks.get(row.id) != row.remaining]
    assert left == 0 or unserved == []


@given(ROWS, BUDGETS, STEPS)
def test_a_row_has_one_chunk_at_most_and_never_more_than_it_needs(rows: list[Waiting], budget: int, step: int) -> None:
    chunks, needs = plan(rows, budget, step), {row.id: row.remaining for row in rows}
    assert len({chunk.id for chunk in chunks}) == len(chunks)
    assert [chunk for chunk in chunks if not 0 <= chunk.tokens <= needs[chunk.id]] == []


@given(ROWS, BUDGETS, STEPS)
def test_only_the_last_chunk_is_cut_short(rows: list[Waiting], budget: int, step: int) -> None:
    needs = {row.id: row.remaining for row in rows}
    assert [chunk for chunk in plan(rows, budget, step)[:-1] if chunk.tokens < needs[chunk.id]] == []


@given(ROWS, BUDGETS, st.randoms())
def test_the_plan_depends_on_the_rows_and_not_on_their_order(rows: list[Waiting], budget: int, dice: object) -> None:
    distinct = [replace(row, remaining=1000 * i + row.remaining % 1000, waited=0) for i, row in enumerate(rows)]
    shuffled = sorted(distinct, key=lambda _: dice.random())  # type: ignore[attr-defined]
    assert plan(shuffled, budget, 1) == plan(distinct, budget, 1)


def test_the_prompt_that_is_done_soonest_is_first() -> None:
    assert order(waiting("long", 900), waiting("short", 10), waiting("middle", 90)) == ["short", "middle", "long"]


def test_prompts_of_one_length_keep_their_order() -> None:
    assert order(waiting("a", 50), waiting("b", 50), waiting("c", 50)) == ["a", "b", "c"]


def test_offline_work_comes_after_interactive_work_however_short_or_old() -> None:
    assert order(waiting("file", 1, waited=10**6, lane="batch"), waiting("chat", 30_000)) == ["chat", "file"]


def test_what_a_short_prompt_leaves_goes_to_the_next() -> None:
    assert plan([waiting("long", 900), waiting("short", 10)], budget=64, step=1) == [
        Chunk("short", 10),
        Chunk("long", 54),
    ]


def test_one_step_in_four_begins_with_the_prompt_that_has_waited_longest() -> None:
    rows = [waiting("book", 5000, waited=9), waiting("hello", 5, waited=2), waiting("file", 9, waited=99, lane="batch")]
    firsts = [plan(rows, 100, step)[0].id for step in range(2 * OLDEST_FIRST_EVERY)]
    assert firsts == (["book"] + ["hello"] * (OLDEST_FIRST_EVERY - 1)) * 2


@dataclass
class Prompt:
    id: str
    remaining: int
    lane: Lane
    waited: int = 0


def steps_to_prefill(length: int, *, budget: int, short: int, most: int) -> int | None:
    """For one long prompt, while short ones that spend the whole budget come without end."""
    prompts = [Prompt("long", length, "interactive")]
    for step in range(1, most + 1):
        prompts += [Prompt(f"{step}-{k}", short, "interactive") for k in range(budget // short)]
        chunks = {
            c.id: c.tokens for c in plan([Waiting(p.id, p.remaining, p.waited, p.lane) for p in prompts], budget, step)
        }
        for prompt in prompts:
            prompt.waited += 1
            prompt.remaining -= chunks.get(prompt.id, 0)
        prompts = [prompt for prompt in prompts if prompt.remaining]
        if not any(prompt.id == "long" for prompt in prompts):
            return step
    return None


def test_an_endless_stream_of_short_prompts_makes_a_long_one_four_times_as_long() -> None:
    length, budget = 32_000, 200
    alone = length // budget
    assert steps_to_prefill(length, budget=budget, short=100, most=5 * alone) == OLDEST_FIRST_EVERY * alone


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    chunks = plan([waiting("book", 100_000, waited=100), waiting("hello", 20)], budget=64, step=1)
    assert chunks[0] == Chunk("hello", 20)
