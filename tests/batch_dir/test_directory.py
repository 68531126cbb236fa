"""Feeders start with and end with their worker. Their work is simulated; their processes are real."""

import asyncio
import fcntl
import json
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.fakes import FakeChat
from tests.queue.helpers import ask, ended, settings, until, working
from tests.support.stack import ROOT
from worker.batch_dir import BatchDirectory
from worker.errors import CannotStart
from worker.queue.redis_server import ServerClock

NOON = datetime(2026, 3, 13, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)

# Takes the inbox in if it may, then holds the lock of a run until its stdin ends. Says what it was given.
FEEDER = """
import fcntl, json, os, pathlib, sys
folder, take = pathlib.Path(sys.argv[1]), "--take" in sys.argv
with (folder / "calls").open("a") as calls:
    told = {"args": sys.argv[2:], "nice": os.nice(0), "url": os.environ["SLUICE_REDIS_URL"], "pid": os.getpid()}
    print(json.dumps(told), file=calls)
for file in (folder / "inbox").iterdir() if take else ():
    (folder / "running" / file.stem).mkdir(parents=True)
    file.rename(folder / "running" / file.stem / "input.jsonl")
for run in (folder / "running").iterdir():
    with (run / "run").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        print("feeding", run.name, flush=True)
        sys.stdin.read()
print("leaving", flush=True)
"""


class Clock(ServerClock):
    moment = NOON

    def utc(self) -> datetime:
        return self.moment


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "batch"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def feeder(tmp_path: Path, code: str = FEEDER) -> list[str]:
    script = tmp_path / "feeder.py"
    script.write_text(textwrap.dedent(code))
    return ["nice", sys.executable, str(script)]


@asynccontextmanager
async def at_work(
    url: str,
    folder: Path,
    clock: Clock,
    *,
    code: str = FEEDER,
    search_s: float = 60,
    start_s: float = 60,
    look_s: float = 60,
    **given: Any,
) -> AsyncIterator[BatchDirectory]:
    """A worker, until the end of the block, and then the time that its feeder takes to leave."""
    known = settings(url, **{"poll_s": 0.05, "batch_dir": str(folder), **given})
    command = feeder(folder.parent, code)
    batches = BatchDirectory(str(folder), known, command=command, search_s=search_s, start_s=start_s, look_s=look_s)
    async with working(known, FakeChat().chat, crons=[batches.cron], clock=clock) as worker:
        running = asyncio.create_task(batches.run(worker.stopping, worker.force_stop))
        await until(lambda: batches.cron.next_run is not None)
        yield batches
        worker.stop()
        await asyncio.wait_for(running, 60)


def test_a_folder_has_an_identity_of_its_own_that_all_who_use_it_find(tmp_path: Path) -> None:
    known = settings("redis://unused")
    for name in "one", "other":
        (tmp_path / name).mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "one")
    one, other, again = (BatchDirectory(str(tmp_path / name), known).cron.name for name in ("one", "other", "mounted"))
    assert one == again != other
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [".id", "inbox"]


def calls(folder: Path) -> list[dict[str, Any]]:
    file = folder / "calls"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def is_fed(folder: Path, run: str) -> bool:
    lock = folder / "running" / run / "run"
    if not lock.exists():
        return False
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def drop(folder: Path, name: str) -> None:
    (folder / "inbox").mkdir(parents=True, exist_ok=True)
    (folder / "inbox" / name).write_text("{}\n")


def leave_a_run(folder: Path, name: str) -> None:
    """Create a run as a dead feeder leaves it."""
    (folder / "running" / name).mkdir(parents=True)
    (folder / "running" / name / "input.jsonl").write_text("{}\n")
    (folder / "running" / name / "run").write_text("{}")


@contextmanager
def held(folder: Path, name: str) -> Iterator[None]:
    """Hold a lock, like the feeder of another machine."""
    leave_a_run(folder, name)
    with (folder / "running" / name / "run").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# Who feeds


