"""`sluice batch schedule`: the next runs and the hours, from the settings of a worker on this machine."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.end_to_end.test_cli import Command
from tests.end_to_end.test_cli_operators import table

NIGHTS = "0 2 * * *"


def settings(folder: Path, *lines: str) -> None:
    (folder / ".env").write_text("\n".join(["SLUICE_BATCH_DIR=batch", *lines]))


def nights(count: int) -> list[datetime]:
    now = datetime.now(UTC)
    tonight = now.replace(hour=2, minute=0, second=0, microsecond=0)
    first = tonight if tonight > now else tonight + timedelta(days=1)
    return [first + timedelta(days=k) for k in range(count)]


def test_the_next_five_runs_are_shown_in_utc_and_by_the_local_clock(sluice: Command, tmp_path: Path) -> None:
    settings(tmp_path, f"SLUICE_BATCH_SCHEDULE={NIGHTS}")
    sluice.env["TZ"] = "Asia/Kolkata"
    code, out, err = sluice.process("batch", "schedule")
    assert (code, err) == (0, "")
    assert out.startswith(f"Schedule: {NIGHTS}")
    rows = table(out, "Schedule")
    assert [row[:2] for row in rows] == [[f"{at:%a %Y-%m-%d} 02:00", f"{at:%a %Y-%m-%d} 07:30 IST"] for at in nights(5)]
    assert all(re.fullmatch(r"(\d+ (d|h|min|s) ?){1,2}", row[2]) for row in rows)
    assert out.endswith("Offline jobs may take 14 of a worker's 16 rows now, at any hour.\n")


def test_an_option_wins_over_the_settings(sluice: Command, tmp_path: Path) -> None:
    settings(tmp_path, "SLUICE_BATCH_SCHEDULE=0 3 1 1 *", "SLUICE_BATCH_HOURS=01:00-02:00")
    code, out, _ = sluice("batch", "schedule", "--schedule", NIGHTS, "-n", "2", "--hours", "22:00-06:30")
    assert (code, [row[0][-5:] for row in table(out, "Schedule")]) == (0, ["02:00", "02:00"])
    assert "their hours are 22:00-06:30 UTC" in out


def test_the_hours_say_what_offline_jobs_may_take_now(sluice: Command, tmp_path: Path) -> None:
    now = datetime.now(UTC)
    around = f"{now - timedelta(hours=2):%H:%M}-{now + timedelta(hours=2):%H:%M}"
    later = f"{now + timedelta(hours=2):%H:%M}-{now + timedelta(hours=4):%H:%M}"
    settings(tmp_path, "SLUICE_MAX_ROWS=8", "SLUICE_BATCH_OFF_HOURS_ROWS=1")
    sluice.env["TZ"] = "UTC"
    said = [sluice.process("batch", "schedule", "--hours", hours)[1].splitlines()[-1] for hours in (around, later)]
    assert said == [
        f"Offline jobs may take 6 of a worker's 8 rows now; their hours are {around} UTC, {around} here.",
        f"Offline jobs may take 1 of a worker's 8 rows now; their hours are {later} UTC, {later} here.",
    ]


def test_as_json_a_run_is_an_object_and_no_model_need_be_set(sluice: Command) -> None:
    code, out, err = sluice("batch", "schedule", "--json", "--schedule", NIGHTS, "-n", "3")
    said = [json.loads(line) for line in out.splitlines()]
    assert (code, err, [run["at"] for run in said]) == (0, "", [int(at.timestamp()) for at in nights(3)])
    assert [{datetime.fromisoformat(run[form]).timestamp() for form in ("utc", "local")} for run in said] == [
        {run["at"]} for run in said
    ]


def test_without_a_folder_it_says_that_nothing_is_taken_in(sluice: Command) -> None:
    code, _, err = sluice("batch", "schedule")
    assert (code, err) == (0, "SLUICE_BATCH_DIR is not set: a worker started here runs no files.\n")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("--schedule", "at two"), "SLUICE_BATCH_SCHEDULE=at two: .*five fields, and this has 2"),
        (("--schedule", "0 0 30 2 *"), "SLUICE_BATCH_SCHEDULE=0 0 30 2 .*: .*its day-of-month is not valid"),
        (("--schedule", "0 0 */30 2 mon#5"), "no day of the next fifty years matches"),
        (("--hours", "nights"), "SLUICE_BATCH_HOURS=nights: .*hours look like 22:00-06:00"),
    ],
)
def test_what_cannot_be_is_a_sentence_and_exit_code_2(sluice: Command, given: tuple[str, ...], why: str) -> None:
    code, out, err = sluice("batch", "schedule", *given)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert re.search(rf"^sluice: .*{why}", err)


def test_a_day_that_is_rare_can_be_asked_for_as_often_as_is_allowed(sluice: Command) -> None:
    code, out, _ = sluice("batch", "schedule", "--json", "--schedule", "0 0 * 2 mon#5", "-n", "100")
    assert (code, len(out.splitlines())) == (0, 100)


def test_help_teaches_with_an_example_and_needs_no_worker(sluice: Command) -> None:
    code, out = sluice.help("batch", "schedule")
    assert (code, "    sluice batch schedule" in out) == (0, True)


def test_without_a_worker_s_packages_it_says_what_to_install(sluice: Command) -> None:
    without = "import sys; sys.modules.update(cronsim=None); from sluice.cli import main; main()"
    code, _, err = sluice.python("-c", without, "batch", "schedule")
    assert (code, "run ./scripts/setup worker,server" in err) == (2, True)
