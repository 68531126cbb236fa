"""`sluice batch schedule`: the next runs and the hours, from the settings of a worker on this machine."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.batch.helpers import line, read, says, write
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


# Runs that recur


@pytest.fixture
def batch_dir(tmp_path: Path) -> Path:
    (tmp_path / "batch").mkdir()
    write(tmp_path / "in.jsonl", says("a"))
    return tmp_path / "batch"


def add(sluice: Command, *more: str) -> tuple[int, str, str]:
    return sluice("batch", "schedule", "add", NIGHTS, "in.jsonl", "--dir", "batch", *more)


def listed(sluice: Command) -> list[dict[str, Any]]:
    code, out, _ = sluice("batch", "schedule", "list", "--dir", "batch", "--json")
    assert code == 0
    return [json.loads(row) for row in out.splitlines()]


@pytest.mark.usefixtures("batch_dir")
def test_a_schedule_is_added_listed_paused_resumed_and_removed(sluice: Command, tmp_path: Path) -> None:
    code, out, err = add(sluice, "--tz", "Asia/Kolkata", "--name", "night")
    assert (code, out) == (0, "night\n")
    assert "its first time is" in err
    (row,) = listed(sluice)
    assert row["command"][:3] == ["submit", str(tmp_path / "in.jsonl"), "--id"]
    assert datetime.fromtimestamp(row["next"], UTC).strftime("%H:%M") == "20:30"
    for verb, paused in ("pause", True), ("resume", False):
        assert sluice("batch", "schedule", verb, "night", "--dir", "batch")[:2] == (0, "night\n")
        assert [row["paused"] for row in listed(sluice)] == [paused]
    assert "waits for its first time" in sluice("batch", "schedule", "list", "--dir", "batch")[1]
    assert sluice("batch", "schedule", "rm", "night", "--dir", "batch")[0] == 0
    assert listed(sluice) == []


def test_run_submits_the_file_now_and_not_while_that_run_waits(sluice: Command, batch_dir: Path) -> None:
    add(sluice)
    code, out, _ = sluice.process("batch", "schedule", "run", "in", "--dir", "batch")
    assert (code, [path.name for path in (batch_dir / "inbox").glob("*.jsonl")]) == (0, [f"{out.strip()}.jsonl"])
    assert sluice.process("batch", "status", out.strip())[0] == 0
    assert sluice.process("batch", "schedule", "run", "in", "--dir", "batch") == (
        2, "", "sluice: the last run of in has not ended: wait for it, or cancel it.\n",
    )  # fmt: skip


@pytest.mark.usefixtures("alive", "batch_dir")
def test_run_of_a_schedule_with_an_output_is_batch_run_with_its_options(sluice: Command, tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", line("a", model="gpt-4o-mini"))
    add(sluice, "--output", "out-%Y.jsonl", "--on-miss", "skip", "--name", "year", "--map", "gpt-*=default")
    code, _, err = add(sluice, "--output", "out-%Y-%m-%d.jsonl", "--name", "day", "--map", "gpt-*=default")
    assert code == 0, err
    assert [row["name"] for row in listed(sluice)] == ["day"]  # the other would write to one file every night
    code, _, err = sluice.process("batch", "schedule", "run", "day", "--dir", "batch")
    assert code == 0, err
    assert len(read(tmp_path / f"out-{datetime.now(UTC):%Y-%m-%d}.jsonl")) == 1


@pytest.mark.usefixtures("batch_dir")
@pytest.mark.parametrize(
    ("given", "why"),
    [
        (("0 2 * *", "in.jsonl"), "crontab: '0 2 \\* \\*': .*five fields, and this has 4"),
        ((NIGHTS, "in.jsonl", "--tz", "Berlin"), "tz: 'Berlin' .* Europe/Berlin"),
        ((NIGHTS, "in.jsonl", "--on-miss", "later"), "on_miss: .* run or skip"),
        ((NIGHTS, "no.jsonl"), "no.jsonl: there is no such file"),
        ((NIGHTS, "in.jsonl", "--name", "../x"), "'../x' is not a name of a schedule"),
        ((NIGHTS, "in.jsonl", "-o", "out.jsonl"), "out-%Y-%m-%d"),
        ((NIGHTS, "--map", "a=b", "in.jsonl"), "--map: write the options of the run after FILE"),
        ((NIGHTS, "in.jsonl", "--dir", "nowhere"), "nowhere: there is no such folder"),
        ((NIGHTS, "in.csv", "--prompt", "p.txt"), "in.csv is a table: give -o OUTPUT and --prompt"),
        ((NIGHTS, "in.jsonl", "--url", "http://h"), "--url: .* give -o too"),
        ((NIGHTS, "in.jsonl", "-o", "o-%F.jsonl", "--url", "http://h", "--key", "sk"), "--key: .* SLUICE_API_KEY"),
        ((NIGHTS, "in.jsonl", "--redis-url", "redis://:geheim@h"), "--redis-url: (?!.*geheim).* SLUICE_REDIS_URL"),
        ((NIGHTS, "in.jsonl", "-o", "o-%F.jsonl", "--redis-url", "redis://h?db=1&password=x"), "--redis-url: it has"),
    ],
)
def test_what_cannot_be_scheduled_is_a_sentence(sluice: Command, given: tuple[str, ...], why: str) -> None:
    place = () if "--dir" in given else ("--dir", "batch")
    code, out, err = sluice("batch", "schedule", "add", *given, *place)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert re.search(rf"^sluice: .*{why}", err)
    assert listed(sluice) == []


@pytest.mark.usefixtures("batch_dir")
def test_options_that_the_command_does_not_have_are_refused_when_it_is_scheduled(sluice: Command) -> None:
    code, _, err = sluice.process(
        "batch", "schedule", "add", NIGHTS, "in.jsonl", "--dir", "batch", "-o", "o-%d.jsonl", "--colour", "red"
    )
    assert (code, "No such option: --colour" in err, "sluice batch run" in err) == (2, True, True)
    assert listed(sluice) == []


@pytest.mark.usefixtures("batch_dir")
@pytest.mark.parametrize("verb", ["rm", "pause", "resume", "run"])
def test_a_schedule_that_is_not_there_is_named(sluice: Command, verb: str) -> None:
    assert sluice("batch", "schedule", verb, "../in", "--dir", "batch") == (
        2, "", "sluice: there is no schedule '../in' in batch. See: sluice batch schedule list\n",
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["add", "list", "rm", "pause", "resume", "run"])
def test_help_of_each_verb_teaches_with_an_example(sluice: Command, verb: str) -> None:
    code, out = sluice.help("batch", "schedule", verb)
    assert (code, f"  sluice batch schedule {verb} " in out) == (0, True)