async def test_at_its_time_a_worker_takes_the_inbox_in_and_not_before(
    redis_url: str, folder: Path, clock: Clock
) -> None:
    drop(folder, "a.jsonl")
    async with at_work(redis_url, folder, clock, batch_models="gpt=default,*=other"):
        await asyncio.sleep(0.3)
        assert calls(folder) == []
        clock.moment += MINUTE
        await until(lambda: is_fed(folder, "a"))
    (call,) = calls(folder)
    assert call["args"] == ["--until-eof", "--models", "gpt=default,*=other", "--take"]
    assert (call["url"], call["nice"] > os.nice(0)) == (redis_url, True)


async def test_a_run_that_is_handed_over_is_taken_at_once_by_one_worker(
    redis_url: str, folder: Path, clock: Clock
) -> None:
    first, second = f"batch_{1:012x}", f"batch_{2:012x}"
    async with (
        at_work(redis_url, folder, clock, worker_name="ada"),
        at_work(redis_url, folder, clock, worker_name="ben"),
    ):
        drop(folder, "a.jsonl")
        drop(folder, f".{first}.part")
        await asyncio.sleep(1)
        assert calls(folder) == [], "a file of somebody's own waits for the schedule"
        (folder / "inbox" / f".{first}.part").rename(folder / "inbox" / f"{first}.jsonl")
        await until(lambda: is_fed(folder, first))
        await asyncio.sleep(1)
        assert len(calls(folder)) == 1
        drop(folder, f"{second}.jsonl")
        os.kill(calls(folder)[0]["pid"], signal.SIGKILL)
        await until(lambda: (folder / "running" / second).exists())


async def test_a_run_that_is_handed_over_waits_for_a_schedule_that_was_set(
    redis_url: str, folder: Path, clock: Clock
) -> None:
    async with at_work(redis_url, folder, clock, batch_schedule="0 * * * *"):
        drop(folder, f"batch_{1:012x}.jsonl")
        await asyncio.sleep(1.5)
        assert calls(folder) == []


async def test_a_run_that_waits_for_a_schedule_is_looked_at_since_it_may_be_cancelled(
    redis_url: str, folder: Path, clock: Clock
) -> None:
    drop(folder, f"batch_{1:012x}.jsonl")
    (folder / "running").mkdir()
    async with at_work(redis_url, folder, clock, batch_schedule="0 * * * *", search_s=0.2):
        await until(lambda: len(calls(folder)) == 2)
    assert all(call["args"] == ["--until-eof"] for call in calls(folder))


async def test_of_two_workers_one_takes_the_inbox_in(redis_url: str, folder: Path, clock: Clock) -> None:
    drop(folder, "a.jsonl")
    async with (
        at_work(redis_url, folder, clock, worker_name="ada") as ada,
        at_work(redis_url, folder, clock, worker_name="ben") as ben,
    ):
        clock.moment += MINUTE
        await until(lambda: {ada.cron.next_run, ben.cron.next_run} == {NOON + 2 * MINUTE})
        await until(lambda: is_fed(folder, "a"))
        assert len(calls(folder)) == 1


async def test_a_run_whose_feeder_died_is_fed_again_by_the_next_that_looks(
    redis_url: str, folder: Path, clock: Clock
) -> None:
    drop(folder, "a.jsonl")
    async with (
        at_work(redis_url, folder, clock, worker_name="ada", search_s=3600),
        at_work(redis_url, folder, clock, worker_name="ben", search_s=0.2),
    ):
        clock.moment += MINUTE
        await until(lambda: is_fed(folder, "a"))
        os.kill(calls(folder)[0]["pid"], signal.SIGKILL)
        await until(lambda: len(calls(folder)) == 2)
        await until(lambda: is_fed(folder, "a"))
        assert "--take" not in calls(folder)[1]["args"]


async def test_a_run_that_nobody_feeds_is_found_at_the_start(redis_url: str, folder: Path, clock: Clock) -> None:
    leave_a_run(folder, "a")
    async with at_work(redis_url, folder, clock):
        await until(lambda: is_fed(folder, "a"))
    assert [call["args"] for call in calls(folder)] == [["--until-eof"]]


async def test_a_run_whose_feeder_died_before_it_began_is_fed(redis_url: str, folder: Path, clock: Clock) -> None:
    leave_a_run(folder, "a")
    (folder / "running" / "a" / "run").unlink()
    async with at_work(redis_url, folder, clock):
        await until(lambda: is_fed(folder, "a"))


