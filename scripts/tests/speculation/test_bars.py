"""The bars of speculation, by task, proposer and rows."""

import pytest

from scripts.benchmarks.speculation.figures import Result
from scripts.benchmarks.speculation.report import judge
from scripts.tests.speculation.results import result

STEP_S = 0.1


def verdicts(*results: Result) -> dict[str, bool]:
    return {verdict.label: verdict.holds for verdict in judge(results, STEP_S)}


@pytest.mark.parametrize(("task", "proposer"), [("recall", "copies"), ("edit", "prediction")])
@pytest.mark.parametrize(
    ("rows", "speed", "holds"), [(1, 1.5, True), (2, 1.45, False), (4, 1.25, True), (4, 1.2, False)]
)
def test_copies_have_to_be_faster_with_few_rows(task: str, proposer: str, rows: int, speed: float, holds: bool) -> None:
    [label] = [name for name in verdicts(result(task, rows, proposer, speed=speed)) if name.endswith("× tokens/s")]
    assert verdicts(result(task, rows, proposer, speed=speed))[label] == holds


def test_copies_have_no_bar_with_many_rows() -> None:
    assert verdicts(result("recall", 8, "copies"), result("edit", 16, "prediction")) == {}


@pytest.mark.parametrize(("accepted", "holds"), [(6, True), (5, False)])
def test_copies_make_two_and_a_half_tokens_a_forward(accepted: int, holds: bool) -> None:
    found = verdicts(result("recall", 1, "copies", accepted=accepted))
    assert found["recall, 1 row, copies: tokens a forward"] == holds


@pytest.mark.parametrize(("task", "proposer"), [("json", "grammar"), ("tools", "copies")])
@pytest.mark.parametrize(("accepted", "holds"), [(8, True), (7, False)])
def test_schemas_and_repeated_calls_make_four_tokens_a_forward(
    task: str, proposer: str, accepted: int, holds: bool
) -> None:
    found = verdicts(result(task, 2, proposer, accepted=accepted, speed=1.5))
    assert [*found.values()] == [holds, True]


@pytest.mark.parametrize(
    ("task", "rows", "proposer", "judged"),
    [
        ("count", 1, "copies", True), ("free", 8, "all", True), ("free", 4, "all", False),
        ("count", 8, "all", False), ("count", 8, "idle", False),
    ],
)  # fmt: skip
def test_nothing_may_be_lost_where_there_is_nothing_to_gain(task: str, rows: int, proposer: str, judged: bool) -> None:
    held, missed = (verdicts(result(task, rows, proposer, speed=speed)) for speed in (0.97, 0.96))
    assert [*held.values()] == [True, True] * judged
    assert [*missed.values()] == [False, True] * judged


def test_a_gap_beyond_the_bound_of_a_step_is_missed() -> None:
    assert [*verdicts(result("count", 1, "copies", gap_s=3.0)).values()] == [True, False]


def test_a_head_that_slows_any_case_is_missed() -> None:
    found = verdicts(result("count", 8, "mtp", speed=0.96), result("mixed", 1, "mtp", speed=1.2))
    assert found == {
        "mixed, 1 row, mtp: × tokens/s": True,
        "mtp, slowest case (count, 8 rows, mtp): × tokens/s": False,
    }


def test_a_head_at_a_fixed_depth_is_judged_by_its_tokens() -> None:
    assert verdicts(result("mixed", 1, "mtp-fixed", accepted=5, speed=0.5)) == {
        "mixed, 1 row, mtp-fixed: tokens a forward": True
    }
    assert verdicts(result("mixed", 2, "mtp-fixed", accepted=1)) == {}
