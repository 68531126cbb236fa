"""Times that people write for when something is to begin."""

import time
from datetime import datetime, timedelta

import pytest
import typer

from sluice.cli.options import moment


def test_a_duration_counts_from_now() -> None:
    assert [round(moment(text) - time.time(), -1) for text in ("90m", "2d", "30s")] == [5400, 172_800, 30]


@pytest.mark.parametrize("ahead_h", [1, 23])
def test_a_time_of_day_is_the_next_of_the_local_clock(ahead_h: int) -> None:
    at = datetime.now() + timedelta(hours=ahead_h)
    assert datetime.fromtimestamp(moment(f"{at:%H:%M}")) == at.replace(second=0, microsecond=0)


def test_a_date_is_local_unless_it_has_a_zone() -> None:
    assert moment("2026-12-24T22:00") == datetime(2026, 12, 24, 22).timestamp()
    assert moment("2026-12-24T22:00Z") == moment("2026-12-24T23:00+01:00") == 1_798_149_600


@pytest.mark.parametrize(
    "text", ["", "22", "25:00", "22:00:00:00", "90", "m", "0m", "9999999999d", "soon", "-1h", "٩m"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="22:00, 90m or 2026-12-24T22:00"):
        moment(text)
