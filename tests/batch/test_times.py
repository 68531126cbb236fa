import time
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from zoneinfo import ZoneInfo

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from sluice.batch.times import Crontab, Hours

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


# In a time zone, whose clocks change

BERLIN = ZoneInfo("Europe/Berlin")


def nights(expression: str, start: datetime, count: int = 3) -> list[str]:
    """Times after the start, in UTC."""
    crontab, found = Crontab(expression, BERLIN), [start]
    for _ in range(count):
        found.append(crontab.after(found[-1]))
    return [f"{slot:%d.%m. %H:%M}" for slot in found[1:]]


def test_a_time_that_does_not_exist_is_the_next_that_does() -> None:
    before = datetime(2026, 3, 27, 12, tzinfo=UTC)
    assert nights("30 2 * * *", before) == ["28.03. 01:30", "29.03. 01:00", "30.03. 00:30"]
    assert nights("15,45 2 * * *", before + timedelta(days=1), 2) == ["29.03. 01:00", "30.03. 00:15"]


def test_a_time_that_exists_twice_comes_once_from_whichever_moment_it_is_asked_for() -> None:
    assert nights("30 2 * * *", datetime(2026, 10, 24, 12, tzinfo=UTC)) == [
        "25.10. 00:30", "26.10. 01:30", "27.10. 01:30",
    ]  # fmt: skip
    for minute in (30, 45, 60, 65, 90, 100, 125):  # 60 to 119: the second of the hours that are both 2 o'clock
        moment = datetime(2026, 10, 25, tzinfo=UTC) + timedelta(minutes=minute)
        assert nights("30 2 * * *", moment, 1) == ["26.10. 01:30"]


def test_each_hour_comes_also_when_clocks_change() -> None:
    assert nights("0 * * * *", datetime(2026, 10, 24, 23, 30, tzinfo=UTC)) == [
        "25.10. 00:00", "25.10. 01:00", "25.10. 02:00",
    ]  # fmt: skip
    assert nights("0 * * * *", datetime(2026, 3, 28, 23, 30, tzinfo=UTC)) == [
        "29.03. 00:00", "29.03. 01:00", "29.03. 02:00",
    ]  # fmt: skip


@given(
    st.sampled_from(["* * * * *", "30 2 * * *", "0 */6 * * *", "0 0 1 * *", "* 0-22 * * *", "0 0 29 2 *"]),
    st.integers(0, 4 * 366 * 86_400),
    st.integers(0, 90 * 86_400),
    st.sampled_from([UTC, BERLIN, ZoneInfo("Australia/Lord_Howe")]),
)
@example("30 2 * * *", 235 * 86_400, 80 * 86_400, BERLIN)
def test_the_latest_time_is_the_last_of_those_that_come_one_after_another(
    expression: str, after_s: int, span_s: int, zone: tzinfo
) -> None:
    crontab, span_s = Crontab(expression, zone), span_s // (1000 if expression.startswith("*") else 1)
    after = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=after_s)
    until, last, slot = after + timedelta(seconds=span_s), None, crontab.after(after)
    while slot <= until:
        last, slot = slot, crontab.after(slot)
    assert crontab.latest(after, until) == last


def test_the_latest_time_of_two_dense_years_is_found_at_once() -> None:
    until = datetime(2026, 11, 29, 23, 30, tzinfo=UTC)
    began = time.monotonic()
    assert Crontab("* 0-22 * * *").latest(until - timedelta(days=800), until) == until.replace(hour=22, minute=59)
    assert time.monotonic() - began < 5  # some milliseconds; going through all takes much longer
