"""Schedules of a folder, at times that the tests set: what starts, what is skipped, and that nothing runs twice."""

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sluice.batch.schedules import Schedule, Schedules, ScheduleState, Skip, Start, decide

NOON = datetime(2026, 3, 13, 12, tzinfo=UTC)
TWO = datetime(2026, 3, 14, 2, tzinfo=UTC)  # the first time of the schedules here
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def schedule(**changed: Any) -> Schedule:
    given = {"crontab": "0 2 * * *", "since": NOON.timestamp(), "id": "0123abcd", "file": "/in.jsonl", "cwd": "/"}
    return Schedule(**{**given, **changed})


def seen(now: datetime, state: ScheduleState | None = None, *, is_busy: bool = False, **changed: Any) -> Any:
    return decide(schedule(**changed), state or ScheduleState(), now, is_busy=is_busy)


def handled(slot: datetime) -> ScheduleState:
    return ScheduleState(handled=slot.timestamp())


# When


def test_a_time_is_run_when_it_has_come_and_once() -> None:
    assert [seen(TWO - MINUTE), seen(TWO), seen(TWO + MINUTE)] == [None, Start(TWO), Start(TWO)]
    assert [seen(TWO + MINUTE, handled(TWO)), seen(TWO + DAY, handled(TWO))] == [None, Start(TWO + DAY)]


def test_a_time_before_it_was_added_or_while_it_was_paused_counts_for_nothing() -> None:
    assert seen(NOON + HOUR) is None
    assert seen(TWO + HOUR, paused=True) is None
    assert seen(TWO + HOUR, since=(TWO + MINUTE).timestamp()) is None


def test_after_nights_without_a_worker_it_runs_once_or_waits_for_the_next_by_choice() -> None:
    waking = TWO + 4 * DAY + 6 * HOUR
    assert seen(waking) == Start(TWO + 4 * DAY)
    assert seen(waking, on_miss="skip") == Skip(TWO + 4 * DAY, "no worker was up")
    assert seen(waking, handled(TWO + 4 * DAY)) is None
    assert seen(TWO + 4 * MINUTE, on_miss="skip") == Start(TWO)


def test_a_time_at_which_the_run_before_has_not_ended_is_skipped() -> None:
    assert seen(TWO, is_busy=True) == Skip(TWO, "the run before it had not ended")
    assert seen(TWO - MINUTE, is_busy=True) is None


def test_a_command_that_was_interrupted_is_resumed_whatever_the_time() -> None:
    interrupted = ScheduleState(handled=TWO.timestamp(), started=TWO.timestamp())
    assert seen(TWO + MINUTE, interrupted) == seen(TWO + 3 * DAY, interrupted, paused=True) == Start(TWO)


def test_a_clock_that_goes_back_starts_nothing_twice_and_one_that_was_ahead_stops_nothing() -> None:
    assert [seen(TWO - MINUTE, handled(TWO)), seen(TWO, handled(TWO))] == [None, None]
    decided = seen(NOON + HOUR, handled(datetime(2030, 1, 1, tzinfo=UTC)))
    assert decided == Skip(NOON + HOUR, "the clock was ahead")
    assert seen(TWO, handled(decided.slot)) == Start(TWO)


@pytest.mark.parametrize(
    ("night", "runs_at"),
    [
        (datetime(2026, 3, 29, tzinfo=UTC), ["01:00"]),  # 02:30 does not exist: at 03:00, when the clock has moved
        (datetime(2026, 10, 25, tzinfo=UTC), ["00:30"]),  # it exists twice
        (datetime(2026, 7, 1, tzinfo=UTC), ["00:30"]),
        (datetime(2026, 1, 1, tzinfo=UTC), ["01:30"]),
    ],
)
def test_a_night_has_one_run_also_when_clocks_change(night: datetime, runs_at: list[str]) -> None:
    state, found = ScheduleState(), list[str]()
    for minute in range(0, 180):
        now = night + minute * MINUTE
        decided = seen(now, state, crontab="30 2 * * *", tz="Europe/Berlin", since=night.timestamp())
        if isinstance(decided, Start):
            found.append(f"{now:%H:%M}")
            state = handled(decided.slot)
    assert found == runs_at


# Once


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inbox").mkdir()
    return tmp_path


def submits(folder: Path, ran: list[list[str]]) -> Callable[[Schedule, list[str]], int]:
    """Return a command that submits, in this process."""

    def run(_: Schedule, arguments: list[str]) -> int:
        ran.append(arguments)
        (folder / "inbox" / f"{arguments[3]}.jsonl").write_text("{}")
        return 0

    return run


def test_a_file_is_submitted_as_the_same_run_however_often_its_worker_dies(folder: Path) -> None:
    schedules, ran = Schedules(folder), list[list[str]]()
    schedules.write("night", schedule())

    def dies(_: Schedule, arguments: list[str]) -> int:
        ran.append(arguments)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            schedules.follow("night", lambda: TWO, dies)
    for now in (TWO + MINUTE, TWO + 2 * MINUTE):
        schedules.follow("night", lambda now=now: now, submits(folder, ran))  # type: ignore[misc]
    command = ["submit", "/in.jsonl", "--id", "batch_night_202603140200000123abcd"]
    assert ran == [command, command, command]


