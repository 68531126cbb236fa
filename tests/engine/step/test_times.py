"""Times of decode steps by their rows."""

from worker.engine.step.cost import StepTimes
from worker.engine.step.tuning import CLASSES

ENOUGH = 8


def observed(*seconds: float, rows: int = 1, now: float = 0) -> StepTimes:
    times = StepTimes()
    for each in seconds:
        times.observe(rows, each, now)
    return times


def test_steps_of_about_as_many_rows_are_compared() -> None:
    times = StepTimes()
    for rows, seconds in [(1, 0.01), (2, 0.03), (3, 0.02), (8, 0.04), (15, 0.05), (5000, 0.5)] * ENOUGH:
        times.observe(rows, seconds, 0)
    assert times.seconds(0) == (0.01, 0.02, 0, 0.04, 0, 0, 0, 0.5)
    assert len(times.seconds(0)) == CLASSES


def test_the_shortest_step_counts_whenever_it_came() -> None:
    slow = [0.05] * ENOUGH
    for steps in ([0.01, *slow], [*slow, 0.01], [*slow, 0.01, 0.02, *slow]):
        assert observed(*steps).seconds(0)[0] == 0.01


def test_a_few_steps_say_nothing_since_all_may_be_slow() -> None:
    assert not any(observed(*[0.1] * (ENOUGH - 1)).seconds(0))
    assert observed(*[0.1] * ENOUGH).seconds(0)[0] == 0.1


def test_a_machine_that_has_got_other_work_counts_as_slower_within_a_minute() -> None:
    times = observed(*[0.01] * ENOUGH, now=1000)
    for second in range(1001, 1061):
        assert times.seconds(second)[0] == (0.01 if second < 1060 else 0.04)
        times.observe(1, 0.04, second)


def test_a_class_without_a_step_of_the_last_minute_is_unknown_and_begins_anew() -> None:
    times = observed(*[0.5] * ENOUGH, now=1000)
    assert times.seconds(now=1059)[0] == 0.5
    assert times.seconds(now=1061)[0] == 0
    times.observe(1, 0.01, now=1061)
    assert times.seconds(now=1061)[0] == 0
    for _ in range(ENOUGH):
        times.observe(1, 0.02, now=1062)
    assert times.seconds(now=1062)[0] == 0.01


def test_steps_without_rows_or_time_say_nothing() -> None:
    times = observed(*[0.0] * ENOUGH, rows=3)
    for _ in range(ENOUGH):
        times.observe(0, 0.1, 0)
    assert not any(times.seconds(0))
