"""Percentiles, goodput and the other figures of a run."""

import json
import math
from dataclasses import astuple, replace

import pytest

from scripts.benchmarks.serve.figures import Answer, Figures, percentile


def answer(*arrivals: float, due_s: float = 0.0, tokens: int = 0, **more: object) -> Answer:
    return replace(Answer(due_s, 0.0, arrivals, 96, tokens or len(arrivals)), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.25, 1.75), (0.5, 2.5), (0.95, 3.85), (1.0, 4.0)])
def test_percentiles_are_interpolated(share: float, value: float) -> None:
    assert percentile([4, 2, 1, 3], share) == pytest.approx(value)


@pytest.mark.parametrize(
    ("given", "good"),
    [
        (answer(2.0, 2.3), True),
        (answer(2.01, 2.3), False),
        (answer(0.1, 0.41), False),
        (answer(1.0), True),
        (answer(), False),
        (answer(0.1, 0.2, error="broke off"), False),
    ],
)
def test_an_answer_is_good_by_its_first_token_and_its_longest_gap(given: Answer, good: bool) -> None:
    assert given.good == good


def test_a_run_is_judged_by_all_its_answers() -> None:
    answers = [answer(1.0, 1.25, 1.5), answer(2.0, 5.0), answer(3.0, due_s=1.0)]
    figures = Figures.of(answers, bare_s=2.5)
    assert figures.tokens_per_s == 6 / 5
    assert astuple(figures.first) == pytest.approx((2.0, 2.9, 2.98, 3.0))
    assert figures.gap.max == figures.longest_gap.max == 3.0
    assert figures.longest_gap.p50 == pytest.approx(1.625)
    assert figures.good == pytest.approx(1 / 3)
    assert figures.good_per_s == pytest.approx(1 / 5)
    assert figures.of_bare == 0.5
    assert figures.end.max == 5.0


def test_the_time_of_a_run_begins_with_its_first_arrival() -> None:
    assert Figures.of([answer(1.0, 2.0, due_s=10.0), answer(1.0, due_s=12.0)]).seconds == 3.0


def test_a_failed_turn_is_not_good_and_in_no_distribution() -> None:
    figures = Figures.of([answer(1.0), answer(error="refused")])
    assert (figures.requests, figures.failed, figures.good, figures.first.max) == (2, 1, 0.5, 1.0)


def test_a_run_without_an_answer_has_no_figures() -> None:
    with pytest.raises(ValueError, match="no turn was answered"):
        Figures.of([answer(error="refused")])


def test_slowdown_is_the_wait_by_the_cost_of_the_prompt_alone() -> None:
    answers = [answer(1.0, prompt_tokens=10), answer(1.0, prompt_tokens=100)]
    assert Figures.of(answers, alone_s=lambda tokens: tokens / 100).slowdown.max == 10.0


def test_the_tenant_with_fewest_good_answers_is_found() -> None:
    answers = [answer(1.0, tenant="a"), answer(3.0, tenant="b"), answer(1.0, tenant="b")]
    assert Figures.of(answers).worst_tenant_good == 0.5


def test_what_the_client_adds_to_the_servers_first_token_is_known() -> None:
    assert Figures.of([answer(1.0, server_first_s=0.75), answer(2.0)]).client_extra_s == 0.25


def test_later_turns_of_conversations_have_figures_of_their_own() -> None:
    answers = [
        answer(5.0, prompt_tokens=100, cached_tokens=0),
        answer(1.0, prompt_tokens=150, cached_tokens=120, tokens_before=100),
        answer(2.0, prompt_tokens=180, cached_tokens=75, tokens_before=150),
    ]
    figures = Figures.of(answers)
    assert (figures.later_first.p50, figures.later_first.max) == (1.5, 2.0)
    assert figures.found == pytest.approx((100 + 75) / 250)


def test_what_a_cache_holds_is_unknown_if_a_server_does_not_report_it() -> None:
    assert math.isnan(Figures.of([answer(1.0), answer(1.0, tokens_before=9)]).found)


def test_the_median_of_runs_is_taken_figure_by_figure() -> None:
    runs = [Figures.of([answer(first, first + gap)]) for first, gap in ((1.0, 3.0), (2.0, 1.0), (3.0, 2.0))]
    median = Figures.median(runs)
    assert (median.first.p50, median.gap.max, median.end.max) == (2.0, 2.0, 4.0)


def test_json_has_null_for_a_figure_without_a_value() -> None:
    figures = Figures.of([answer(1.0)]).as_json()
    assert figures["gap"]["p50"] is None
    assert figures["first"]["p50"] == 1.0
    json.dumps(figures, allow_nan=False)