def test_while_its_run_waits_or_runs_there_is_no_other(folder: Path) -> None:
    schedules, ran = Schedules(folder), list[list[str]]()
    schedules.write("night", schedule())
    schedules.follow("night", lambda: TWO, submits(folder, ran))
    run_id = ran[0][3]
    schedules.follow("night", lambda: TWO + DAY, submits(folder, ran))
    (folder / "running" / run_id).mkdir(parents=True)
    (folder / "inbox" / f"{run_id}.jsonl").rename(folder / "running" / run_id / "input.jsonl")
    schedules.follow("night", lambda: TWO + 2 * DAY, submits(folder, ran))
    assert schedules.run_now("night", TWO + 2 * DAY, submits(folder, ran)) is None
    state = schedules.state("night")
    assert (len(ran), state.skipped) == (1, (TWO + 2 * DAY).timestamp())
    (folder / "running").rename(folder / "done")
    schedules.follow("night", lambda: TWO + 3 * DAY, submits(folder, ran))
    assert len(ran) == 2


def test_a_command_that_is_stopped_is_resumed_and_times_that_pass_while_it_runs_are_skipped(folder: Path) -> None:
    schedules, ran, codes = Schedules(folder), list[list[str]](), [3, 1]
    schedules.write("night", schedule(output="/out-%Y-%m-%d.jsonl", options=("--map", "a=b")))
    clock = [TWO, TWO]  # before and after the command

    def run(_: Schedule, arguments: list[str]) -> int:
        ran.append(arguments)
        return codes.pop(0)

    schedules.follow("night", lambda: clock[0], run)
    assert schedules.due(TWO + MINUTE, set()) == ["night"]
    moments = iter([TWO + MINUTE, TWO + 30 * HOUR])
    schedules.follow("night", lambda: next(moments), run)
    assert ran == [["run", "/in.jsonl", "--output", "/out-2026-03-14.jsonl", "--map", "a=b"]] * 2
    state = schedules.state("night")
    assert (state.ran, state.code, state.skipped) == (TWO.timestamp(), 1, (TWO + DAY).timestamp())
    assert schedules.due(TWO + 30 * HOUR, set()) == []


def test_a_command_that_could_do_nothing_is_tried_again_for_five_minutes(folder: Path) -> None:
    schedules, ran = Schedules(folder), list[list[str]]()
    schedules.write("night", schedule())

    def fails(_: Schedule, arguments: list[str]) -> int:
        ran.append(arguments)
        return 2

    for minute in range(10):
        schedules.follow("night", lambda now=TWO + minute * MINUTE: now, fails)  # type: ignore[misc]
    assert (len(ran), schedules.state("night").code) == (7, 2)
    assert schedules.run_now("night", TWO + HOUR, fails) == 2
    assert schedules.state("night").started is None


def race(folder: Path, barrier: Any, out: Any) -> None:
    ran = list[list[str]]()
    barrier.wait()
    for _ in range(20):
        Schedules(folder).follow("night", lambda: TWO, submits(folder, ran))
    out.put(len(ran))


def test_of_several_processes_one_runs_a_time(folder: Path) -> None:
    Schedules(folder).write("night", schedule())
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(4), context.Queue()
    processes = [context.Process(target=race, args=(folder, barrier, out)) for _ in range(4)]
    for process in processes:
        process.start()
    assert sorted(out.get(timeout=60) for _ in processes) == [0, 0, 0, 1]
    for process in processes:
        process.join()


# What people write


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"crontab": "at two"}, "crontab: 'at two': .* five fields"),
        ({"crontab": "0 0 30 2 *"}, "crontab: .*day-of-month"),
        ({"tz": "Mars/Olympus"}, "tz: 'Mars/Olympus' .* Europe/Berlin"),
        ({"tz": "../../etc/passwd"}, "tz: "),
        ({"on_miss": "never"}, "on_miss: .* run or skip"),
        ({"output": "/out.csv"}, "output: .* out-%Y-%m-%d.csv"),
        ({"output": "/out-%H.csv"}, "output: "),
    ],
)
def test_what_cannot_be_followed_is_refused_with_a_sentence(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        schedule(**changed)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"since": 1e300}', '{"since": NaN}', "\xff", '{"options": [1]}', '{"tz": 5}'],
)
def test_a_file_that_is_no_schedule_stops_no_other_and_is_told_once(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    schedules, told = Schedules(folder), set[str]()
    schedules.write("night", schedule())
    parsed = json.loads((folder / "schedules" / "night.json").read_text())
    broken = text
    if text.startswith('{"'):
        broken = json.dumps({**parsed, **json.loads(text)})
    (folder / "schedules" / "broken.json").write_bytes(broken.encode("latin-1"))
    (folder / "schedules" / "-no name.json").write_text("{}")
    assert [schedules.due(TWO, told) for _ in range(3)] == [["night"]] * 3
    assert caplog.text.count("broken.json") == 1


@pytest.mark.parametrize("text", ["5", '{"handled": "noon"}', '{"started": [1]}', '{"handled": 1e300}'])
def test_a_state_that_no_schedule_wrote_stops_no_other(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    schedules, told = Schedules(folder), set[str]()
    for name in ("broken", "night"):
        schedules.write(name, schedule())
    (folder / "schedules" / "broken.state").write_text(text)
    assert schedules.due(TWO, told) == ["night"]
    assert "broken.state was not written by a schedule" in caplog.text


def test_a_schedule_with_an_output_is_followed_only_if_no_other_user_can_have_written_it(folder: Path) -> None:
    schedules = Schedules(folder)
    schedules.write("night", schedule(output="/out-%Y-%m-%d.jsonl"))
    path = folder / "schedules" / "night.json"
    assert schedules.read("night").output
    path.chmod(0o666)
    with pytest.raises(ValueError, match="only the user of this process"):
        schedules.read("night")
    schedules.write("night", replace(schedule(), output=None))
    path.chmod(0o666)
    assert schedules.read("night") == schedule()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "-a", "a" * 41, "ä", "a b", "a\n"])
def test_a_name_is_never_another_path(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a name"):
        Schedules(folder).write(name, schedule())
    assert [path.name for path in folder.rglob("*") if path.is_file()] == []
