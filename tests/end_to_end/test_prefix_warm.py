"""Prompts that a worker or `sluice prefix warm` computes before they are asked for."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sluice import Client, Finished
from tests.support.stack import ROOT, TINY_CHAT, WorkerProcess

SYSTEM = "Answer each question in one word. " * 30


async def cached_tokens(client: Client) -> int:
    """Return the tokens that the first request with the system prompt finds."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello!"}]
    job = await client.submit({"messages": messages, "temperature": 0, "max_tokens": 4})
    events = [event async for event in client.stream(job.id)]
    assert isinstance(events[-1], Finished), events[-1]
    usage: Any = events[-1].usage
    return int(usage.cached_tokens)


def sluice(*args: str, folder: Path, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process of its own, in a folder without `.env`. `settings`: of its environment."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLUICE_")}
    command = [sys.executable, "-m", "sluice.cli", *args]
    return subprocess.run(
        command,
        env={**env, **settings, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


def prompts(folder: Path) -> Path:
    file = folder / "prompts.json"
    file.write_text(json.dumps([SYSTEM]))
    return file


@pytest.mark.slow
async def test_a_worker_computes_the_prompts_of_its_file_and_pins_them_on_disk(
    redis_url: str, client: Client, tmp_path: Path
) -> None:
    folder = tmp_path / "prefixes"
    with WorkerProcess(redis_url, prefix_disk_dir=folder, prefix_warm=prompts(tmp_path)) as worker:
        until = time.monotonic() + 30
        while "warmed 1 of 1 conversations" not in worker.log():
            assert time.monotonic() < until, worker.log()
            time.sleep(0.02)
        assert await cached_tokens(client) > 150
        worker.signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    assert list(folder.glob("*.pin"))


@pytest.mark.slow
async def test_the_command_computes_prompts_for_the_workers(redis_url: str, client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    given = ("prefix", "warm", "--file", str(prompts(tmp_path)), "--model", str(TINY_CHAT), "--dir", str(folder))
    for _ in range(2):
        done = sluice(*given, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "conversation 1: " in done.stderr
    assert "nothing is new" in done.stderr
    assert " 0 were found on disk" not in done.stderr
    with WorkerProcess(redis_url, prefix_disk_dir=folder):
        assert await cached_tokens(client) > 150


@pytest.mark.slow
def test_the_command_fails_and_says_why_if_nothing_is_written(tmp_path: Path) -> None:
    given = (
        "prefix",
        "warm",
        "--file",
        str(prompts(tmp_path)),
        "--model",
        str(TINY_CHAT),
        "--dir",
        str(tmp_path / "p"),
    )
    done = sluice(*given, folder=tmp_path, SLUICE_PREFIX_DISK_GB="0.00001")
    assert done.returncode == 1, done.stderr
    assert "conversation 1: nothing is written: " in done.stderr
    assert "SLUICE_PREFIX_DISK_GB" in done.stderr


@pytest.mark.slow
def test_a_bad_file_is_refused_at_start(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    worker = WorkerProcess(redis_url, prefix_warm=tmp_path / "bad.json")
    code = worker.start(wait=False).wait(60)
    assert code == 2
    assert "SLUICE_PREFIX_WARM=" in worker.log()
