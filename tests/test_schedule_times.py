from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from worker.schedule_times import Crontab, Hours

FRIDAY = datetime(2026, 3, 13, 12, 30, 15, tzinfo=UTC)


def slots(expression: str, *, after: datetime = FRIDAY, count: int = 3) -> list[str]:
    found = [after]
    for _ in range(count):
        found.append(Crontab(expression).after(found[-1]))
    return [f"{slot:%a %d.%m.%y %H:%M}" for slot in found[1:]]


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("* * * * *", ["Fri 13.03.26 12:31", "Fri 13.03.26 12:32", "Fri 13.03.26 12:33"]),
        ("0 2 * * *", ["Sat 14.03.26 02:00", "Sun 15.03.26 02:00", "Mon 16.03.26 02:00"]),
        ("*/20 9-17 * * *", ["Fri 13.03.26 12:40", "Fri 13.03.26 13:00", "Fri 13.03.26 13:20"]),
        ("0 22 * * 1-5", ["Fri 13.03.26 22:00", "Mon 16.03.26 22:00", "Tue 17.03.26 22:00"]),
        ("0 22 * * mon-fri", ["Fri 13.03.26 22:00", "Mon 16.03.26 22:00", "Tue 17.03.26 22:00"]),
        ("0 0 * * 0", ["Sun 15.03.26 00:00", "Sun 22.03.26 00:00", "Sun 29.03.26 00:00"]),
        ("0 0 * * 7", ["Sun 15.03.26 00:00", "Sun 22.03.26 00:00", "Sun 29.03.26 00:00"]),
        ("0 0 29 2 *", ["Tue 29.02.28 00:00", "Sun 29.02.32 00:00", "Fri 29.02.36 00:00"]),
        ("30 2 15 * sun", ["Sun 15.03.26 02:30", "Sun 22.03.26 02:30", "Sun 29.03.26 02:30"]),
    ],
)
def test_slots_come_as_in_a_crontab(expression: str, expected: list[str]) -> None:
    assert slots(expression) == expected


def test_a_day_of_month_or_a_weekday_is_enough_where_both_are_named() -> None:
    both = slots("0 0 13 * fri", after=datetime(2026, 3, 1, tzinfo=UTC), count=7)
    assert both == [
        "Fri 06.03.26 00:00", "Fri 13.03.26 00:00", "Fri 20.03.26 00:00", "Fri 27.03.26 00:00",
        "Fri 03.04.26 00:00", "Fri 10.04.26 00:00", "Mon 13.04.26 00:00",
    ]  # fmt: skip


def test_a_slot_is_in_utc_whatever_the_moment_was_in() -> None:
    here = FRIDAY.astimezone(timezone(timedelta(hours=5, minutes=30)))
    slot = Crontab("0 2 * * *").after(here)
    assert (slot, slot.tzinfo) == (datetime(2026, 3, 14, 2, tzinfo=UTC), UTC)


def test_the_clocks_going_forward_costs_no_slot() -> None:
    """Berlin has no half past two on that day."""
    assert slots("30 2 * * *", after=datetime(2026, 3, 28, 12, tzinfo=UTC), count=2) == [
        "Sun 29.03.26 02:30", "Mon 30.03.26 02:30",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("", "five fields, and this has 0"),
        ("@daily", "five fields, and this has 1"),
        ("0 2 * *", "five fields, and this has 4"),
        ("0 0 2 * * *", "five fields, and this has 6"),
        ("60 * * * *", "its minute is not valid"),
        ("* 24 * * *", "its hour is not valid"),
        ("* * 0 * *", "its day-of-month is not valid"),
        ("* * 31 2 *", "its day-of-month is not valid"),
        ("* * * 13 *", "its month is not valid"),
        ("* * * * 8", "its day-of-week is not valid"),
        ("* * * * someday", "its day-of-week is not valid"),
        ("*/0 * * * *", "its minute is not valid"),
        ("5-1 * * * *", "its minute is not valid"),
        ("0 0 */30 2 mon#5", "no day of the next fifty years matches"),
    ],
)
def test_a_bad_expression_is_told_in_a_sentence(expression: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Crontab(expression)


@given(st.text("0123456789*/-,#LW MONFEB", max_size=30))
@example("1" * 5000 + " * * * *")
def test_whatever_is_said_has_a_next_slot_or_a_sentence(expression: str) -> None:
    try:
        crontab = Crontab(expression)
    except ValueError:
        return
    assert crontab.after(FRIDAY) > FRIDAY


def at(time: str) -> datetime:
    hours, minutes = map(int, time.split(":"))
    return FRIDAY.replace(hour=hours, minute=minutes)


@pytest.mark.parametrize(
    ("hours", "inside", "outside"),
    [
        ("09:00-17:30", ["09:00", "12:00", "17:29"], ["00:00", "08:59", "17:30", "23:59"]),
        ("22:00-06:00", ["22:00", "23:59", "00:00", "05:59"], ["06:00", "12:00", "21:59"]),
        ("22:00-24:00", ["22:00", "23:59"], ["00:00", "21:59"]),
        ("22:00-00:00", ["22:00", "23:59"], ["00:00", "21:59"]),
        ("00:00-24:00", ["00:00", "12:00", "23:59"], []),
    ],
)
def test_hours_hold_what_is_between(hours: str, inside: list[str], outside: list[str]) -> None:
    read = Hours.read(hours)
    assert [time for time in (*inside, *outside) if at(time) in read] == inside


def test_hours_are_utc_whatever_the_moment_is_in() -> None:
    tokyo = FRIDAY.astimezone(timezone(timedelta(hours=9)))
    assert (tokyo.hour, tokyo in Hours.read("12:00-13:00")) == (21, True)


@given(st.times(), st.times(), st.datetimes(timezones=st.just(UTC)))
def test_hours_and_the_hours_between_them_make_a_day(begin: object, end: object, moment: datetime) -> None:
    one, other = f"{begin:%H:%M}", f"{end:%H:%M}"
    assume(one != other)
    assert (moment in Hours.read(f"{one}-{other}")) != (moment in Hours.read(f"{other}-{one}"))


@pytest.mark.parametrize(
    "said", ["", "always", "22-6", "22:00", "22:00-6:00", "24:00-06:00", "22:00-25:00", "2２:00-06:00"]
)
def test_hours_that_are_none_are_told_how_hours_look(said: str) -> None:
    with pytest.raises(ValueError, match="hours look like 22:00-06:00"):
        Hours.read(said)


def test_hours_that_end_where_they_begin_could_mean_either() -> None:
    with pytest.raises(ValueError, match="00:00-24:00 is all day"):
        Hours.read("06:00-06:00")
