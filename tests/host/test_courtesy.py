"""What a worker leaves to its machine follows the signals, at once or with hysteresis."""

from collections.abc import Iterable

import pytest

from worker.host.courtesy import Courtesy, Pressure, Reclaim, Signals, Throttle

NORMAL, WARNING, CRITICAL = Pressure


def levels(courtesy: Courtesy, pressures: Iterable[Pressure], start: float = 0.0) -> list[int]:
    """Return the level of each second."""
    return [int(courtesy.decide(Signals(each), start + i).reclaim) for i, each in enumerate(pressures)]


def test_a_machine_of_which_nothing_is_known_is_left_nothing() -> None:
    assert Courtesy("auto").decide(Signals(), 0.0) == Throttle(1.0, 1.0, Reclaim.NOTHING)


@pytest.mark.parametrize("signals", [Signals(idle_s=0.0), Signals(hot=True), Signals(on_battery=True)])
@pytest.mark.parametrize(
    ("setting", "shares"), [("auto", (1.0, 0.25)), ("0.5", (0.5, 0.5)), ("1", (1.0, 1.0)), ("off", (1.0, 1.0))]
)
def test_each_reason_lowers_the_shares_to_the_setting_s(
    signals: Signals, setting: str, shares: tuple[float, float]
) -> None:
    throttle = Courtesy(setting).decide(signals, 0.0)
    assert (throttle.share, throttle.offline_share) == shares


def test_a_person_who_left_a_minute_ago_lowers_nothing() -> None:
    courtesy = Courtesy("0.5")
    assert courtesy.decide(Signals(idle_s=59.0), 0.0).share == 0.5
    assert courtesy.decide(Signals(idle_s=61.0), 2.0).share == 1.0


def test_a_machine_that_was_just_hot_counts_as_hot() -> None:
    courtesy = Courtesy("0.5")
    courtesy.decide(Signals(hot=True), 100.0)
    assert [courtesy.decide(Signals(), now).share for now in (101.0, 129.0, 131.0)] == [0.5, 0.5, 1.0]


def test_readers_have_all_the_time_by_default_and_offline_jobs_beside_them() -> None:
    throttle = Courtesy("auto").decide(Signals(on_battery=True), 0.0)
    assert throttle.share_for(["batch", "interactive"]) == 1.0
    assert throttle.share_for(["batch", "batch"]) == throttle.share_for([]) == 0.25


def test_critical_pressure_takes_a_level_a_second_and_warnings_the_caches_alone() -> None:
    assert levels(Courtesy("auto"), [CRITICAL] * 6) == [1, 2, 3, 4, 4, 4]
    assert levels(Courtesy("auto"), [WARNING] * 8) == [1, 1, 1, 1, 1, 2, 2, 2]
    assert levels(Courtesy("off"), [CRITICAL] * 6) == [0] * 6


def test_levels_are_taken_back_one_by_one_after_calm() -> None:
    courtesy = Courtesy("auto")
    levels(courtesy, [CRITICAL] * 4)
    assert levels(courtesy, [NORMAL] * 70, start=4.0) == [4] * 15 + [3] * 15 + [2] * 15 + [1] * 15 + [0] * 10


def test_a_moment_without_pressure_takes_nothing_back() -> None:
    courtesy = Courtesy("auto")
    levels(courtesy, [CRITICAL] * 4)
    assert levels(courtesy, [*[NORMAL] * 14, CRITICAL] * 4, start=4.0) == [4] * 60


def test_less_pressure_gives_rows_back_but_not_the_caches() -> None:
    courtesy = Courtesy("auto")
    levels(courtesy, [CRITICAL] * 4)
    assert levels(courtesy, [WARNING] * 60, start=4.0)[-1] == Reclaim.CACHES


def test_pressure_that_comes_back_soon_doubles_the_calm_up_to_ten_minutes() -> None:
    """Else rows that return, and are the reason, would be preempted four times a minute for ever."""
    courtesy, now = Courtesy("auto"), 0.0
    calm = list[int]()
    for _ in range(9):
        while courtesy.decide(Signals(CRITICAL), now).reclaim < Reclaim.NEW_JOBS:
            now += 1.0
        began = now
        while courtesy.decide(Signals(NORMAL), now).reclaim == Reclaim.NEW_JOBS:
            now += 1.0
        calm.append(round(now - began))
    assert calm == [15, 30, 60, 120, 240, 480, 600, 600, 600]
    now += 2000.0
    while courtesy.decide(Signals(NORMAL), now).reclaim:
        now += 1.0
    now += 2000.0
    levels(courtesy, [CRITICAL] * 4, start=now)
    assert levels(courtesy, [NORMAL] * 16, start=now + 4) == [4] * 15 + [3]


@pytest.mark.parametrize(
    ("level", "rows", "expected"),
    [
        (Reclaim.NOTHING, 3, {"interactive": 8, "batch": 5}),
        (Reclaim.CACHES, 3, {"interactive": 8, "batch": 5}),
        (Reclaim.OFFLINE_ROWS, 3, {"interactive": 8, "batch": 0}),
        (Reclaim.NEW_JOBS, 3, {"interactive": 0, "batch": 0}),
        (Reclaim.NEW_JOBS, 0, {"interactive": 1, "batch": 0}),
    ],
)
def test_rows_that_would_wait_are_not_offered(level: Reclaim, rows: int, expected: dict[str, int]) -> None:
    assert level.free_rows({"interactive": 8, "batch": 5}, rows) == expected