async def test_a_run_that_somebody_feeds_is_left_to_it(redis_url: str, folder: Path, clock: Clock) -> None:
    with held(folder, "a"):
        (folder / "running" / ".DS_Store").write_text("no run")
        (folder / "running" / "without an input").mkdir()
        async with at_work(redis_url, folder, clock, search_s=0.05):
            await asyncio.sleep(0.5)
            assert calls(folder) == []


async def test_a_worker_has_one_feeder_at_a_time_and_takes_a_slot_when_it_has_left(
    redis_url: str, folder: Path, clock: Clock
) -> None:
    leave_a_run(folder, "a")
    async with at_work(redis_url, folder, clock, search_s=0.05):
        await until(lambda: is_fed(folder, "a"))
        clock.moment += MINUTE
        await asyncio.sleep(0.5)
        assert len(calls(folder)) == 1
        (folder / "running" / "a" / "run").unlink()
        (folder / "running" / "a").rename(folder / "a")
        os.kill(calls(folder)[0]["pid"], signal.SIGKILL)
        await until(lambda: len(calls(folder)) == 2)
        assert "--take" in calls(folder)[1]["args"]


TOLD = """
import sys
with open(sys.argv[1] + "/told", "a") as told:
    print(*sys.argv[2:], file=told, flush=True)
    for line in sys.stdin:
        print("read", line.strip(), file=told, flush=True)
        if not LINGERS:
            break
"""


@pytest.mark.parametrize("lingers", [True, False])
async def test_a_feeder_is_told_of_a_slot_and_one_that_ends_just_then_has_a_successor(
    redis_url: str, folder: Path, clock: Clock, lingers: bool
) -> None:
    leave_a_run(folder, "a")
    code = TOLD.replace("LINGERS", str(lingers))
    async with at_work(redis_url, folder, clock, code=code, search_s=0.05):
        told = folder / "told"
        await until(lambda: told.exists() and told.read_text() == "--until-eof\n")
        clock.moment += MINUTE
        after = "" if lingers else "--until-eof --take\n"
        await until(lambda: told.read_text() == f"--until-eof\nread take\n{after}")
        await asyncio.sleep(0.3)
        assert told.read_text() == f"--until-eof\nread take\n{after}"


async def test_a_folder_that_vanishes_harms_nothing(redis_url: str, folder: Path, clock: Clock, db: Redis) -> None:
    async with at_work(redis_url, folder, clock, search_s=0.05):
        (folder / "inbox").rmdir()
        folder.rename(folder.with_name("elsewhere"))
        clock.moment += MINUTE
        await ask(db, "a", {"say": ["Hello"]})
        await ended(db, "a")


@pytest.mark.parametrize("name", ["a file", "a file/in"])
def test_a_folder_that_cannot_be_is_no_start(tmp_path: Path, name: str) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(CannotStart, match=f"SLUICE_BATCH_DIR={tmp_path}/{name}: cannot create its inbox: "):
        BatchDirectory(str(tmp_path / name), settings("redis://"))


def test_without_the_command_s_extra_the_way_out_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(CannotStart, match=r"SLUICE_BATCH_DIR.*run \./scripts/setup worker,server"):
        BatchDirectory(str(tmp_path), settings("redis://"))


# How it ends


