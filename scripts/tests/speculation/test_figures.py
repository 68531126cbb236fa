"""What a run measures step by step, and the figures of pairs."""

import json
import math

import pytest

from scripts.benchmarks.speculation.figures import Case, Clocks, Meter, NotAnswered, Pair, Result, Run, TokensDiffer
from scripts.tests.speculation.results import run
from worker.outcomes import Outcome, Prefilled, Refused, RowFailed, Sampled, Speculated

CASE = Case("recall", 2, "copies")


def at(second: int) -> Clocks:
    return Clocks(second, second / 2, second / 4)


def metered(*steps: list[Outcome]) -> Run:
    """Return the run of these steps, of one second each, in half of which the process works, and in a quarter of which
    the engine's thread does."""
    meter = Meter()
    for second, outcomes in enumerate(steps):
        meter.observe(outcomes, at(second), at(second + 1))
    return meter.run()


def test_steps_with_a_prompt_count_in_the_whole_time_alone() -> None:
    found = metered([Prefilled("a", 5, 5)], [Prefilled("b", 5, 5), Sampled("a", 1)], [Sampled("a", 2)])
    assert (found.whole_s, found.decode.wall_s, found.tokens, found.delivered) == (3, 1, 1, 2)


def test_an_end_of_sequence_is_drawn_and_not_delivered() -> None:
    found = metered([Sampled("a", 1)], [Sampled("a", None, "stop")])
    assert found.answers == {"a": (1,)}
    assert (found.tokens, found.draws) == (1, 2)


def test_a_step_is_measured_by_all_clocks() -> None:
    found = metered([Sampled("a", 1), Sampled("a", 2)])
    assert (found.tokens_per_s, found.tokens_per_cpu_s, found.host_s_per_token) == (2, 4, 1 / 8)


def test_a_gap_lies_between_two_steps_that_deliver_to_the_same_row() -> None:
    found = metered([Sampled("a", 1), Sampled("b", 1)], [Sampled("a", 2), Sampled("a", 3)], [], [Sampled("a", 4)])
    assert found.gap_s == 2


def test_drafts_are_counted_by_their_kind() -> None:
    copied, forced = Speculated("a", "copy", 7, 3), Speculated("a", "grammar", 2, 2)
    found = metered([copied, forced], [copied])
    assert found.drafts == {"copy": (14, 6), "grammar": (2, 2)}
    assert (found.proposed, found.accepted) == (16, 8)


@pytest.mark.parametrize("outcome", [Refused("a", "too long"), RowFailed("a")])
def test_a_request_without_an_answer_ends_the_run(outcome: Outcome) -> None:
    with pytest.raises(NotAnswered, match="request a"):
        metered([outcome])


def test_the_first_token_that_differs_is_named() -> None:
    off, on = (Run({"0.0": tokens}, 3, 3, Clocks(), 1.0, 0.0, {}) for tokens in ((1, 2, 3), (1, 5, 3)))
    with pytest.raises(TokensDiffer, match=r"recall, 2 rows, copies: request 0\.0 differs at token 1: 2 3 .* 5 3"):
        Pair(off, on).check(CASE)


@pytest.mark.parametrize("answers", [{}, {"0.0": (1, 2)}, {"0.0": (1, 2, 3), "0.1": (1,)}])
def test_an_answer_that_is_missing_or_short_differs(answers: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(TokensDiffer):
        Pair(Run({"0.0": (1, 2, 3)}, 3, 3, Clocks(), 1.0, 0.0, {}), Run(answers, 3, 3, Clocks(), 1.0, 0.0, {})).check(
            CASE
        )


def test_the_speed_is_the_median_of_the_pairs_and_not_of_the_runs() -> None:
    pairs = [Pair(run(rate=off), run(rate=on)) for off, on in ((10, 10), (4, 8), (1, 30))]
    assert Result(CASE, tuple(pairs)).speed == 2


def test_a_forward_makes_one_token_and_those_of_a_draft_that_were_right() -> None:
    found = Result(CASE, (Pair(run(), run(drafts={"copy": (9, 6)})),))
    assert found.tokens_per_forward == 10 / 4
    assert found.accepted_share == 6 / 9


def test_without_drafts_each_forward_makes_a_token_and_no_share_is_known() -> None:
    found = Result(CASE, (Pair(run(), run()),))
    assert found.tokens_per_forward == 1
    assert math.isnan(found.accepted_share)
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["accepted_share"] is None


def test_the_longest_gap_is_that_of_all_pairs() -> None:
    pairs = tuple(Pair(run(gap_s=0.02), run(gap_s=gap_s)) for gap_s in (0.01, 0.05, 0.03))
    assert (Result(CASE, pairs).plain_gap_s, Result(CASE, pairs).gap_s) == (0.02, 0.05)
