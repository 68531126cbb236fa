"""When a run ends, by the lines that it has done, over hours of the day in which it may not run."""

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from sluice.batch.pace import Pace
from sluice.batch.times import Hours

EVENING = datetime(2026, 3, 13, 20, tzinfo=UTC)
NIGHTS = Hours.read("22:00-06:00")


def pace(*left: dict[str, int], every_s: float = 30, start: datetime = EVENING, hours: Hours | None = None) -> Pace:
    made = Pace(hours)
    for number, lines in enumerate(left):
        made.add(start.timestamp() + number * every_s, lines)
    return made


def end(made: Pace, now: datetime, **left: int) -> str | None:
    at = made.end(now.timestamp(), left)
    return None if at is None else f"{datetime.fromtimestamp(at, UTC):%d. %H:%M:%S}"


def test_an_end_follows_from_the_lines_that_are_left_and_the_slowest_model() -> None:
    made, now = pace({"a": 100, "b": 10}, {"a": 70, "b": 9}, {"a": 40, "b": 8}), EVENING + timedelta(minutes=1)
    assert end(made, now, a=40, b=8) == "13. 20:05:00"  # b: a line each 30 s; a is done after 40 s
    assert end(made, now, a=40, b=0) == "13. 20:01:40"
    assert end(made, now) == "13. 20:01:00"


def test_without_a_line_that_has_ended_there_is_no_estimate() -> None:
    now = EVENING + timedelta(minutes=1)
    assert Pace(None).end(now.timestamp(), {"a": 1}) is None
    assert end(pace({"a": 10}, {"a": 10}, {"a": 10}), now, a=10) is None
    assert end(pace({"a": 10, "b": 5}, {"a": 5, "b": 5}), now, a=5, b=5) is None


def test_the_last_ten_minutes_count() -> None:
    slow, fast = [{"a": 1000 - k} for k in range(60)], [{"a": 940 - 10 * k} for k in range(22)]
    now = EVENING + timedelta(seconds=30 * 81)
    assert end(pace(*slow, *fast), now, a=730) == f"{now + timedelta(seconds=73 * 30):%d. %H:%M:%S}"


def test_hours_in_which_nothing_runs_neither_slow_the_pace_nor_count_as_time_for_it() -> None:
    start = datetime(2026, 3, 13, 5, 59, tzinfo=UTC)
    lines = [{"a": 4000 - 2 * min(second, 59)} for second in range(3000)]  # until six o'clock two a second
    made = pace(*lines, every_s=1, start=start, hours=NIGHTS)
    assert str(end(made, start + timedelta(minutes=50), a=3882))[:-3] == "13. 22:32"


def test_a_machine_that_sleeps_keeps_its_pace() -> None:
    made = pace({"a": 100}, {"a": 90})
    made.add((EVENING + timedelta(hours=9)).timestamp(), {"a": 89})
    now = EVENING + timedelta(hours=9)
    assert end(made, now, a=89) == f"{now + timedelta(seconds=int(89 * 90 / 11)):%d. %H:%M:%S}"


@given(
    st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 2 * 86_400), st.integers(0, 3 * 86_400),
)  # fmt: skip
def test_hours_pass_as_minute_after_minute_that_is_in_them(begin: int, end: int, start_s: int, work_s: int) -> None:
    hours = Hours(begin, end) if begin != end else Hours(0, 1440)
    start = datetime(2026, 3, 13, tzinfo=UTC) + timedelta(seconds=start_s // 60 * 60)
    open_s = (hours.end_min - hours.begin_min) % 1440 or 1440
    work_s = min(work_s // 60 * 60, open_s * 60 * 3)
    now, left = start, work_s
    while left:
        left -= 60 if now in hours else 0
        now += timedelta(minutes=1)
    if work_s:
        assert hours.reach(start, work_s) == now
    else:
        assert hours.reach(start, 0) in hours
