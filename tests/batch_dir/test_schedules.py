"""Workers of a folder follow its schedules by the server's clock, with real commands: one run for each time."""

import asyncio
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice import Client
from sluice.batch.schedules import Schedule, Schedules
from tests.batch.helpers import says, write
from tests.batch_dir.test_directory import NOON, Clock, at_work
from tests.queue.helpers import until

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
IGNORES = "import sys\nsys.stdin.read()"  # a feeder that leaves the inbox as it is


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "batch" / "inbox").mkdir(parents=True)
    return tmp_path / "batch"


def nightly(folder: Path, **changed: object) -> Schedules:
    file = write(folder.parent / "in.jsonl", says("a"))
    schedules = Schedules(folder)
    given = {"crontab": "0 2 * * *", "since": NOON.timestamp(), "id": "0123abcd", "file": str(file), "cwd": "/"}
    schedules.write("night", Schedule(**{**given, **changed}))  # type: ignore[arg-type]
    return schedules


def waiting(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "inbox").glob("*.jsonl"))


RUN = "batch_night_202603140200000123abcd"


async def test_of_two_workers_one_submits_the_file_of_a_time_and_not_before(
    redis_url: str, folder: Path, db: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    clock, schedules = Clock(), nightly(folder)
    ways = {"code": IGNORES, "look_s": 0.1, "batch_schedule": "0 0 1 1 *"}
    async with (
        at_work(redis_url, folder, clock, worker_name="ada", **ways),
        at_work(redis_url, folder, clock, worker_name="ben", **ways),
    ):
        clock.moment += 13 * HOUR
        await asyncio.sleep(0.5)
        assert waiting(folder) == []
        clock.moment += HOUR
        await until(lambda: schedules.state("night").ran is not None, within_s=60)
        async with Client(redis_url) as client:
            assert (await client.batch_status(RUN)).status == "validating"
        clock.moment += DAY
        await until(lambda: schedules.state("night").skipped is not None, within_s=60)
    assert waiting(folder) == [f"{RUN}.jsonl"]


async def test_a_worker_that_starts_in_the_morning_makes_up_for_the_night_once(redis_url: str, folder: Path) -> None:
    clock, schedules = Clock(), nightly(folder)
    clock.moment += 20 * HOUR
    for _ in range(2):
        async with at_work(redis_url, folder, clock, code=IGNORES, look_s=0.1, batch_schedule="0 0 1 1 *"):
            await until(lambda: schedules.state("night").ran is not None, within_s=60)
            await asyncio.sleep(0.5)
    assert waiting(folder) == [f"{RUN}.jsonl"]


async def test_a_command_whose_worker_dies_is_resumed_by_the_next(redis_url: str, folder: Path) -> None:
    clock, out = Clock(), folder.parent / "out-2026-03-14.jsonl"
    schedules = nightly(folder, output=str(out).replace("2026-03-14", "%Y-%m-%d"))
    clock.moment += 15 * HOUR
    command = [sys.executable, "-m", "sluice.cli", "batch", "schedule", "follow", "night", "--dir", str(folder)]
    env = {**os.environ, "SLUICE_REDIS_URL": redis_url}
    child = await asyncio.create_subprocess_exec(
        *command, "--at", str(clock.moment.timestamp()), env=env, stdin=asyncio.subprocess.PIPE
    )
    await until(lambda: out.with_name(f"{out.name}.run").exists(), within_s=60)
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    assert schedules.state("night").started is not None
    async with at_work(redis_url, folder, clock, code=IGNORES, look_s=0.1, model_name="default"):
        await until(lambda: schedules.state("night").ran is not None, within_s=60)
    assert (schedules.state("night").code, len(out.read_bytes().splitlines())) == (0, 1)


async def test_a_command_is_paused_when_its_worker_stops(redis_url: str, folder: Path) -> None:
    clock, out = Clock(), folder.parent / "out-2026-03-14.jsonl"
    unserved = "--model", "none", "--wait"  # without --wait the run is refused, and soon ended
    schedules = nightly(folder, output=str(out).replace("2026-03-14", "%Y-%m-%d"), options=unserved)
    clock.moment += 15 * HOUR
    async with at_work(redis_url, folder, clock, code=IGNORES, look_s=0.1, grace_s=30):
        await until(lambda: out.with_name(f"{out.name}.run").exists(), within_s=60)
    state = schedules.state("night")
    assert (state.started is not None, state.ran, schedules.is_running("night")) == (True, None, False)
