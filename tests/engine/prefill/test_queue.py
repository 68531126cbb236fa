"""The prompts that advance while rows decode, and when they join: with given costs instead of a clock."""

from dataclasses import replace
from itertools import cycle

import pytest

from sluice.contract.keys import Lane
from tests.engine.step.running import DECODE_S, Running
from tests.engine.tiny import model, prompt
from worker.engine.batch.row import Row
from worker.engine.options import EngineOptions
from worker.engine.prefill.caches import EngineCaches
from worker.engine.prefill.queue import PrefillQueue
from worker.engine.step.cost import CostEstimate, PromptChunk
from worker.engine.step.planner import StepBudget, longest_gap_s
from worker.engine.step.tuning import FIRST_STEP_WITHIN_S
from worker.request import GenerationRequest

STEP_S, TOKENS_PER_S = 0.1, 2000
ROOM = 10**9


def prefills(family: str = "qwen3", prefix_bytes: int = 0) -> PrefillQueue:
    """Return prefills of a model that computes two tokens a millisecond; a join takes no time."""
    opened = model(family)
    return PrefillQueue(opened, EngineOptions(STEP_S), EngineCaches(opened, prefix_bytes))


def begin(
    made: PrefillQueue, id: str, tokens: int, lane: Lane = "interactive", boundaries: tuple[int, ...] = ()
) -> None:
    made.add(Row.of(GenerationRequest(id, prompt(tokens + 1, 0), 1, lane=lane, boundaries=boundaries)))


def planned(made: PrefillQueue, running: Running | None = None, *, forward_s: float = 0.0) -> list[PromptChunk]:
    made.begin_step(forward_s)
    return [chunk for forward in made.plan(running or Running(), 0.0, ROOM) for chunk in forward.chunks]


# Planned for prompts within the longest gap, before their costs are measured.
MOST_S = longest_gap_s(STEP_S, DECODE_S) / StepBudget(STEP_S, CostEstimate()).overrun - DECODE_S


def test_interactive_backlog_gets_the_longest_gap_and_an_offline_one_the_rest_of_the_target() -> None:
    interactive, offline = prefills(), prefills()
    begin(interactive, "a", 5000)
    begin(offline, "a", 5000, "batch")
    [chunk], [least] = planned(interactive), planned(offline)
    assert chunk.tokens == pytest.approx(MOST_S * TOKENS_PER_S, rel=0.02)
    assert least.tokens == pytest.approx((STEP_S - DECODE_S) * TOKENS_PER_S, rel=0.1)


def test_interactive_prompts_get_the_longest_gap_if_only_offline_rows_decode() -> None:
    made = prefills()
    begin(made, "a", 60)
    assert planned(made, Running(num_interactive=0)) == [PromptChunk("a", 60, joins=True)]


def test_small_backlog_gets_the_rest_of_the_target() -> None:
    made = prefills()
    begin(made, "a", 60)
    assert planned(made) == [PromptChunk("a", 20)]


def test_offline_prompt_gets_no_time_left_of_the_interactive_share() -> None:
    made = prefills()
    begin(made, "offline", 5000, "batch")
    begin(made, "interactive", 100)
    assert [chunk.id for chunk in planned(made)] == ["interactive"]


def test_delayed_join_happens_in_the_next_step_without_computing() -> None:
    made = prefills()
    begin(made, "a", 15)
    for _ in range(50):
        made.observe_join(15, 10**8, 10.0)
    [chunk] = planned(made, Running(copied=10**8))
    assert chunk == PromptChunk("a", 15)
    assert made.advance(chunk).tokens == 15
    [join] = planned(made, Running(copied=10**8))
    assert join == PromptChunk("a", 0, joins=True)
    assert made.advance(join).tokens == 0
    through = made.pop_computed("a")
    assert through is not None
    assert through.stage.done == through.stage.total == 15
    assert len(made) == 0


def test_row_that_makes_the_decode_step_too_long_joins_in_the_next() -> None:
    made = prefills()
    begin(made, "a", 15)
    begin(made, "a backlog", 5000)
    assert planned(made, Running(added_s=MOST_S))[0] == PromptChunk("a", 15)
    assert planned(made, Running(added_s=MOST_S / 2))[0] == PromptChunk("a", 15, joins=True)


def test_a_computed_row_joins_before_any_other_prompt() -> None:
    made = prefills()
    begin(made, "a", 15)
    made.observe_join(15, 0, MOST_S)
    [chunk] = planned(made)
    assert chunk == PromptChunk("a", 15)
    made.advance(chunk)
    begin(made, "short", 2)
    assert planned(made)[0] == PromptChunk("a", 0, joins=True)


