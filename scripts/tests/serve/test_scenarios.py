"""Cases of the scenarios, their loads, and the search for the highest rate."""

from random import Random

import pytest

from scripts.benchmarks.serve import trace
from scripts.benchmarks.serve.bare import Bare
from scripts.benchmarks.serve.figures import Answer
from scripts.benchmarks.serve.scenarios import SCENARIOS, Options, best_load, cases, next_load, turn_s
from scripts.benchmarks.serve.workload import Mix

BARE = Bare({1: 0.01, 32: 0.04}, {(1, 16): 0.025, (1, 64): 0.1, (8, 16): 0.128}, 10.0, 1.0)
TRACE = tuple(trace.parse(['{"at": 0, "prompt": "hi", "max_tokens": 2}', '{"at": 4, "prompt": "ho", "max_tokens": 3}']))


def answered(prompt: int, tokens: int, cached: int = 0) -> Answer:
    return Answer(0.0, 0.0, (1.0,), tokens, tokens, prompt, cached)


# The bare forwards


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 0.01), (16, 0.025), (40, 0.0625), (128, 0.2)])
def test_a_prompt_alone_costs_what_lies_between_the_measured_lengths(tokens: int, seconds: float) -> None:
    assert BARE.alone_s(tokens) == pytest.approx(seconds)


def test_packed_prompts_and_full_steps_are_the_bare_work() -> None:
    assert BARE.work_s(prompt_tokens=100, tokens=32, rows=32) == pytest.approx(100 * 0.001 + 0.04)


def test_an_answers_first_token_comes_with_its_prompt_and_cached_tokens_cost_nothing() -> None:
    answers = [answered(110, 17, cached=10), answered(100, 17)]
    assert BARE.answers_s(answers, 32) == pytest.approx(200 * 0.001 + 0.04)


def test_single_chats_are_compared_with_prompts_that_are_not_packed() -> None:
    assert BARE.answers_s([answered(16, 3), answered(16, 3)], 1) == pytest.approx(2 * (0.025 + 2 * 0.01))


# Cases


@pytest.mark.parametrize("scenario", sorted(SCENARIOS.keys() - {"highest"}))
def test_every_scenario_has_cases_with_names_of_their_own(scenario: str) -> None:
    found = cases(scenario, Options(trace=TRACE), BARE)
    assert found
    assert len({case.name for case in found}) == len(found)
    assert all(case.chats(Random(0)) for case in found)


def test_load_1_is_the_rate_at_which_bare_forwards_take_all_the_time() -> None:
    options = Options(loads=(1.0,), seconds=400)
    [case] = cases("open", options, BARE)
    turns = [chat.turns[0] for chat in case.chats(Random(0))]
    work_s = BARE.answers_s([answered(10 + len(turn.text.split()), turn.max_tokens) for turn in turns], 32)
    assert work_s == pytest.approx(400, rel=0.03)


def test_rates_replace_loads() -> None:
    [case] = cases("open", Options(rates=(2.0,)), BARE)
    assert case.rate == pytest.approx(2.0)
    assert case.load == pytest.approx(2 * turn_s(Mix(), BARE))


def test_a_trace_has_a_load_of_its_own() -> None:
    [case] = cases("trace", Options(trace=TRACE), BARE)
    assert case.rate == 0.5
    assert case.load == pytest.approx((22 * 0.001 + 3 * 0.04 / 32) / 4)


# The search


def search(capacity: float) -> dict[float, float]:
    tried = dict[float, float]()
    while load := next_load(tried):
        tried[load] = 0.95 if load <= capacity else 0.5
    return tried


@pytest.mark.parametrize("capacity", [0.07, 0.3, 0.5, 0.77, 2.0, 6.0])
def test_the_search_ends_within_a_tenth_below_what_a_server_can_do(capacity: float) -> None:
    tried = search(capacity)
    best = best_load(tried)
    assert best is not None
    assert capacity / 1.1 <= best <= capacity
    assert len(tried) <= 10


def test_a_server_that_is_never_good_has_no_highest_load() -> None:
    assert best_load(search(0.0)) is None


def test_a_load_above_the_first_bad_one_does_not_count() -> None:
    assert best_load({0.5: 0.95, 1.0: 0.6, 2.0: 0.92}) == 0.5
