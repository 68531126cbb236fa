"""Times of decode steps by their rows."""

import pytest

from worker.engine.step.cost import StepTimes
from worker.engine.step.tuning import CLASSES


def test_steps_of_about_as_many_rows_share_a_mean() -> None:
    times = StepTimes()
    for rows, seconds in [(1, 0.01), (2, 0.02), (3, 0.02), (8, 0.04), (15, 0.04), (5000, 0.5)]:
        times.observe(rows, seconds, 0)
    assert times.seconds(0) == pytest.approx((0.01, 0.02, 0, 0.04, 0, 0, 0, 0.5))
    assert len(times.seconds(0)) == CLASSES


def test_a_single_slow_step_hardly_counts() -> None:
    times = StepTimes()
    for seconds in [0.01] * 20 + [0.05]:
        times.observe(4, seconds, 0)
    assert times.seconds(0)[2] == pytest.approx(0.012)


def test_a_time_older_than_a_minute_is_unknown_and_replaced_by_the_next() -> None:
    times = StepTimes()
    times.observe(1, 0.5, now=1000)
    assert times.seconds(now=1059)[0] == 0.5
    assert times.seconds(now=1061)[0] == 0
    times.observe(1, 0.01, now=1061)
    assert times.seconds(now=1061)[0] == pytest.approx(0.01)


def test_steps_without_rows_or_time_say_nothing() -> None:
    times = StepTimes()
    times.observe(0, 0.1, 0)
    times.observe(3, 0.0, 0)
    assert not any(times.seconds(0))