def test_buffers_that_the_decode_step_copies_leave_less_time() -> None:
    made = prefills()
    begin(made, "a", 5000)
    for _ in range(50):
        made.observe_join(15, 10**8, 0.05)
    [usual], [less] = planned(made), planned(made, Running(step_copy_bytes=4 * 10**7))
    assert usual.tokens - less.tokens == pytest.approx(0.02 * TOKENS_PER_S, rel=0.1)


def test_rows_that_were_never_measured_decode_no_faster_than_a_chunk_of_as_many_tokens() -> None:
    made = prefills()
    begin(made, "a", 5000)
    rows = int(1.5 * DECODE_S * TOKENS_PER_S)
    many = Running(rows=rows, num_interactive=rows, most_measured=rows)
    [known], [unknown] = planned(made, many), planned(made, replace(many, most_measured=1))
    [alike] = planned(made, replace(many, step_s=1.5 * DECODE_S))
    assert unknown.tokens == pytest.approx(alike.tokens, rel=0.05)
    assert unknown.tokens < known.tokens


def test_a_first_step_of_rows_that_were_never_measured_waits_as_for_slow_ones() -> None:
    made = prefills()
    for number in range(25):
        begin(made, str(number), 60)
    made.begin_step(0.02)
    rows = Running(rows=20, step_s=0.02, most_measured=20)
    assert not made.delays_first_step(rows, FIRST_STEP_WITHIN_S)
    for _ in range(50):
        made._costs["prefill"].observe_chunk(100, 0, 1.0)
    assert not made.delays_first_step(rows, FIRST_STEP_WITHIN_S)
    assert made.delays_first_step(replace(rows, most_measured=1), FIRST_STEP_WITHIN_S)


def test_cut_counts_as_a_pass_if_snapshots_are_taken() -> None:
    made = prefills("qwen3_5", prefix_bytes=10**9)
    fits = int((MOST_S - 0.05) * TOKENS_PER_S) - 10  # in a single pass, and not in two
    begin(made, "a backlog", 5000)
    begin(made, "a", fits, boundaries=(fits - 40,))
    assert planned(made, forward_s=0.05) == [PromptChunk("a", fits - 40)]
    made.remove("a")
    begin(made, "b", fits)
    assert planned(made, forward_s=0.05) == [PromptChunk("b", fits, joins=True)]


def test_planning_changes_nothing() -> None:
    made, running = prefills("qwen3", prefix_bytes=10**9), Running()
    begin(made, "a", 5000)
    begin(made, "b", 400, "batch")
    made.begin_step(0.0)
    first = made.plan(running, 0.0, ROOM)
    assert [made.plan(running, 0.0, ROOM) for _ in range(5)] == [first] * 5


def test_first_step_waits_for_an_interactive_prompt_that_is_soon_computed() -> None:
    made, running = prefills(), Running(step_s=0.0)
    assert not made.delays_first_step(running, 0.0)
    begin(made, "file", 60, "batch")
    begin(made, "long", int(2 * FIRST_STEP_WITHIN_S * TOKENS_PER_S))
    assert not made.delays_first_step(running, 0.0)
    begin(made, "short", 60)
    assert made.delays_first_step(running, 0.0)
    assert made.delays_first_step(running, FIRST_STEP_WITHIN_S - 0.1)
    assert not made.delays_first_step(running, FIRST_STEP_WITHIN_S)


def test_first_step_of_a_few_slow_rows_waits_for_many_prompts() -> None:
    made = prefills()
    for number in range(10):
        begin(made, str(number), 60)
    assert made.delays_first_step(Running(rows=3, step_s=0.1), FIRST_STEP_WITHIN_S)
    assert not made.delays_first_step(Running(rows=30, step_s=0.1), FIRST_STEP_WITHIN_S)
    assert not made.delays_first_step(Running(rows=3, step_s=0.001), FIRST_STEP_WITHIN_S)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3"])
def test_what_is_planned_together_is_computed_together(family: str) -> None:
    """The plan counts what a shared forward copies of prompts that hold tokens as the forward itself does."""
    made, shared = prefills(family), list[int]()
    for number in range(16):
        made.add(Row.of(GenerationRequest(str(number), prompt(60, number), 1)))
        made.advance(PromptChunk(str(number), 20))
    for longest in cycle([150, 300, 1000]):
        made.begin_step(0.02)
        for forward in made.plan(Running(rows=0, started=False), 0.0, longest):
            if len(forward.chunks) > 1:
                assert 0 < made.compute_together(forward, longest) <= longest
                shared.append(len(forward.chunks))
            for chunk in forward.chunks:
                made.advance(chunk)
                made.pop_computed(chunk.id)
        if not len(made):
            break
    assert shared