async def test_a_feeder_that_fails_is_in_the_log_with_its_words_and_harms_nothing(
    redis_url: str, folder: Path, clock: Clock, db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leave_a_run(folder, "a")
    async with at_work(redis_url, folder, clock, code='print("working")\nraise ValueError("the disk is full")'):
        await until(lambda: "the feeder failed" in caplog.text)
        await ask(db, "a", {"say": ["Hello"]})
        await ended(db, "a")
    said = [record.getMessage() for record in caplog.records if record.name == "sluice.batch"]
    assert said[0] == "working"
    assert said[-2:] == ["ValueError: the disk is full", "the feeder failed with code 1: ValueError: the disk is full"]


async def test_a_slot_whose_feeder_fails_at_its_start_is_not_lost(redis_url: str, folder: Path, clock: Clock) -> None:
    drop(folder, "a.jsonl")
    fails_once = f"""
    import os, sys
    tried = sys.argv[1] + "/tried"
    if not os.path.exists(tried):
        open(tried, "w").close()
        sys.exit("no memory")
    {textwrap.indent(FEEDER, "    ").strip()}
    """
    async with at_work(redis_url, folder, clock, search_s=0.05, code=fails_once):
        clock.moment += MINUTE
        await until(lambda: is_fed(folder, "a"))
        assert (folder / "tried").exists()
        assert [call["args"] for call in calls(folder)] == [["--until-eof", "--take"]]


async def test_a_feeder_that_dies_later_has_had_its_slot(redis_url: str, folder: Path, clock: Clock) -> None:
    drop(folder, "a.jsonl")
    async with at_work(redis_url, folder, clock, search_s=0.05, start_s=0):
        clock.moment += MINUTE
        await until(lambda: is_fed(folder, "a"))
        os.kill(calls(folder)[0]["pid"], signal.SIGKILL)
        await until(lambda: len(calls(folder)) == 2)
        assert "--take" not in calls(folder)[1]["args"]


async def test_a_feeder_that_is_not_there_is_in_the_log(
    redis_url: str, folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    leave_a_run(folder, "a")
    known = settings(redis_url)
    batches = BatchDirectory(str(folder), known, command=["/no/such/command"], search_s=0.05)
    stopping = asyncio.Event()
    running = asyncio.create_task(batches.run(stopping, asyncio.Event()))
    await until(lambda: caplog.text.count("cannot start the feeder: ") >= 2)
    stopping.set()
    await asyncio.wait_for(running, 50)


async def test_words_without_an_end_and_without_a_code_stop_nobody(
    redis_url: str, folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leave_a_run(folder, "a")
    code = 'import sys\nprint("x" * 5_000_000)\nsys.stdout.buffer.write(b"\\xff\\n")\nprint("the end")'
    async with at_work(redis_url, folder, clock, code=code):
        await until(lambda: "the end" in caplog.text)
    assert "failed" not in caplog.text


async def test_a_worker_that_stops_tells_its_feeder_and_waits_for_it(
    redis_url: str, folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    leave_a_run(folder, "a")
    async with at_work(redis_url, folder, clock, grace_s=30):
        await until(lambda: is_fed(folder, "a"))
    assert "leaving" in caplog.text
    assert "failed" not in caplog.text
    assert not is_alive(calls(folder)[0]["pid"])


DEAF = "import os, sys, time\nopen(sys.argv[1] + '/pid', 'w').write(str(os.getpid()))\ntime.sleep(60)"


@pytest.mark.parametrize(("grace_s", "signals"), [(0.3, 1), (60, 2)])
async def test_a_feeder_that_does_not_listen_is_ended_with_the_grace_or_by_a_second_signal(
    redis_url: str, folder: Path, grace_s: float, signals: int
) -> None:
    leave_a_run(folder, "a")
    batches = BatchDirectory(str(folder), settings(redis_url, grace_s=grace_s), command=feeder(folder.parent, DEAF))
    events = [asyncio.Event(), asyncio.Event()]
    running = asyncio.create_task(batches.run(*events))
    pid = folder / "pid"
    await until(lambda: pid.exists() and pid.read_text() != "")
    for event in events[:signals]:
        event.set()
    await asyncio.wait_for(running, 50)
    assert not is_alive(int(pid.read_text()))


WORKER = """
import asyncio, sys
from worker.batch_dir import BatchDirectory
from worker.settings import Settings

folder, url, *command = sys.argv[1:]
batches = BatchDirectory(folder, Settings(model="none", redis_url=url), command=command)
asyncio.run(batches.run(asyncio.Event(), asyncio.Event()))
"""


async def test_a_feeder_ends_when_its_worker_is_killed(redis_url: str, folder: Path) -> None:
    leave_a_run(folder, "a")
    command = [sys.executable, "-c", WORKER, str(folder), redis_url, *feeder(folder.parent)]
    worker = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    await until(lambda: is_fed(folder, "a"), within_s=60)
    worker.kill()
    await worker.wait()
    await until(lambda: not is_fed(folder, "a"))
    await until(lambda: not is_alive(calls(folder)[0]["pid"]))
