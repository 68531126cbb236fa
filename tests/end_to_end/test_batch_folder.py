"""Files in a folder, with real workers and feeders: started on schedule, and run to the end despite crashes."""

import asyncio
import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.batch_dir.test_directory import MINUTE, Clock
from tests.fakes import FakeChat
from tests.queue.helpers import settings, until, working
from tests.support.stack import WorkerProcess
from worker.batch_dir import BatchDirectory

pytestmark = pytest.mark.usefixtures("worker")
_WITHIN_S = 60


def line(k: int, model: str = "gpt-4o-mini") -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": f"Count to {3 + k % 5}."}], "temperature": 0}
    return {"custom_id": f"line-{k}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def write(path: Path, lines: int, **given: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line(k, **given)) + "\n" for k in range(lines)))


def answers(run: Path) -> dict[str, str]:
    """Return the answers by custom_id, each of which occurs once."""
    said = [json.loads(raw) for raw in (run / "output.jsonl").read_text().splitlines()]
    found = {each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"] for each in said}
    assert len(found) == len(said)
    return found


def expected(lines: int) -> dict[str, str]:
    return {f"line-{k}": " ".join(str(n) for n in range(1, 4 + k % 5)) for k in range(lines)}


def wait(true: Callable[[], bool], log: Callable[[], str]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not true():
        assert time.monotonic() < deadline, log()
        time.sleep(0.02)


def ended(folder: Path, run: str, shelf: str = "done") -> Callable[[], bool]:
    return (folder / shelf / run).is_dir


def is_fed(run: Path) -> bool:
    with (run / "run").open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def feeder_of(run: Path) -> int:
    """Return the process id of the run's feeder."""
    return int(re.findall(rb"process (\d+) on", (run / "run").read_bytes())[-1])


def is_at_it(run: Path) -> Callable[[], bool]:
    """Return a check that is True once some lines are answered."""
    return lambda: (run / "output.jsonl").exists() and (run / "output.jsonl").stat().st_size > 0


async def test_a_file_for_openai_s_own_service_is_taken_in_at_its_time_and_answered(
    redis_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker of the module answers; the one in this process only keeps the time."""
    write(tmp_path / "inbox" / "prompts.jsonl", 20)
    caplog.set_level("INFO")
    known = settings(redis_url, model_name="nobody", poll_s=0.05, batch_models="*=default")
    batches, clock = BatchDirectory(str(tmp_path), known), Clock()
    async with working(known, FakeChat().chat, crons=[batches.cron], clock=clock) as keeper:
        running = asyncio.create_task(batches.run(keeper.stopping, keeper.force_stop))
        await until(lambda: batches.cron.next_run is not None)
        clock.moment += MINUTE
        await until(lambda: "completed: 20 of 20 lines" in caplog.text, within_s=_WITHIN_S)
        keeper.stop()
        await running
    assert "failed" not in caplog.text
    (done,) = (tmp_path / "done").iterdir()
    assert answers(done) == expected(20)
    assert not any((tmp_path / "running").iterdir())
    assert not any((tmp_path / "inbox").iterdir())


async def test_what_was_taken_in_is_answered_without_another_slot_though_the_feeder_died_at_the_first_file(
    redis_url: str, tmp_path: Path
) -> None:
    for name, lines in (("a", 40), ("b", 5), ("c", 5)):
        write(tmp_path / "inbox" / f"{name}.jsonl", lines)
    known = settings(redis_url, model_name="nobody", poll_s=0.05, batch_models="*=default")
    batches, clock = BatchDirectory(str(tmp_path), known, search_s=0.5), Clock()
    async with working(known, FakeChat().chat, crons=[batches.cron], clock=clock) as keeper:
        running = asyncio.create_task(batches.run(keeper.stopping, keeper.force_stop))
        await until(lambda: batches.cron.next_run is not None)
        clock.moment += MINUTE
        await until(lambda: any((tmp_path / "running").glob("*_a_*/output.jsonl")), within_s=_WITHIN_S)
        os.kill(feeder_of(next((tmp_path / "running").glob("*_a_*"))), signal.SIGKILL)
        await until(lambda: len(list((tmp_path / "done").glob("*"))) == 3, within_s=_WITHIN_S)
        keeper.stop()
        await running
    assert {run.name.split("_")[1]: answers(run) for run in (tmp_path / "done").iterdir()} == {
        "a": expected(40),
        "b": expected(5),
        "c": expected(5),
    }


@pytest.mark.slow
def test_a_run_whose_worker_was_killed_is_gone_on_with_by_another(redis_url: str, tmp_path: Path) -> None:
    run = tmp_path / "running" / "batch_0123456789ab"
    write(run / "input.jsonl", 100)
    given = {"batch_dir": tmp_path, "batch_models": "*=default", "model_name": "other", "lease_s": 1}
    with WorkerProcess(redis_url, **given) as ada:
        wait(is_at_it(run), ada.log)
        ada.signal(signal.SIGKILL)
        wait(lambda: not is_fed(run), ada.log)
    assert run.is_dir()
    with WorkerProcess(redis_url, **given) as ben:
        wait(ended(tmp_path, run.name), ben.log)
    assert answers(tmp_path / "done" / run.name) == expected(100)


def test_a_worker_that_is_told_to_stop_tells_its_feeder_and_the_run_waits_for_the_next(
    redis_url: str, tmp_path: Path
) -> None:
    run = tmp_path / "running" / "batch_0123456789ab"
    write(run / "input.jsonl", 500)
    with WorkerProcess(redis_url, batch_dir=tmp_path, batch_models="*=default", model_name="other") as worker:
        wait(is_at_it(run), worker.log)
        began = time.monotonic()
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert time.monotonic() - began < 25
        assert "the feeder failed" not in worker.log()
        assert "Traceback" not in worker.log()
    assert not is_fed(run)


def test_a_folder_that_cannot_be_is_a_sentence_at_the_start(
    redis_url: str, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(redis_url, batch_dir=str(tmp_path / "file")).startswith("SLUICE_BATCH_DIR=")
