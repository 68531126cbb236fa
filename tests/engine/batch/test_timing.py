"""A step is timed only if its beginning and its end are known."""

import pytest

from worker.engine.batch import groups
from worker.engine.batch.groups import Stopwatch


class Clock:
    now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(groups, "time", clock)
    return clock


def launch(watch: Stopwatch, clock: Clock, *, at: float, known_at: float) -> float | None:
    """The host starts at `at`, and has launched a step and received the tokens of the last one at `known_at`."""
    clock.now = known_at
    return watch.launched(at)


def test_step_on_an_idle_device_is_timed_from_launch_to_wait(clock: Clock) -> None:
    watch = Stopwatch()
    assert launch(watch, clock, at=100, known_at=101) is None
    clock.now = 108
    assert watch.ended() == 8


def test_step_that_follows_another_is_timed_from_its_end(clock: Clock) -> None:
    watch = Stopwatch()
    launch(watch, clock, at=100, known_at=101)
    launch(watch, clock, at=102, known_at=107)  # the first has ended
    assert launch(watch, clock, at=108, known_at=112) == 5
    assert launch(watch, clock, at=113, known_at=119) == 7


def test_the_first_step_of_many_is_not_timed_by_the_launch_of_the_next(clock: Clock) -> None:
    """The step may have ended long before the next launch."""
    watch = Stopwatch()
    launch(watch, clock, at=100, known_at=101)
    assert launch(watch, clock, at=150, known_at=151) is None


def test_running_step_behind_another_is_not_timed_by_waiting(clock: Clock) -> None:
    """The host may have received the end of the other step late."""
    watch = Stopwatch()
    launch(watch, clock, at=100, known_at=101)
    launch(watch, clock, at=102, known_at=107)
    clock.now = 112
    assert watch.ended() is None


def test_idle_time_between_steps_is_not_counted(clock: Clock) -> None:
    watch = Stopwatch()
    launch(watch, clock, at=100, known_at=101)
    launch(watch, clock, at=102, known_at=107)
    clock.now = 112
    watch.ended()
    assert launch(watch, clock, at=500, known_at=501) is None
    clock.now = 507
    assert watch.ended() == 7


def test_step_with_other_work_on_the_device_is_not_timed(clock: Clock) -> None:
    alone, following = Stopwatch(), Stopwatch()
    launch(alone, clock, at=100, known_at=101)
    alone.invalidate()
    clock.now = 108
    assert alone.ended() is None
    launch(following, clock, at=100, known_at=101)
    launch(following, clock, at=102, known_at=107)
    following.invalidate()
    assert launch(following, clock, at=112, known_at=113) is None


def test_steps_are_timed_again_after_a_disturbance(clock: Clock) -> None:
    watch = Stopwatch()
    launch(watch, clock, at=100, known_at=101)
    watch.invalidate()
    launch(watch, clock, at=102, known_at=107)
    assert launch(watch, clock, at=108, known_at=113) == 6


def test_running_tells_if_a_step_is_running(clock: Clock) -> None:
    watch = Stopwatch()
    running = [watch.running]
    launch(watch, clock, at=100, known_at=101)
    running.append(watch.running)
    watch.invalidate()
    running.append(watch.running)
    watch.ended()
    running.append(watch.running)
    assert running == [False, True, True, False]


def test_the_host_work_before_a_step_that_verifies_belongs_to_it(clock: Clock) -> None:
    watch = Stopwatch()
    clock.now = 100
    watch.verified()
    watch.ended()
    clock.now = 103
    assert (watch.take_host_s(), watch.take_host_s()) == (3, 0)


@pytest.mark.parametrize("event", ["launch", "other work", "nothing before"])
def test_the_host_work_after_anything_else_does_not_belong_to_a_step(clock: Clock, event: str) -> None:
    watch = Stopwatch()
    if event != "nothing before":
        watch.verified()
    if event == "launch":
        launch(watch, clock, at=100, known_at=101)
        watch.ended()
    if event == "other work":
        watch.invalidate()
    clock.now = 110
    assert watch.take_host_s() == 0
